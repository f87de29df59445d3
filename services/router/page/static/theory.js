// The gain of speculation in closed form, as in cluster/speculation/speed.py; a test compares the two over a grid.
// Every draft token is accepted with probability `acceptance`, independently. Times are in one unit.

// E = (1 - a**(k+1)) / (1 - a): tokens of a round of k drafts, including the target's own.
export function expectedTokens(acceptance, k) {
  return acceptance === 1 ? k + 1 : (1 - acceptance ** (k + 1)) / (1 - acceptance);
}

// Seconds per round: the drafts, followed by the verify step.
export function roundTime(k, { draft, verify, roundTrip }) {
  return k * draft + verify + roundTrip;
}

// With run-ahead the next drafts are made while the target verifies; this is the best case, in which all of them fit.
export function overlappedRoundTime(k, { draft, verify, roundTrip }) {
  return Math.max(verify, k * draft) + roundTrip;
}

// Tokens per second relative to plain decoding, whose steps take `decode`.
export function speedup(acceptance, k, costs, time = roundTime) {
  return (expectedTokens(acceptance, k) * (costs.decode ?? costs.verify)) / time(k, costs);
}

// The k in 0 .. maximum with the largest speedup; 0 is plain decoding.
export function bestK(acceptance, costs, maximum = 64, time = roundTime) {
  let best = 0;
  let gain = 1;
  for (let k = 1; k <= maximum; k += 1) {
    const own = speedup(acceptance, k, costs, time);
    if (own > gain) [best, gain] = [k, own];
  }
  return best;
}
