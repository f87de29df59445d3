"""Compares the reported with the actual gain of speculation, with simulated engines: `python -m bench.gain`.

It runs at several acceptances and numbers of streams, in virtual time (`cluster.simulator`), so that the output is the
same every time:

- *gain*: `outrider_speculation_gain_ratio` as a page would show it, and tokens a second with the controller's k over
  those without speculation.
- *goodput*: `outrider_goodput_ratio` of the same run, and tokens a second with the best k of 1 and more that was tried
  over those without speculation. It is reported even if the controller chooses k = 0.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from bench.in_process import SIMULATED
from cluster.config.file import load_config
from cluster.simulator.virtual import VirtualCluster

ACCEPTANCES = (0.3, 0.6, 0.9)
STREAMS = (1, 8, 32)
DEPTHS = (1, 2, 3, 4, 6, 8)  # that are tried
FOREVER = 50_000  # tokens
GAIN, GOODPUT = "outrider_speculation_gain_ratio", "outrider_goodput_ratio"


@dataclass(frozen=True, slots=True)
class Course:
    """Results of one run, after its warm-up. Ratios are means over readings."""

    tokens_per_second: float
    depth: float
    gain: float = 1.0
    goodput: float = 1.0


def run(
    acceptance: float,
    num_streams: int,
    num_speculative_tokens: int | None,
    *,
    round_trip_ms: float = 2.0,
    warm_up_seconds: float = 10.0,
    seconds: float = 30.0,
) -> Course:
    """`num_speculative_tokens`: what all requests ask for; None: the controller chooses."""
    settings = {
        "simulation.acceptance": acceptance,
        "simulation.round_trip_ms": round_trip_ms,
        "target.max_num_batched_tokens": 2048,
        "target.max_model_len": 100_000,
        "draft.max_num_batched_tokens": 2048,
    }
    cluster = VirtualCluster(load_config(None, [*SIMULATED, *(f"{key}={value}" for key, value in settings.items())]))
    for _ in range(num_streams):
        cluster.submit(FOREVER, num_speculative_tokens=num_speculative_tokens)
    cluster.run(warm_up_seconds)
    started_at, before = cluster.time.now(), (cluster.num_tokens, cluster.num_draft_tokens, cluster.num_rounds)
    gains, goodputs = [], []
    while cluster.time.now() < started_at + seconds:
        cluster.run(1.0)
        gains += cluster.readings(GAIN).values()
        goodputs += cluster.readings(GOODPUT).values()
    tokens, drafts, rounds = (
        now - then
        for now, then in zip((cluster.num_tokens, cluster.num_draft_tokens, cluster.num_rounds), before, strict=True)
    )
    means = (statistics.fmean(ratios) if ratios else 1.0 for ratios in (gains, goodputs))
    return Course(tokens / (cluster.time.now() - started_at), drafts / rounds, *means)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.gain", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--round-trip-ms", type=float, default=2.0)
    arguments = parser.parse_args(argv)
    print("| streams | acceptance | k | gain, said | measured | off by | goodput, said | best k | measured | off by |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for num_streams in STREAMS:
        for acceptance in ACCEPTANCES:

            def tried(k: int | None, acceptance: float = acceptance, num_streams: int = num_streams) -> Course:
                return run(acceptance, num_streams, k, round_trip_ms=arguments.round_trip_ms)

            plain, auto = tried(0).tokens_per_second, tried(None)
            rates = {depth: tried(depth).tokens_per_second for depth in DEPTHS}
            best = max(rates, key=lambda depth: rates[depth])
            gain, goodput = auto.tokens_per_second / plain, rates[best] / plain
            print(
                f"| {num_streams} | {acceptance} | {auto.depth:.1f} | {auto.gain:.2f} | {gain:.2f} "
                f"| {auto.gain / gain - 1:+.0%} | {auto.goodput:.2f} | {best} | {goodput:.2f} "
                f"| {auto.goodput / goodput - 1:+.0%} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
