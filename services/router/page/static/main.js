// Builds the page and feeds it with events.

import { drawBars } from "./charts.js";
import { call, events, saveKey } from "./client.js";
import { byId, formatNumber, formatShare } from "./dom.js";
import { Lanes } from "./lanes.js";
import { Prompt } from "./prompt.js";
import { Recent, stepsOf } from "./rounds.js";
import { Timeline } from "./timeline.js";
import { WhatIf } from "./whatif.js";
import { Costs, drawWorkers } from "./workers.js";

const RETRY_MS = 2000;
const MAX_BARS = 16;
const LEAST_SHARE = 0.01; // minimum share of the steps for a bar

const recent = new Recent();
const lanes = new Lanes(byId("lanes"), byId("lanes-more"));
const timeline = new Timeline(byId("timeline"), byId("timeline-summary"), byId("timeline-target"), byId("timeline-hold"));
const whatIf = new WhatIf();
const costs = new Costs();
const prompt = new Prompt(showError);
let keyTyped = () => {};

const seconds = () => performance.now() / 1e3;

function showError(message, status = 0) {
  const line = byId("error");
  line.textContent = message;
  line.hidden = !message;
  if (status === 401) byId("key-form").hidden = false;
}

function showState(state, text) {
  byId("connection").className = `state ${state}`;
  byId("connection").textContent = text;
}

const handlers = {
  hello(hello) {
    byId("model").textContent = hello.model;
    byId("version").textContent = hello.version;
    prompt.welcome(hello);
    showState("is-up", "live");
  },

  steps({ choices, left_out: [leftOut, tokensLeftOut] }) {
    const now = seconds();
    for (const [choice, numTokens, flat, hasEnded] of choices) {
      const steps = stepsOf(flat, numTokens);
      recent.add(steps, numTokens, now);
      lanes.add(choice, steps, Boolean(hasEnded), now);
    }
    if (tokensLeftOut) recent.add([], tokensLeftOut, now);
    byId("left-out").hidden = leftOut === 0;
  },

  workers({ targets, num_targets: numTargets, num_up: numUp, num_running: numRunning }) {
    drawWorkers(byId("workers"), targets, numTargets);
    timeline.update(targets);
    const live = costs.update(targets);
    byId("figure-running").textContent = String(numRunning);
    byId("figure-targets").textContent = `${numUp} of ${numTargets}`;
    const summary = recent.summary(seconds());
    whatIf.fill({ k: summary.depth, acceptance: summary.chance, ...live });
    drawSummary(summary);
  },
};

function drawSummary({ tokensPerSecond, acceptance, tokensPerRound, byPosition, depths }) {
  byId("figure-rate").textContent = formatNumber(tokensPerSecond, 0);
  byId("figure-acceptance").textContent = formatShare(acceptance);
  byId("figure-length").textContent = formatNumber(tokensPerRound);
  const positions = byPosition.slice(0, MAX_BARS).map((value, position) => ({
    label: String(position + 1),
    value,
    text: String(Math.round(100 * value)),
    kind: "accepted-bar",
  }));
  drawBars(byId("positions"), positions, "No drafts in the last 30 seconds.");
  const all = depths.reduce((sum, count) => sum + count, 0);
  const deepest = depths.findLastIndex((count) => count >= LEAST_SHARE * all);
  const bars = depths.slice(0, Math.min(deepest, MAX_BARS) + 1).map((count, k) => ({
    label: String(k),
    value: count / all,
    text: count >= LEAST_SHARE * all ? String(Math.round((100 * count) / all)) : "",
    kind: k ? "accepted-bar" : "plain-bar",
  }));
  drawBars(byId("depths"), bars, "No steps in the last 30 seconds.");
}

async function feed() {
  for (;;) {
    try {
      const response = await call("page/events");
      showError("");
      byId("key-form").hidden = true;
      for await (const { name, data } of events(response)) handlers[name]?.(JSON.parse(data));
      showState("is-down", "the router closed the feed");
    } catch (error) {
      showState("is-down", error.status ? "refused" : "the router does not answer");
      if (error.status) showError(error.message, error.status);
      if (error.status === 401) {
        await new Promise((resolve) => {
          keyTyped = resolve;
        });
        continue;
      }
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  saveKey(byId("key").value.trim());
  byId("key").value = "";
  keyTyped();
});

setInterval(() => {
  const count = lanes.sweep(seconds());
  byId("lanes-empty").hidden = count > 0;
}, 500);

whatIf.draw();
drawSummary(recent.summary(seconds()));
feed();
