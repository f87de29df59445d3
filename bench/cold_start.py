"""Measures the cost of speculation while nothing is known of a draft yet: `python -m bench.cold_start`.

Every repeat has a fresh cluster. One stream decodes without drafts, then with the k of a controller that knows nothing
yet, then without drafts again. The result is the speed with drafts over the speed without, for the first 200 tokens and
for those after them. By default the draft is `layer-skip` on a model that does not suit it: it is expensive and almost
never right.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.machine import describe_machine
from bench.speedup import MEASURED, READY_TIMEOUT_SECONDS, cluster_counters, spread
from bench.workload import held_out_prompts, token_times
from cluster.config.file import load_config
from services.launch.local import LocalCluster

FIRST_TOKENS = 200


@dataclass(slots=True)
class Parts:
    """Speeds of one repeat, relative to decoding without drafts."""

    first: float
    rest: float
    acceptance: float | None  # of what was drafted; None: nothing was


def measure(
    overrides: Sequence[str], config_path: Path | None, num_tokens: int, temperature: float, seed: int
) -> Parts:
    prompt = held_out_prompts(1, seed)[0]
    with LocalCluster(load_config(config_path, [*MEASURED, *overrides])) as cluster:
        cluster.wait_ready(READY_TIMEOUT_SECONDS)

        def seconds(num_speculative_tokens: int | None) -> tuple[float, float]:
            times = token_times(cluster.url, prompt, seed, temperature, num_speculative_tokens, num_tokens)
            return times[FIRST_TOKENS] - times[0], times[-1] - times[FIRST_TOKENS]

        seconds(0)  # warms up
        before, cold, after = seconds(0), seconds(None), seconds(0)
        counters = cluster_counters(cluster)
    first, rest = ((before[i] + after[i]) / 2 / cold[i] for i in range(2))
    num_drafts = counters["vllm:spec_decode_num_draft_tokens_total"]
    accepted = counters["vllm:spec_decode_num_accepted_tokens_total"]
    return Parts(first, rest, accepted / num_drafts if num_drafts else None)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    overrides = arguments.overrides or ["draft.drafter=layer-skip"]
    repeats = [
        measure(overrides, arguments.config, arguments.tokens, arguments.temperature, seed)
        for seed in range(arguments.repeats)
    ]
    print(f"{' '.join(overrides)}, T = {arguments.temperature:g}; over no speculation, medians (range)\n")
    print(f"first {FIRST_TOKENS} tokens: {spread([repeat.first for repeat in repeats], 2)}")
    print(f"those that follow: {spread([repeat.rest for repeat in repeats], 2)}")
    known = [repeat.acceptance for repeat in repeats if repeat.acceptance is not None]
    print(f"accepted of what was drafted: {statistics.mean(known):.2f}" if known else "nothing was drafted")
    arguments.out.write_text(
        json.dumps(
            {
                "settings": overrides,
                "temperature": arguments.temperature,
                "tokens": arguments.tokens,
                "machine": describe_machine(),
                "repeats": [asdict(repeat) for repeat in repeats],
            },
            indent=2,
        )
        + "\n",
        encoding="utf-8",
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.cold_start", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", type=Path, help="YAML configuration of the cluster")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=700, help="of each answer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("bench/results/cold_start.json"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
