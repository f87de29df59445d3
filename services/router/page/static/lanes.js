// The running streams: one lane each, one mark per token.

import { element, formatShare } from "./dom.js";
import { kindsOf } from "./rounds.js";

const MAX_LANES = 12;
const MAX_MARKS = 160;
const QUIET_S = 8; // a silent lane is removed after this time, an ended one sooner
const ENDED_S = 2;

export class Lanes {
  constructor(list, more) {
    this.list = list;
    this.more = more;
    this.lanes = new Map();
    this.unseen = new Map(); // choices without a lane: time of their last step
  }

  add(choice, steps, hasEnded, now) {
    let lane = this.lanes.get(choice);
    if (!lane && this.lanes.size >= MAX_LANES) this.removeEnded();
    if (!lane && this.lanes.size >= MAX_LANES) {
      if (hasEnded) this.unseen.delete(choice);
      else this.unseen.set(choice, now);
      return;
    }
    lane ??= this.begin(choice);
    lane.heardAt = now;
    lane.hasEnded ||= hasEnded;
    const marks = document.createDocumentFragment();
    for (const [drafted, accepted, numTokens] of steps) {
      lane.drafted += drafted;
      lane.accepted += accepted;
      const kinds = kindsOf(drafted, accepted, numTokens);
      const round = element("span", { class: drafted ? "round" : "round is-plain" });
      round.append(...kinds.map((kind) => element("i", { class: kind })));
      marks.append(round);
      lane.numMarks += kinds.length;
    }
    lane.marks.append(marks);
    while (lane.numMarks > MAX_MARKS) {
      lane.numMarks -= lane.marks.firstChild.childElementCount;
      lane.marks.firstChild.remove();
    }
    lane.marks.scrollLeft = lane.marks.scrollWidth;
    lane.node.classList.toggle("has-ended", lane.hasEnded);
    lane.share.textContent = lane.drafted ? formatShare(lane.accepted / lane.drafted) : "plain";
  }

  begin(choice) {
    const marks = element("div", { class: "marks", "aria-hidden": "true" });
    const share = element("span", { class: "share" });
    const node = element("li", {}, marks, share);
    this.list.append(node);
    const lane = { node, marks, share, numMarks: 0, drafted: 0, accepted: 0, hasEnded: false, heardAt: 0 };
    this.lanes.set(choice, lane);
    this.unseen.delete(choice);
    return lane;
  }

  // Removes the lane that ended first.
  removeEnded() {
    const ended = [...this.lanes].find(([, lane]) => lane.hasEnded);
    if (ended) this.remove(...ended);
  }

  remove(choice, lane) {
    lane.node.remove();
    this.lanes.delete(choice);
  }

  sweep(now) {
    for (const [choice, lane] of this.lanes) {
      if (now - lane.heardAt >= (lane.hasEnded ? ENDED_S : QUIET_S)) this.remove(choice, lane);
    }
    for (const [choice, heardAt] of this.unseen) if (now - heardAt > QUIET_S) this.unseen.delete(choice);
    this.more.textContent = this.unseen.size ? `and ${this.unseen.size} more` : "";
    return this.lanes.size;
  }
}
