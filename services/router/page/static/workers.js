// Pools and links as a table, and the times of steps, drafts and round trips.

import { element, formatMs, formatShare } from "./dom.js";

const NUM_STEPS = 64;

// Times of steps, drafts and round trips: medians of single steps; for an engine without these, means of its
// metrics since the last update.
export class Costs {
  constructor() {
    this.before = new Map();
    this.steps = { verify: [], decode: [] }; // the latest
    this.values = { verify: null, decode: null, draft: null, roundTrip: null };
  }

  update(targets) {
    const counted = { verify: [0, 0], decode: [0, 0] };
    const trips = [];
    const answers = [];
    for (const target of targets) {
      for (const [name, labels, value] of target.readings ?? []) {
        const at = name === "outrider_steps" ? 0 : name === "outrider_step_seconds" ? 1 : null;
        if (at !== null && labels.kind in counted) {
          const key = `${target.name} ${labels.kind} ${at}`;
          const before = this.before.get(key) ?? 0;
          counted[labels.kind][at] += value >= before ? value - before : value;
          this.before.set(key, value);
        }
        if (name === "outrider_link_round_trip_seconds") trips.push(value);
      }
      answers.push(...(target.answers ?? []));
      for (const [, , seconds, sequences, rows, hasPrompts] of target.steps ?? []) {
        if (!hasPrompts) this.steps[rows > sequences ? "verify" : "decode"].push([seconds, sequences]);
      }
    }
    for (const [kind, [count, seconds]] of Object.entries(counted)) {
      this.steps[kind] = this.steps[kind].slice(-NUM_STEPS);
      if (count > 0 && !this.steps[kind].length) this.values[kind] = seconds / count;
    }
    if (this.steps.verify.length) {
      // A step takes longer for more sequences: only equal batches are compared, and otherwise the times count as equal.
      const usual = median(this.steps.verify.map(([, sequences]) => sequences));
      const like = (steps) => steps.filter(([, sequences]) => sequences === usual).map(([seconds]) => seconds);
      this.values.verify = median(like(this.steps.verify));
      const decoding = like(this.steps.decode);
      this.values.decode = decoding.length ? median(decoding) : this.values.verify;
    } else if (this.steps.decode.length) {
      this.values.decode = median(this.steps.decode.map(([seconds]) => seconds));
    }
    const drafting = answers.filter((answer) => answer[4] > 0);
    if (drafting.length) this.values.draft = median(drafting.map((answer) => answer[4]));
    const apart = answers.map((answer) => Math.max(0, answer[2] - answer[3]));
    if (apart.length) this.values.roundTrip = median(apart);
    else if (trips.length) this.values.roundTrip ??= Math.min(...trips);
    return this.values;
  }
}

const median = (values) => [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)];

const STATES = { up: "up", down: "down", draining: "draining", stuck: "stuck", refused: "refused" };

export function drawWorkers(body, targets, numTargets) {
  const rows = [];
  for (const target of targets) {
    const isUp = target.status === "up";
    const state = element("span", { class: isUp ? "state is-up" : "state is-down" }, STATES[target.status] ?? target.status);
    const [used, all] = target.kv ?? [0, 0];
    const links = target.links ? `${target.links[0]} of ${target.links[1]} drafts linked` : "";
    const load = target.kv ? `${target.running} running, ${target.waiting} waiting; KV ${formatShare(all ? used / all : 0)}` : "";
    const [late, limited] = target.late ?? [0, 0];
    const limits = limited ? `${late} of ${limited} requests late since its start` : "";
    rows.push(row(target.name, state, [target.model, load, limits, links].filter(Boolean).join("; ")));
    const drafts = new Map();
    for (const [name, labels, value] of target.readings ?? []) {
      if (name === "outrider_link_round_trip_seconds") drafts.set(labels.draft, { trip: value });
    }
    for (const [draft, , , , step, batch] of target.answers ?? []) {
      drafts.set(draft, { ...drafts.get(draft), step, batch });
    }
    for (const [draft, { trip, step, batch }] of [...drafts].sort()) {
      const parts = [];
      if (trip !== undefined) parts.push(`shortest round trip ${formatMs(trip)}`);
      if (step !== undefined) parts.push(`${formatMs(step)} per token of ${batch} ${batch === 1 ? "sequence" : "sequences"}`);
      const linked = element("span", { class: "state is-up" }, trip === undefined ? "in process" : "linked");
      rows.push(row(`↳ ${draft}`, linked, parts.join("; ")));
    }
  }
  if (numTargets > targets.length) rows.push(row("", "", `and ${numTargets - targets.length} more targets`));
  body.replaceChildren(...rows);
}

const row = (name, state, details) =>
  element(
    "tr",
    {},
    element("th", { scope: "row" }, name),
    element("td", {}, state),
    element("td", {}, details),
  );
