"""Figures as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from cluster.simulator.figures import Figures, Percentiles, WorkerFigures

_MOST_INTERVALS = 20  # maximum number of printed intervals; the JSON has all


def table(figures: Figures) -> str:
    own = figures
    lines = [
        f"{own.num_requests} requests came, {own.num_finished} were answered, {own.num_refused} refused; "
        f"{own.seconds:g} s after the warm-up:",
        "",
        f"throughput          {own.tokens_per_second:.1f} tokens/s, {own.requests_per_second:.2f} requests/s",
        f"rounds              mean k {own.mean_k:.2f}, {own.acceptance:.1%} of drafts accepted, "
        f"{own.tokens_a_round:.2f} tokens a round",
        f"steps               {own.num_steps} of {own.rows_a_step:.1f} rows",
        f"targets             {_of(own.targets)}, waiting for drafts {fmean(t.wait_share for t in own.targets):.1%} "
        f"of the time, KV cache {max(t.kv_used for t in own.targets):.0%} at most, "
        f"{sum(t.num_preemptions for t in own.targets)} preemptions",
    ]
    if own.drafts:
        batch = fmean(draft.mean_batch for draft in own.drafts)
        shares = ", ".join(
            f"{work} {fmean(draft.draft_shares.get(work, 0.0) for draft in own.drafts):.0%}"
            for work in own.drafts[0].draft_shares
        )
        lines.append(
            f"draft workers       {_of(own.drafts)}, {batch:.1f} sequences a step" + (shares and f" ({shares})")
        )
    if own.dollars_per_million_tokens is not None:
        lines.append(
            f"cost                {own.dollars_per_hour:.2f} $/h, {own.dollars_per_million_tokens:.2f} $/M tokens"
        )
    lines += ["", _latencies(own), "", _course(own)]
    return "\n".join(lines)


def _of(workers: Sequence[WorkerFigures]) -> str:
    """Returns a text with the load of `workers`."""
    busy = [worker.utilization for worker in workers]
    spread = f" ({min(busy):.1%} to {max(busy):.1%})" if len(busy) > 1 else ""
    return f"{len(busy)}, computing {fmean(busy):.1%} of the time{spread}"


def _latencies(figures: Figures) -> str:
    rows = [["ms", "p50", "p90", "p99"]]
    for name, found in (
        ("first token", figures.first_token),
        ("per output token", figures.per_output_token),
        ("whole answer", figures.latency),
    ):
        rows.append([name, *_cells(found)])
    return _aligned(rows)


def _cells(found: Percentiles | None) -> list[str]:
    if found is None:
        return ["-", "-", "-"]
    return [f"{1e3 * value:.1f}" for value in (found.p50, found.p90, found.p99)]


def _course(figures: Figures) -> str:
    rows = [["from s", "tokens/s", "k", "accepted", "requests that wait"]]
    every = -(-len(figures.intervals) // _MOST_INTERVALS)
    for one in figures.intervals[:: max(every, 1)]:
        rows.append(
            [
                f"{one.seconds:g}",
                f"{one.tokens_per_second:.1f}",
                f"{one.mean_k:.2f}",
                f"{one.acceptance:.1%}",
                f"{one.num_waiting:.1f}",
            ]
        )
    return _aligned(rows)


def to_json(figures: Figures) -> dict[str, Any]:
    """Returns the figures as JSON, with times in seconds."""
    return asdict(figures)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )
