// What speculation can gain, in closed form: cluster/speculation/speed.py, with which a test compares this over a grid.
// Every draft token is accepted with probability `acceptance`, independently. Times are in one unit.

// E = (1 - a**(k+1)) / (1 - a): tokens of a round of k drafts, the target's own included.
export function expectedTokens(acceptance, k) {
  return acceptance === 1 ? k + 1 : (1 - acceptance ** (k + 1)) / (1 - acceptance);
}

// Seconds a round: drafts, then the verify step, one after the other.
export function roundTime(k, { draft, verify, roundTrip }) {
  return k * draft + verify + roundTrip;
}

// With run-ahead the next drafts are made while the target verifies; this is the best case, where all of them fit.
export function overlappedRoundTime(k, { draft, verify, roundTrip }) {
  return Math.max(verify, k * draft) + roundTrip;
}

// Tokens a second against plain decoding, a step of which takes `decode`.
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
