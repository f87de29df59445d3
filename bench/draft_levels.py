"""What one more draft token of every sequence takes, by their number: `python -m bench.draft_levels`.

Sequences with 200 tokens each are drafted for, level after level, at T = 1, as a draft worker does it. A level's time
falls into the kernels' (the model, and drawing tokens) and what lies outside them. Interleaved; medians with quartiles.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.machine import describe_machine
from bench.step_parts import Milliseconds, timed_kernels
from cluster.config_file import load_config
from cluster.drafters.base import Drafter, DraftSequence
from cluster.drafters.registry import make_drafter
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams

NUM_SEQUENCES = (1, 4, 16, 64)
CONTEXT_LEN = 200
LEVELS = 5  # of a round
WARM_UP = 5  # rounds


@dataclass(frozen=True, slots=True)
class Level:
    num_sequences: int
    level: Milliseconds
    outside_kernels: Milliseconds


class _Load:
    """So many sequences that are drafted for together."""

    def __init__(self, drafter: Drafter, num_sequences: int) -> None:
        rng = random.Random(num_sequences)
        self._drafter = drafter
        self._sequences = [
            DraftSequence(
                [rng.randrange(drafter.vocab_size) for _ in range(CONTEXT_LEN)],
                1,
                SamplingParams(temperature=1.0),
                NoiseKey(index, 1),
                num_speculative_tokens=LEVELS,
                window=2 * LEVELS,
            )
            for index in range(num_sequences)
        ]

    def open(self) -> None:
        for sequence in self._sequences:
            if not self._drafter.admit(sequence):
                raise SystemExit(f"no room for {len(self._sequences)} sequences: give the draft more kv_cache_bytes")
        while any(not sequence.parents for sequence in self._sequences):
            self._drafter.draft([sequence for sequence in self._sequences if not sequence.parents])

    def close(self) -> None:
        for sequence in self._sequences:
            self._drafter.release(sequence)

    def round(self, levels: list[float], outside: list[float]) -> None:
        with timed_kernels() as in_kernels:
            for level in range(LEVELS):
                in_kernels.clear()
                started_at = time.perf_counter()
                self._drafter.draft(self._sequences)
                seconds = time.perf_counter() - started_at
                if level > 0:  # the first also computes what was committed
                    levels.append(seconds)
                    outside.append(seconds - sum(in_kernels))
        for sequence in self._sequences:  # the first draft comes true, the others don't
            kept = sequence.commit(sequence.num_committed, [sequence.token_of(0), 1])
            if kept is not None:
                self._drafter.rewind(sequence, kept)


def measure(drafter: Drafter, num_sequences: int, rounds: int) -> Level:
    load = _Load(drafter, num_sequences)
    load.open()
    levels: list[float] = []
    outside: list[float] = []
    for _ in range(WARM_UP):
        load.round([], [])
    for _ in range(rounds):
        load.round(levels, outside)
    load.close()
    return Level(num_sequences, Milliseconds.of(levels), Milliseconds.of(outside))


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    config = load_config(arguments.config, ["draft.enable_prefix_caching=false", *arguments.overrides])
    drafter = make_drafter(config, None)
    results = [measure(drafter, number, arguments.rounds) for number in NUM_SEQUENCES]
    print("| sequences | a level, ms | of it outside kernels, ms | over one sequence |\n| --- | --- | --- | --- |")
    for result in results:
        ratio = result.level.median / results[0].level.median
        print(f"| {result.num_sequences} | {result.level} | {result.outside_kernels} | {ratio:.2f} |")
    if arguments.out is not None:
        report = {"draft": config.draft.model_dump(mode="json"), "machine": describe_machine()}
        report["levels"] = [asdict(result) for result in results]
        arguments.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.draft_levels", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", type=Path, help="YAML configuration of the cluster")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main())
