"""Writes down what the planner predicts for GPUs on which nobody has run it yet: `python -m bench.predictions`.

1. Five workloads (`outrider plan choose`) on 4 H100 and on 2 H200, with a pool of L4: dollars per million tokens within
   limits. README.md has the table of the H100.
2. An 8B target and a 1B draft on two H100 or two H200, as `outrider prove` measures them: tokens per second.

`--check` writes nothing, and fails if the page's table is not that of the results file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.choose import Asked
from bench.report.page import fill, markdown
from bench.result import write_cells
from cluster.engine.memory_plan import PlannedModel
from cluster.planning.choice import best
from cluster.planning.hardware import parse_gpus
from cluster.planning.kernel_tables import step_predictor
from cluster.planning.options import BESIDE, HEAD, LOCAL_ROUND_TRIP_SECONDS, PLAIN
from cluster.planning.prediction import ExpectedLoad, Option, plan
from cluster.planning.round_costs import RUN_AHEAD_HIDES, Drafting
from cluster.planning.workloads import WORKLOADS
from services.plan.choose import to_json

_PAGE = Path("README.md")
_TARGETS = (("70B", "4xH100"), ("70B:fp8", "2xH200"))
_DRAFT_GPUS = "L4"
_PROVED = ("H100", "H200")
_STREAMS = (1, 4, 16)
_PROMPT_TOKENS, _ANSWER_TOKENS = 512, 128  # the most that `outrider prove` takes of its prompts, and its answers
_ACCEPTANCE = 0.78  # the default of `outrider prove`


def choices() -> Iterator[dict[str, Any]]:
    for target, gpus in _TARGETS:
        for workload in WORKLOADS:
            found = Asked(workload.name, target, gpus, _DRAFT_GPUS).capacities()
            yield {"target": target, "target_gpus": gpus, "draft_gpus": _DRAFT_GPUS, **to_json(workload, found)}
            print(f"{workload.name} on {gpus}: {best(found).option.name}", flush=True)


def proofs() -> Iterator[dict[str, Any]]:
    for gpu in _PROVED:
        group = parse_gpus(gpu)
        target, draft = (step_predictor(PlannedModel.parse(model), group) for model in ("8B", "1B"))
        for name, drafting in (
            ("plain", None),
            ("beside", Drafting(draft, _ACCEPTANCE, LOCAL_ROUND_TRIP_SECONDS)),
            ("remote", Drafting(draft, _ACCEPTANCE, LOCAL_ROUND_TRIP_SECONDS, RUN_AHEAD_HIDES)),
        ):
            for num_streams in _STREAMS:
                found = plan(Option(name, target, drafting), ExpectedLoad(num_streams, _PROMPT_TOKENS, _ANSWER_TOKENS))
                yield {
                    "gpus": f"2x{gpu}",
                    "system": name,
                    "streams": num_streams,
                    "num_speculative_tokens": found.round.num_speculative_tokens,
                    "tokens_per_second": found.tokens_per_second,
                    "first_token_seconds": found.latency.first_token,
                    "between_tokens_seconds": found.latency.between_tokens,
                }


def headline(document: dict[str, Any]) -> str:
    """Returns the table of README.md. The least of a row is bold; a dash: no depth pays within the limits."""
    target, gpus = _TARGETS[0]
    rows = []
    for cell in document["cells"]:
        if cell.get("target_gpus") != gpus:
            continue
        dollars = [_least(cell, name) for name in (PLAIN, HEAD, BESIDE, "pool", "n-gram")]
        least = min((one for one in dollars if one is not None), default=None)
        shown = ("–" if one is None else f"**{one:.2f}**" if one == least else f"{one:.2f}" for one in dollars)
        rows.append([cell["workload"], *shown])
    head = ["$ per million tokens", "none", "head", "on the target's GPUs", "pool", "n-gram"]
    return f"{document['date']}, {target} on {gpus}:\n\n{markdown(head, rows)}"


def _least(cell: dict[str, Any], name: str) -> float | None:
    """Returns the least dollars of the options whose names begin with `name`; None: none drafts within the limits."""
    found = [
        one["dollars_per_million_tokens"]
        for one in cell["options"]
        if one["option"].startswith(name) and one["num_seqs"] and (name == PLAIN or one["num_speculative_tokens"])
    ]
    return min(found, default=None)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.predictions", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("bench/results/predictions.json"))
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args(argv)
    if not arguments.check:
        write_cells(arguments.out, "bench.predictions", argv, [*choices(), *proofs()])
    document = json.loads(arguments.out.read_text(encoding="utf-8"))
    page = _PAGE.read_text(encoding="utf-8")
    new = fill(page, {"headline": headline(document)})
    if arguments.check:
        return int(new != page)
    _PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
