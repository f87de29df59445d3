// Effect of another depth, draft or network: sliders that follow the measurements until one is moved.

import { byId, formatMs, formatNumber, formatShare, svg } from "./dom.js";
import { bestK, expectedTokens, overlappedRoundTime, roundTime, speedup } from "./theory.js";

const NUM_ROUNDS = 4;
const LEFT = 64;
const LANE = 30;
const BAR = 18;
// Sliders of times are logarithmic: 10 us to 1 s.
const toMs = (position) => 10 ** Number(position);
const toPosition = (seconds) => Math.log10(Math.min(Math.max(1e3 * seconds, 0.01), 1000));

export class WhatIf {
  constructor() {
    this.figure = byId("whatif-figure");
    this.follow = byId("whatif-follow");
    this.inputs = {};
    for (const name of ["k", "acceptance", "draft", "verify", "decode", "roundTrip"]) {
      this.inputs[name] = byId(`whatif-${name}`);
      this.inputs[name].addEventListener("input", () => {
        this.follow.checked = false;
        this.draw();
      });
    }
    this.follow.addEventListener("change", () => this.fill(this.live));
    for (const mode of document.getElementsByName("whatif-mode")) mode.addEventListener("change", () => this.draw());
    this.live = {};
    new ResizeObserver(() => this.draw()).observe(this.figure);
  }

  // `live`: k, acceptance, and seconds; null if not measured.
  fill(live) {
    this.live = live;
    if (!this.follow.checked) return;
    for (const [name, input] of Object.entries(this.inputs)) {
      const value = live[name] ?? null;
      if (value === null) continue;
      if (name === "k") input.value = Math.round(value);
      else if (name === "acceptance") input.value = Math.min(value, 0.99);
      else input.value = toPosition(value);
    }
    this.draw();
  }

  draw() {
    const k = Number(this.inputs.k.value);
    const acceptance = Number(this.inputs.acceptance.value);
    const costs = {};
    for (const name of ["draft", "verify", "decode", "roundTrip"]) costs[name] = toMs(this.inputs[name].value) / 1e3;
    const isOverlapped = byId("whatif-overlapped").checked;
    const time = isOverlapped ? overlappedRoundTime : roundTime;
    this.tell("k", String(k));
    this.tell("acceptance", formatShare(acceptance));
    for (const name of ["draft", "verify", "decode", "roundTrip"]) this.tell(name, formatMs(costs[name]));
    const perRound = expectedTokens(acceptance, k);
    const gain = k === 0 ? 1 : speedup(acceptance, k, costs, time);
    byId("whatif-gain").textContent = `${formatNumber(gain)}×`;
    byId("whatif-summary").textContent =
      `${formatNumber(perRound)} tokens every ${formatMs(k === 0 ? costs.decode : time(k, costs))}, ` +
      `${formatNumber(gain)} times plain decoding. The best k here is ${bestK(acceptance, costs, 16, time)}.`;
    this.drawRounds(k, perRound, costs, time, isOverlapped);
  }

  tell(name, text) {
    this.inputs[name].setAttribute("aria-valuetext", text);
    byId(`whatif-${name}-value`).textContent = text;
  }

  drawRounds(k, perRound, costs, time, isOverlapped) {
    const width = this.figure.clientWidth;
    if (width < 100) return;
    const round = k === 0 ? costs.decode : time(k, costs);
    const span = NUM_ROUNDS * round;
    const x = (at) => LEFT + (at / span) * (width - LEFT - 8);
    const height = 3 * LANE + 34;
    const chart = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img" });
    chart.setAttribute("aria-label", byId("whatif-summary").textContent);
    ["draft", "target", "plain"].forEach((name, lane) => {
      chart.append(svg("text", { x: 0, y: 6 + lane * LANE + 13, class: "label" }, name));
    });
    const bar = (lane, from, to, kind) => {
      if (to <= from || from >= span) return;
      const size = { x: x(from), width: Math.max(x(Math.min(to, span)) - x(from) - 0.75, 0.75), height: BAR };
      chart.append(svg("rect", { ...size, y: 6 + lane * LANE, rx: 1.5, class: kind }));
    };
    for (let number = 0; number < NUM_ROUNDS; number += 1) {
      const began = number * round;
      const verifyAt = k === 0 ? began : isOverlapped ? began : began + k * costs.draft + costs.roundTrip / 2;
      for (let token = 0; token < k; token += 1) {
        bar(0, began + token * costs.draft, began + (token + 1) * costs.draft, "draft");
      }
      bar(1, verifyAt, verifyAt + (k === 0 ? costs.decode : costs.verify), k === 0 ? "decode" : "verify");
      chart.append(
        svg("line", { x1: x(began + round) - 0.5, x2: x(began + round) - 0.5, y1: 2, y2: 2 * LANE + 2, class: "rule" }),
      );
    }
    const numPlain = Math.min(Math.ceil(span / costs.decode), 400);
    for (let step = 0; step < numPlain; step += 1) bar(2, step * costs.decode, (step + 1) * costs.decode, "decode");
    const caption =
      `${formatMs(span)}: ${formatNumber(NUM_ROUNDS * perRound, 1)} tokens in ${NUM_ROUNDS} rounds, ` +
      `${formatNumber(span / costs.decode, 1)} without drafts`;
    chart.append(svg("text", { x: LEFT, y: height - 8, class: "label" }, caption));
    this.figure.replaceChildren(chart);
  }
}
