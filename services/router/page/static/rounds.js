// Reads rounds: the kind of each token, and the drafted and accepted tokens of the last 30 seconds.

const WINDOW_S = 30;
const LEAST_SHARE = 0.01; // minimum share of the rounds for a position to be shown

export const KINDS = {
  accepted: "accepted draft",
  correction: "correction by the target",
  bonus: "bonus token",
  plain: "plain decode",
};

// The kinds of the `numTokens` tokens of a step; a choice may end before the target's own token.
export function kindsOf(numDrafted, numAccepted, numTokens = numAccepted + 1) {
  if (numDrafted === 0) return Array(numTokens).fill("plain");
  const own = numAccepted < numDrafted ? "correction" : "bonus";
  return [...Array(numAccepted).fill("accepted"), own].slice(0, numTokens);
}

// The steps of one entry of the feed: [drafted, accepted, tokens], with one entry per plain decode.
export function stepsOf(flat, numTokens) {
  const steps = [];
  let left = numTokens;
  for (let at = 0; at < flat.length && left > 0; at += 2) {
    const [drafted, accepted] = [flat[at], flat[at + 1]];
    if (drafted === 0) {
      for (let plain = 0; plain < accepted; plain += 1) steps.push([0, 0, 1]);
      left -= accepted;
    } else {
      steps.push([drafted, accepted, Math.min(accepted + 1, left)]);
      left -= accepted + 1;
    }
  }
  return steps;
}

// The last 30 seconds of all choices.
export class Recent {
  constructor() {
    this.parts = []; // one per second
  }

  add(steps, numTokens, now) {
    let part = this.parts.at(-1);
    if (!part || now - part.at >= 1) {
      part = { at: now, tokens: 0, rounds: 0, tested: 0, drafted: [], accepted: [], depths: [] };
      this.parts.push(part);
      while (now - this.parts[0].at > WINDOW_S) this.parts.shift();
    }
    part.tokens += numTokens;
    for (const [drafted, accepted] of steps) {
      bump(part.depths, drafted);
      if (drafted) part.rounds += 1;
      part.tested += accepted + (accepted < drafted ? 1 : 0); // later drafts of a round were not compared
      for (let position = 0; position < drafted; position += 1) bump(part.drafted, position);
      for (let position = 0; position < accepted; position += 1) bump(part.accepted, position);
    }
  }

  // Sums over the window; rates are null if the divisor is 0.
  summary(now) {
    const parts = this.parts.filter((part) => now - part.at <= WINDOW_S);
    const drafted = columns(parts.map((part) => part.drafted));
    const accepted = columns(parts.map((part) => part.accepted));
    const [numDrafted, numAccepted] = [sum(drafted), sum(accepted)];
    const rounds = sum(parts.map((part) => part.rounds));
    const recent = parts.filter((part) => now - part.at <= 5);
    const seconds = recent.length ? Math.max(now - recent[0].at, 1) : 1;
    const tested = sum(parts.map((part) => part.tested));
    return {
      tokensPerSecond: sum(recent.map((part) => part.tokens)) / seconds,
      acceptance: numDrafted ? numAccepted / numDrafted : null,
      chance: tested ? numAccepted / tested : null,
      tokensPerRound: rounds ? 1 + numAccepted / rounds : null,
      depth: rounds ? numDrafted / rounds : null,
      byPosition: drafted
        .filter((count) => count >= LEAST_SHARE * rounds)
        .map((count, position) => (accepted[position] ?? 0) / count),
      depths: columns(parts.map((part) => part.depths)),
    };
  }
}

const bump = (counts, index) => {
  while (counts.length <= index) counts.push(0);
  counts[index] += 1;
};

const sum = (values) => values.reduce((total, value) => total + value, 0);

const columns = (rows) => {
  const length = Math.max(0, ...rows.map((row) => row.length));
  return Array.from({ length }, (_, index) => sum(rows.map((row) => row[index] ?? 0)));
};
