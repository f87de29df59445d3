// The last steps of a target, and next to them the answers of its drafters.

import { element, formatMs, formatShare, svg } from "./dom.js";

const NUM_STEPS = 12;
const NUM_KEPT = 256;
const MIN_IDLE = 0.05; // seconds
const LANE = 30;
const BAR = 18;
const LEFT = 64;

export class Timeline {
  constructor(figure, sentence, chooser, hold) {
    Object.assign(this, { figure, sentence, chooser, hold });
    this.targets = new Map(); // steps and answers by the target's name
    this.held = null; // a copy from when the display was held
    chooser.addEventListener("change", () => this.draw());
    hold.addEventListener("click", () => {
      this.held = this.held ? null : new Map([...this.targets].map(([name, kept]) => [name, { ...kept }]));
      hold.setAttribute("aria-pressed", this.held !== null);
      this.draw();
    });
    new ResizeObserver(() => this.draw()).observe(figure);
  }

  update(targets) {
    for (const target of targets) {
      const kept = this.targets.get(target.name) ?? { steps: [], answers: [] };
      const isNewer = (span, last, time) => !last || span[time] > last[time];
      if (target.steps?.length && !isNewer(target.steps.at(-1), kept.steps.at(-1), 0)) {
        Object.assign(kept, { steps: [], answers: [] }); // it was restarted, and its clock too
      }
      kept.steps = [...kept.steps, ...(target.steps ?? [])].slice(-NUM_KEPT);
      kept.answers = [...kept.answers, ...(target.answers ?? [])].slice(-NUM_KEPT);
      kept.tellsSteps = target.tells_steps === true;
      this.targets.set(target.name, kept);
    }
    const names = targets.map((target) => target.name);
    for (const name of this.targets.keys()) if (!names.includes(name)) this.targets.delete(name);
    if (String([...this.chooser.options].map((option) => option.value)) !== String(names)) {
      const chosen = this.chooser.value;
      this.chooser.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
      if (names.includes(chosen)) this.chooser.value = chosen;
      this.chooser.parentElement.hidden = names.length < 2;
    }
    if (!this.held) this.draw();
  }

  draw() {
    const kept = (this.held ?? this.targets).get(this.chooser.value);
    const steps = inOneGo(kept?.steps.slice(-NUM_STEPS) ?? []);
    const width = this.figure.clientWidth;
    if (!steps.length || width < 100) {
      const why = kept?.tellsSteps ? "No steps yet: send a prompt." : "This engine does not report single steps.";
      this.figure.replaceChildren(element("p", { class: "empty" }, kept ? why : ""));
      this.sentence.textContent = "";
      return;
    }
    const start = steps[0][0] - steps[0][2] - steps[0][1];
    const end = steps.at(-1)[0];
    const answers = kept.answers.filter((answer) => answer[1] > start && answer[1] - answer[2] < end);
    const drafts = [...new Set(answers.map((answer) => answer[0]))].sort();
    const x = (time) => LEFT + ((Math.min(Math.max(time, start), end) - start) / (end - start)) * (width - LEFT - 8);
    const height = LANE * (1 + Math.max(drafts.length, 1)) + 30;
    const chart = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img" });
    const lane = (index, name) => {
      const y = 6 + index * LANE;
      chart.append(
        svg("text", { x: 0, y: y + 13, class: "label" }, name),
        svg("line", { x1: LEFT, x2: width - 8, y1: y + BAR + 5, y2: y + BAR + 5, class: "rule" }),
      );
      return y;
    };
    const bar = (y, from, to, kind, title, inset = 0) => {
      const size = { x: x(from), y: y + inset, width: Math.max(x(to) - x(from) - 0.5, 0.75), height: BAR - 2 * inset };
      chart.append(svg("rect", { ...size, rx: 1.5, class: kind }, svg("title", {}, title)));
    };
    const target = lane(0, this.chooser.value);
    let [waited, computed, prompts] = [0, 0, 0];
    for (const [endedAt, waitedFor, seconds, sequences, rows, hasPrompts] of steps) {
      const kind = hasPrompts ? "prompt-step" : rows > sequences ? "verify" : "decode";
      const began = endedAt - seconds;
      if (waitedFor > 0) bar(target, began - waitedFor, began, "wait", `waits for drafts: ${formatMs(waitedFor)}`, 4);
      bar(target, began, endedAt, kind, `${WORDS[kind]}: ${formatMs(seconds)}, ${rows} rows of ${sequences} sequences`);
      waited += waitedFor;
      if (hasPrompts) prompts += seconds;
      else computed += seconds;
    }
    drafts.forEach((draft, index) => {
      const y = lane(index + 1, draft);
      for (const [own, cameAt, seconds, held, , batch] of answers) {
        if (own !== draft) continue;
        const onTheWay = Math.max(0, seconds - held) / 2; // both directions count as equal
        const title = `answer after ${formatMs(seconds)}, ${formatMs(held)} of it in the drafter, ${batch} sequences`;
        bar(y, cameAt - seconds, cameAt, "network", title, 7);
        bar(y, cameAt - onTheWay - held, cameAt - onTheWay, "draft", title);
      }
    });
    if (!drafts.length) {
      const y = lane(1, "drafts");
      chart.append(svg("text", { x: LEFT + 4, y: y + 13, class: "label" }, "no drafts were requested"));
    }
    const ms = 1e3 * (end - start);
    const numTicks = width < 600 ? 2 : 4;
    for (let tick = 0; tick <= numTicks; tick += 1) {
      const at = LEFT + (tick / numTicks) * (width - LEFT - 8);
      const anchor = tick === 0 ? "start" : tick === numTicks ? "end" : "middle";
      const text = `${((ms * tick) / numTicks).toFixed(ms < 40 ? 1 : 0)}${tick === numTicks ? " ms" : ""}`;
      chart.append(svg("text", { x: at, y: height - 4, class: "label", "text-anchor": anchor }, text));
    }
    const answered = answers.length ? answers.reduce((sum, answer) => sum + answer[2], 0) / answers.length : null;
    const held = answers.length ? answers.reduce((sum, answer) => sum + answer[3], 0) / answers.length : null;
    const share = (seconds) => formatShare(seconds / (end - start));
    this.sentence.textContent =
      `In the last ${steps.length === 1 ? "step" : `${steps.length} steps`} the target computed ${share(computed)} of the time` +
      (prompts ? `, another ${share(prompts)} in steps with prompts,` : "") +
      ` and waited ${share(waited)} for drafts.` +
      (answered === null ? "" : ` Drafts arrived ${formatMs(answered)} after their request, ${formatMs(held)} of that in the drafter.`);
    chart.setAttribute("aria-label", this.sentence.textContent);
    this.figure.replaceChildren(chart);
  }
}

// The steps after the target was last idle.
function inOneGo(steps) {
  for (let i = steps.length - 1; i > 0; i -= 1) {
    const [endedAt, waited, seconds] = steps[i];
    const idle = endedAt - seconds - waited - steps[i - 1][0];
    if (idle > Math.max(MIN_IDLE, 5 * seconds)) return steps.slice(i);
  }
  return steps;
}

const WORDS = { verify: "verifies drafts", decode: "decodes plainly", "prompt-step": "reads prompts" };
