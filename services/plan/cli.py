"""The command `outrider plan cluster`."""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path

from cluster.config.file import load_config
from cluster.engine.memory_plan import PlannedModel
from cluster.errors import ConfigurationError
from cluster.planning.hardware import DEFAULT_HOST_CPU, GPUS, HOST_CPUS, parse_gpus, parse_price
from cluster.planning.latency import LatencyLimits
from cluster.planning.options import LOCAL_ROUND_TRIP_SECONDS, NGRAM_ACCEPTANCE, ClusterRequest, options
from cluster.planning.prediction import ExpectedLoad, Option, most_sequences, plan
from cluster.planning.report import notes, plans_table, to_json
from cluster.planning.steps import Efficiency
from services.argument_types import above_zero, not_below_zero, share

_MOST_SEQS = 1024  # maximum number of sequences considered for a latency limit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    own = Efficiency()
    parser.description = (
        "Predicts ways of placing a draft by formula: throughput, latency, dollars, memory, depth. The defaults are "
        "the published cluster of 4 A100 and A10G. A MODEL[:DTYPE] is that of `plan memory`; GPUS are [Nx]NAME, "
        f"of {', '.join(GPUS)}, or [Nx]GB:GB_PER_SECOND:TFLOPS:DOLLARS_PER_HOUR. The exit code is 1 when nothing "
        "fits."
    )
    models = parser.add_argument_group("models and GPUs")
    models.add_argument("--target", default="70B", metavar="MODEL[:DTYPE]", help="default 70B")
    models.add_argument(
        "--target-gpus", default="4xA100-80", metavar="GPUS", help="GPUs of one target; default 4xA100-80"
    )
    models.add_argument(
        "--draft", default="7B,1B", metavar="MODEL[:DTYPE],...", help="drafts to compare; default 7B,1B"
    )
    models.add_argument("--draft-gpus", default="A10G", metavar="GPUS", help="GPUs of one draft; default A10G")
    models.add_argument(
        "--host-cpu",
        default=DEFAULT_HOST_CPU.name,
        metavar="CPU",
        help=f"for a draft on the CPU of the target's host: {', '.join(HOST_CPUS)} (16 cores of Sapphire Rapids) or "
        f"GB:GB_PER_SECOND:TFLOPS:0; default {DEFAULT_HOST_CPU.name}",
    )
    models.add_argument(
        "--price",
        action="append",
        default=[],
        metavar="NAME=DOLLARS",
        help="price per hour of a known GPU; may be repeated",
    )
    load = parser.add_argument_group("load")
    load.add_argument(
        "--sequences",
        type=above_zero(int),
        default=16,
        metavar="N",
        help="concurrent sequences on a target (the maximum, with a rate)",
    )
    load.add_argument(
        "--requests-per-second",
        type=above_zero(float),
        metavar="R",
        help="rate to serve, with the number of targets that it takes",
    )
    load.add_argument("--prompt-tokens", type=above_zero(int), default=512, metavar="N", help="default 512")
    load.add_argument(
        "--cached-tokens", type=int, default=0, metavar="N", help="of a prompt, in the target's prefix cache; default 0"
    )
    load.add_argument(
        "--max-prefill-ms",
        type=above_zero(float),
        default=50.0,
        metavar="MS",
        help="`target.max_prefill_ms`; default 50",
    )
    load.add_argument("--answer-tokens", type=above_zero(int), default=256, metavar="N", help="default 256")
    load.add_argument(
        "--context",
        type=above_zero(int),
        metavar="N",
        help="tokens per sequence to reserve memory for (default: prompt and answer)",
    )
    load.add_argument("--max-num-batched-tokens", type=above_zero(int), default=2048, metavar="N", help="default 2048")
    load.add_argument(
        "--first-token-p99-ms", type=above_zero(float), metavar="MS", help="latency limit, with the next option:"
    )
    load.add_argument(
        "--between-tokens-p99-ms",
        type=above_zero(float),
        metavar="MS",
        help="shows the largest number of sequences within both",
    )
    rounds = parser.add_argument_group("speculation")
    rounds.add_argument(
        "--acceptance", type=share, default=0.78, metavar="RATE", help="acceptance rate of the draft; default 0.78"
    )
    rounds.add_argument("--int4-acceptance", type=share, metavar="RATE", help="default: 0.724/0.78 of --acceptance")
    rounds.add_argument("--ngram-acceptance", type=share, default=NGRAM_ACCEPTANCE, metavar="RATE", help="default 0.3")
    rounds.add_argument(
        "--num-speculative-tokens", type=int, choices=range(0, 65), metavar="K", help="default: the best number"
    )
    rounds.add_argument(
        "--round-trip-ms",
        default="0.5,10",
        metavar="MS,...",
        help="round trips to a remote pool; default 0.5,10",
    )
    rounds.add_argument(
        "--sidecar-round-trip-ms",
        type=not_below_zero,
        default=0.2,
        metavar="MS",
        help="round trip to a draft on the target's host; default 0.2",
    )
    assumed = parser.add_argument_group("assumptions")
    assumed.add_argument("--bandwidth-efficiency", type=above_zero(float, 1), default=own.bandwidth, metavar="SHARE")
    assumed.add_argument("--compute-efficiency", type=above_zero(float, 1), default=own.compute, metavar="SHARE")
    assumed.add_argument("--step-overhead-ms", type=not_below_zero, default=1e3 * own.step_seconds, metavar="MS")
    assumed.add_argument("--all-reduce-us", type=not_below_zero, default=1e6 * own.all_reduce_seconds, metavar="US")
    assumed.add_argument("--memory-utilization", type=above_zero(float, 1), default=0.9, metavar="SHARE")
    assumed.add_argument("--block-size", type=above_zero(int), default=16, metavar="TOKENS")
    measured = parser.add_argument_group("use measured steps instead of formulae")
    measured.add_argument(
        "--measure",
        action="store_true",
        help="time the engines of --config on this machine, where draft and target share the cores; ignores the "
        "models, GPUs and prices above",
    )
    measured.add_argument("--config", type=Path, metavar="FILE", help="YAML configuration (default: all defaults)")
    measured.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    measured.add_argument(
        "--local-round-trip-ms",
        type=not_below_zero,
        default=1e3 * LOCAL_ROUND_TRIP_SECONDS,
        metavar="MS",
        help="coordination between target and draft on this machine, which is not measured here; default 0.9, from "
        "`bench.coordination`",
    )
    measured.add_argument(
        "--temperature", type=not_below_zero, default=1.0, metavar="T", help="temperature of the requests; default 1"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with times in seconds")


def run(arguments: argparse.Namespace) -> int:
    """Raises ConfigurationError."""
    load = ExpectedLoad(
        arguments.sequences,
        arguments.prompt_tokens,
        arguments.answer_tokens,
        arguments.max_num_batched_tokens,
        arguments.cached_tokens,
        arguments.max_prefill_ms / 1e3,
        arguments.requests_per_second,
    )
    efficiency = Efficiency(
        arguments.bandwidth_efficiency,
        arguments.compute_efficiency,
        arguments.all_reduce_us / 1e6,
        arguments.step_overhead_ms / 1e3,
    )
    if arguments.measure:
        found = _measured(arguments, load)
    else:
        request = _request(arguments, efficiency)
        found = list(options(request))
    plans = [plan(option, load, arguments.context) for option in found]
    limits = _limits(arguments, found, load)
    if arguments.json:
        print(json.dumps(to_json(plans, limits), indent=2))
    else:
        print(plans_table(plans, limits))
        sources = dict.fromkeys(source for option in found for source in option.sources if source)
        about = notes(efficiency, load.prompt_tokens, load.answer_tokens, list(sources), is_measured=arguments.measure)
        print(f"\n{about}")
    return 0 if any(one.fits for one in plans) else 1


def _request(arguments: argparse.Namespace, efficiency: Efficiency) -> ClusterRequest:
    prices = dict(map(parse_price, arguments.price))
    return ClusterRequest(
        target=PlannedModel.parse(arguments.target),
        target_gpus=parse_gpus(arguments.target_gpus, prices),
        drafts=_drafts(arguments.draft),
        draft_gpus=parse_gpus(arguments.draft_gpus, prices),
        acceptance=arguments.acceptance,
        round_trips_seconds=_round_trips(arguments.round_trip_ms),
        sidecar_round_trip_seconds=arguments.sidecar_round_trip_ms / 1e3,
        host_cpu=parse_gpus(arguments.host_cpu),
        int4_acceptance=arguments.int4_acceptance,
        ngram_acceptance=arguments.ngram_acceptance,
        efficiency=efficiency,
        num_speculative_tokens=arguments.num_speculative_tokens,
        memory_utilization=arguments.memory_utilization,
        block_size=arguments.block_size,
    )


def _drafts(text: str) -> tuple[PlannedModel, ...]:
    specs = dict.fromkeys(part.strip() for part in text.split(","))
    if "" in specs:
        raise ConfigurationError(f"--draft {text!r}: write a list of models, such as 7B,1B:int4")
    return tuple(map(PlannedModel.parse, specs))


def _round_trips(text: str) -> tuple[float, ...]:
    try:
        milliseconds = [float(part) for part in text.split(",")]
    except ValueError:
        milliseconds = [-1.0]
    if any(not 0 <= ms < math.inf for ms in milliseconds):
        raise ConfigurationError(f"--round-trip-ms {text!r}: write milliseconds, such as 0.2,0.5,2,10")
    return tuple(ms / 1e3 for ms in milliseconds)


def _limits(arguments: argparse.Namespace, found: list[Option], load: ExpectedLoad) -> list[int] | None:
    first, between = arguments.first_token_p99_ms, arguments.between_tokens_p99_ms
    if first is None and between is None:
        return None
    most = min(_MOST_SEQS, load.max_num_batched_tokens - 1)
    return [
        most_sequences(option, load, LatencyLimits((first or math.inf) / 1e3, (between or math.inf) / 1e3), most)
        for option in found
    ]


def _measured(arguments: argparse.Namespace, load: ExpectedLoad) -> list[Option]:
    from services.plan.measure import measured_options  # it runs engines, so it imports torch

    config = load_config(arguments.config, arguments.overrides, os.environ)
    depth, round_trip_seconds = arguments.num_speculative_tokens, arguments.local_round_trip_ms / 1e3
    return measured_options(config, load, arguments.acceptance, arguments.temperature, depth, round_trip_seconds)
