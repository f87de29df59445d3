"""Plans as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from cluster.planning.options import DRAFT_CONTEXT_TOKENS
from cluster.planning.overheads import PROGRAMS
from cluster.planning.prediction import Plan
from cluster.planning.round_costs import RUN_AHEAD_HIDES
from cluster.planning.steps import Efficiency


def plans_table(plans: Sequence[Plan], limits: Sequence[int] | None = None) -> str:
    """Returns the plans as a table. `limits`: for each plan, the maximum sequences within the requested latencies."""
    header = ["", "K", "tokens a round", "draft + net + verify ms", "tokens/s", "first token ms, p99"]
    header += ["between tokens ms, p99", "pause p99", "$/M tokens", "sequences, fit", "draft GPUs a target"]
    rows = [[*header, *(["within limits"] if limits is not None else [])]]
    for index, plan in enumerate(plans):
        one, waits = plan.round, plan.latency
        parts = f"{_ms(one.draft_seconds)} + {_ms(one.round_trip_seconds)} + {_ms(one.verify_seconds)}"
        row = [
            plan.option,
            str(one.num_speculative_tokens),
            f"{one.num_tokens:.2f}",
            parts if one.num_speculative_tokens else _ms(one.verify_seconds),
            f"{plan.tokens_per_second * plan.num_targets:.0f}",
            f"{_ms(waits.first_token)}, {_ms(waits.first_token_p99)}",
            f"{_ms(waits.between_tokens)}, {_ms(waits.between_tokens_p99)}",
            _ms(waits.pause_p99),
            "-" if plan.dollars_per_million_tokens is None else f"{plan.dollars_per_million_tokens:.2f}",
            f"{plan.num_seqs}, {'-' if plan.most_seqs is None else plan.most_seqs}{'' if plan.fits else ' TOO FEW'}",
            f"{plan.draft_devices_per_target:.2f}".rstrip("0").rstrip("."),
        ]
        if plan.num_targets > 1 or plan.utilization < 1:
            row[0] += f" ({plan.num_targets} target{'s' if plan.num_targets > 1 else ''}, {plan.utilization:.0%} busy)"
        rows.append(row + ([] if limits is None else [str(limits[index])]))
    return aligned(rows)


def notes(
    efficiency: Efficiency, prompt_tokens: int, answer_tokens: int, sources: Sequence[str], *, is_measured: bool
) -> str:
    """Returns notes that say which figures are formulas, which are measured, and which are assumptions."""
    formulae = {
        "E": ["(1 - a^(K+1)) / (1 - a), bonus included; of K from 0 to 16 the one with the most tokens/s"],
        "round": [
            "K draft steps + round trip + verify step of K + 1 rows a sequence; a draft on a device of its own runs",
            f"ahead, which hides {RUN_AHEAD_HIDES:g} of the first two, or 1/N of that if it feeds N targets",
        ],
        "step": [
            "max(bytes / bandwidth, FLOPs / peak) of linears + attention + sampling + all-reduces + fixed time",
            f"the target's program takes {1e3 * PROGRAMS.target.step:g} ms and {1e6 * PROGRAMS.target.sequence:g} µs "
            "per sequence between two steps, measured with up to 16",
            *([] if is_measured else sources),
        ],
        "tokens/s": [
            "S * answer / (first token + rounds of the rest * step): S sequences at all times, steps with",
            "the prompts that come in them",
        ],
        "pool": [
            "a draft GPU feeds 1 + (verify + round trip) / (K * draft step) targets: without run-ahead it drafts for",
            "that part of a target's round",
        ],
        "$/M tokens": ["dollars an hour / 3600 / tokens a second * 10^6"],
    }
    assumed = {
        "load": [f"prompts of {prompt_tokens} and answers of {answer_tokens} tokens, which come at random (Poisson)"],
        "acceptance": [
            "the same rate at every position, for all texts and drafts, including heads and drafts in INT8;",
            "a draft with one pass per proposal has to be trained for it (`outrider distill --drafter parallel`)",
        ],
        "prompts": [
            f"a draft on a device of its own reads the last {DRAFT_CONTEXT_TOKENS} tokens at most "
            "(draft.context_tokens: auto)"
        ],
        "p99": [
            "first token: the rest of the running step, then that of its prompt and of those that came with it;",
            "between tokens: over answers, of an answer's mean: rounds by renewal theory, taken as normal;",
            "pause: over all gaps between two tokens. Nobody queues for memory",
        ],
        "hardware": [
            f"{efficiency.bandwidth:g} of the data sheets' bandwidth, {efficiency.compute:g} of their FLOPs, "
            f"{1e6 * efficiency.all_reduce_seconds:g} us an all-reduce, two a layer,",
            f"{1e3 * efficiency.step_seconds:g} ms more per step; prices are examples (--price); on a target's host a",
            "draft has --host-cpu, at no price",
        ],
        "a pool": ["rounds of its targets are staggered, so that nobody waits for another's"],
    }
    if is_measured:
        formulae["round"] = ["K draft steps + round trip + verify step of K + 1 rows a sequence"]
        formulae["step"] = ["measured on this machine, by rows; target and draft share its cores: nothing overlaps"]
        for name in ("hardware", "a pool", "prompts"):
            del assumed[name]
        del formulae["pool"]
    return f"formula\n{_listed(formulae)}\nassumption\n{_listed(assumed)}"


def _listed(entries: dict[str, list[str]]) -> str:
    return "\n".join(
        f"  {name if line is lines[0] else '':<12}{line}" for name, lines in entries.items() for line in lines
    )


def to_json(plans: Sequence[Plan], limits: Sequence[int] | None) -> dict[str, Any]:
    """Returns the plans as JSON, with times in seconds."""
    rows = []
    for index, plan in enumerate(plans):
        row = asdict(plan) | {"fits": plan.fits}
        row["round"] |= {"seconds": plan.round.seconds}
        rows.append(row | ({} if limits is None else {"most_seqs_within_limits": limits[index]}))
    return {"plans": rows}


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]).rstrip()
        for row in rows
    )
