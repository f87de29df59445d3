"""The command `outrider plan choose`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from cluster.engine.memory_plan import PlannedModel
from cluster.errors import ConfigurationError
from cluster.planning.choice import Capacity, best, capacity, reversals
from cluster.planning.hardware import GPUS, parse_gpus, parse_price
from cluster.planning.options import ClusterRequest, main_options
from cluster.planning.report import aligned
from cluster.planning.workloads import WORKLOADS, TypicalWorkload
from services.argument_types import above_zero, share


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Predicts for five workloads how many requests a dollar buys within limits of p99, for each way to draft, and "
        "marks the best one. Without speculation, a dollar more buys more targets. Lengths, limits and prices are "
        f"examples; acceptance is from published measurements. GPUS are [Nx]NAME, of {', '.join(GPUS)}."
    )
    parser.add_argument(
        "--workload", action="append", choices=[one.name for one in WORKLOADS], help="default: all; may be repeated"
    )
    parser.add_argument("--target", default="70B", metavar="MODEL[:DTYPE]", help="default 70B")
    parser.add_argument("--target-gpus", default="4xH100", metavar="GPUS", help="GPUs of one target; default 4xH100")
    parser.add_argument("--draft", default="1B", metavar="MODEL[:DTYPE]", help="default 1B")
    parser.add_argument("--draft-gpus", default="A10G", metavar="GPUS", help="GPUs of a pool's worker; default A10G")
    parser.add_argument("--round-trip-ms", type=above_zero(float), default=0.5, metavar="MS", help="to a pool")
    parser.add_argument(
        "--price", action="append", default=[], metavar="NAME=DOLLARS", help="per hour; may be repeated"
    )
    parser.add_argument("--prompt-tokens", type=above_zero(int), metavar="N")
    parser.add_argument("--cached-tokens", type=int, metavar="N", help="of a prompt, in the target's prefix cache")
    parser.add_argument("--answer-tokens", type=above_zero(int), metavar="N")
    parser.add_argument("--first-token-p99-ms", type=above_zero(float), metavar="MS")
    parser.add_argument("--between-tokens-p99-ms", type=above_zero(float), metavar="MS")
    for name, what in (("head", "a head"), ("draft", "a draft"), ("one-pass", "one pass"), ("ngram", "n-gram")):
        parser.add_argument(
            f"--{name}-acceptance", type=share, metavar="RATE", help=f"of {what}, at all places; default: published"
        )
    parser.add_argument(
        "--suffix-acceptance", type=share, metavar="RATE", help="of suffix decoding; default: it is left out"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with times in seconds")


def run(arguments: argparse.Namespace) -> int:
    """Raises ConfigurationError."""
    chosen = [one for one in WORKLOADS if arguments.workload is None or one.name in arguments.workload]
    rows = []
    for workload in (_changed(one, arguments) for one in chosen):
        request = request_of(workload, arguments)
        found = [capacity(option, workload.load, workload.limits) for option in main_options(request)]
        if arguments.json:
            rows.append(to_json(workload, found))
            continue
        print(f"{_title(workload)}\n{_table(found)}")
        for text in reversals(found, workload.load, workload.limits):
            print(f"  changes to {text}")
        for name, source in workload.sources.items():
            print(f"  acceptance of {name.replace('_', ' ')}: {source}")
        print()
    if arguments.json:
        print(json.dumps({"workloads": rows}, indent=2))
        return 0
    sources = dict.fromkeys(source or "by formula: other steps" for one in found for source in one.option.sources)
    print("\n".join(["step times", *(f"  {source}" for source in sources)]))
    return 0


def request_of(workload: TypicalWorkload, arguments: argparse.Namespace) -> ClusterRequest:
    """Raises ConfigurationError."""
    prices = dict(map(parse_price, arguments.price))
    head, draft, one_pass, ngram = (
        getattr(workload, name).acceptance if (given := getattr(arguments, f"{name}_acceptance")) is None else given
        for name in ("head", "draft", "one_pass", "ngram")
    )
    return ClusterRequest(
        target=PlannedModel.parse(arguments.target),
        target_gpus=parse_gpus(arguments.target_gpus, prices),
        drafts=(PlannedModel.parse(arguments.draft),),
        draft_gpus=parse_gpus(arguments.draft_gpus, prices),
        acceptance=draft,
        round_trips_seconds=(arguments.round_trip_ms / 1e3,),
        sidecar_round_trip_seconds=0.0,
        head_acceptance=head,
        one_pass_acceptance=one_pass,
        ngram_acceptance=ngram,
        suffix_acceptance=arguments.suffix_acceptance,
    )


def _changed(workload: TypicalWorkload, arguments: argparse.Namespace) -> TypicalWorkload:
    """Returns the workload with the lengths and limits that are given."""
    load = {
        name: value
        for name in ("prompt_tokens", "cached_tokens", "answer_tokens")
        if (value := getattr(arguments, name)) is not None
    }
    limits = {
        name: ms / 1e3
        for name in ("first_token", "between_tokens")
        if (ms := getattr(arguments, f"{name}_p99_ms")) is not None
    }
    if load.get("prompt_tokens", workload.load.prompt_tokens) <= load.get("cached_tokens", workload.load.cached_tokens):
        raise ConfigurationError("--cached-tokens must be fewer than --prompt-tokens: give both")
    return replace(workload, load=replace(workload.load, **load), limits=replace(workload.limits, **limits))


def to_json(workload: TypicalWorkload, found: Sequence[Capacity]) -> dict[str, Any]:
    return {
        "workload": workload.name,
        "prompt_tokens": workload.load.prompt_tokens,
        "cached_tokens": workload.load.cached_tokens,
        "answer_tokens": workload.load.answer_tokens,
        "first_token_p99": _finite(workload.limits.first_token),
        "between_tokens_p99": _finite(workload.limits.between_tokens),
        "best": best(found).option.name,
        "options": [_option(one) for one in found],
    }


def _option(one: Capacity) -> dict[str, Any]:
    if one.plan is None:
        return {"option": one.option.name, "num_seqs": 0}
    return {
        "option": one.option.name,
        "num_seqs": one.plan.num_seqs,
        "num_speculative_tokens": one.plan.round.num_speculative_tokens,
        "requests_per_second": one.requests_per_second,
        "requests_per_dollar": one.requests_per_dollar,
        "dollars_per_million_tokens": one.plan.dollars_per_million_tokens,
        "first_token_p99": one.plan.latency.first_token_p99,
        "between_tokens_p99": one.plan.latency.between_tokens_p99,
    }


def _finite(seconds: float) -> float | None:
    return None if seconds == float("inf") else seconds


def _title(workload: TypicalWorkload) -> str:
    load, limits = workload.load, workload.limits
    return (
        f"{workload.name}: prompts of {load.prompt_tokens} tokens, {load.cached_tokens} of them cached, answers of "
        f"{load.answer_tokens}; p99 of the first token {_limit(limits.first_token)}, between tokens "
        f"{_limit(limits.between_tokens)}"
    )


def _limit(seconds: float) -> str:
    return "without limit" if seconds == float("inf") else f"within {1e3 * seconds:g} ms"


def _table(found: Sequence[Capacity]) -> str:
    header = ["", "sequences", "K", "requests/s", "requests/$", "$/M tokens", "first token p99 ms", "between p99 ms"]
    return aligned([header, *_rows(found)])


def _rows(found: Sequence[Capacity]) -> Iterator[list[str]]:
    chosen = best(found)
    for one in found:
        if one.plan is None:
            yield [f"  {one.option.name}", "0", *["-"] * 6]
            continue
        waits, dollars = one.plan.latency, one.plan.dollars_per_million_tokens
        yield [
            f"{'*' if one is chosen else ' '} {one.option.name}",
            str(one.plan.num_seqs),
            str(one.plan.round.num_speculative_tokens),
            f"{one.requests_per_second:.2f}",
            f"{one.requests_per_dollar:.0f}",
            "-" if dollars is None else f"{dollars:.2f}",
            f"{1e3 * waits.first_token_p99:.0f}",
            f"{1e3 * waits.between_tokens_p99:.1f}",
        ]
