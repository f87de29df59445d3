"""The command `outrider simulate`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Never

from tqdm import tqdm

from cluster.config.file import load_config
from cluster.engine.memory_plan import PlannedModel
from cluster.errors import ConfigurationError
from cluster.planning.hardware import GPUS, HOST_CPUS, parse_gpus, parse_price
from services.argument_types import above_zero, not_below_zero, seed
from services.output_file import check_output

if TYPE_CHECKING:  # it imports torch, by the engine's scheduler
    from cluster.simulator.cluster import MeasuredSpan
    from cluster.simulator.hardware import OnGpus
    from cluster.simulator.traffic import Traffic

EXAMPLE = (
    "outrider simulate --requests-per-second 2 --seconds 60 --prompt-tokens 64:256 --answer-tokens 32:96 "
    "--set target.replicas=2 --set draft.replicas=1"
)
_PROGRESS_AFTER_SECONDS = 2.0
_MAX_INTERVALS = 100_000
_MAX_KV_TOKENS = 10**8  # tokens whose blocks are held in memory
_MAX_STREAMS = 10**6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Simulates a cluster under traffic in virtual time: its step loops, coordinators and draft workers are "
        "the\nreal ones; forward passes, the network and the programs' own time take a set time instead.\nThe "
        "cluster is that of --config and --set: replicas, limits, speculation, and `simulation` with the times "
        "of\nsteps and the acceptance; or the times are those of models on GPUs, by formula.\nA cluster of "
        "hundreds of streams takes about as long as in real time: simulate a part of a larger "
        "one.\ndocs/PLANNING.md describes what is simulated and what is left out."
    )
    parser.epilog = f"example:\n  {EXAMPLE}"
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument("--config", type=Path, metavar="FILE", help="YAML configuration (default: all defaults)")
    cluster.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    cluster.add_argument("--target", metavar="MODEL[:DTYPE]", help="as for `plan cluster`, with --target-gpus")
    cluster.add_argument("--target-gpus", metavar="GPUS", help=f"GPUs of one target: [Nx]NAME, of {', '.join(GPUS)}")
    cluster.add_argument("--draft", metavar="MODEL[:DTYPE]", help="as for `plan cluster`, with --draft-gpus")
    cluster.add_argument("--draft-gpus", metavar="GPUS", help=f"GPU of one draft worker; or {', '.join(HOST_CPUS)}")
    cluster.add_argument(
        "--kv-tokens",
        type=above_zero(int, _MAX_KV_TOKENS),
        metavar="N",
        help="tokens in a target's KV cache (default: by its GPUs, or that of a simulated target)",
    )
    cluster.add_argument(
        "--no-overheads",
        action="store_true",
        help="programs take no time in addition to their steps (default: the times measured on one machine)",
    )
    cluster.add_argument(
        "--price", action="append", default=[], metavar="NAME=DOLLARS", help="price per hour of a known GPU"
    )
    cluster.add_argument(
        "--target-dollars-per-hour", type=above_zero(float), metavar="D", help="price of one target instead"
    )
    cluster.add_argument(
        "--draft-dollars-per-hour", type=above_zero(float), metavar="D", help="price of one draft worker instead"
    )
    traffic = parser.add_argument_group("traffic (one of the first three)")
    kind = traffic.add_mutually_exclusive_group(required=True)
    kind.add_argument(
        "--requests-per-second", type=above_zero(float), metavar="R", help="requests per second, at random times"
    )
    kind.add_argument(
        "--streams",
        type=above_zero(int, _MAX_STREAMS),
        metavar="N",
        help="clients that ask again as soon as they are answered",
    )
    kind.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="JSON lines with arrival_seconds, prompt_tokens and answer_tokens, which also give --seconds",
    )
    traffic.add_argument(
        "--seconds",
        type=above_zero(float),
        metavar="S",
        help="duration of the requests and of the figures; default 60",
    )
    traffic.add_argument(
        "--prompt-tokens", default="512", metavar="N[:N]", help="tokens of a prompt: one number or a range; default 512"
    )
    traffic.add_argument(
        "--answer-tokens", default="256", metavar="N[:N]", help="tokens of an answer, in the same form; default 256"
    )
    traffic.add_argument(
        "--burstiness", type=above_zero(float), default=1.0, metavar="B", help="1: Poisson; larger: bursts (gamma)"
    )
    traffic.add_argument(
        "--ramp-seconds", type=not_below_zero, default=0.0, metavar="S", help="time over which streams begin; default 0"
    )
    traffic.add_argument("--seed", type=seed, default=0, metavar="N", help="seed of traffic and drafts; default 0")
    results = parser.add_argument_group("results")
    results.add_argument(
        "--warm-up",
        type=not_below_zero,
        metavar="S",
        help="start left out of the figures; default a tenth of the seconds",
    )
    results.add_argument(
        "--interval", type=above_zero(float), default=10.0, metavar="S", help="intervals of the report of k"
    )
    results.add_argument(
        "--json", type=Path, metavar="FILE", help="write all figures to this file, times in seconds; -: print them"
    )


def run(arguments: argparse.Namespace) -> int:
    """Raises ConfigurationError."""
    from cluster.planning.overheads import NOTHING, PROGRAMS
    from cluster.simulator.cluster import SimulatedCluster
    from cluster.simulator.hardware import dollars_per_hour, num_kv_blocks, steps_of
    from cluster.simulator.report import table, to_json

    is_printed = arguments.json == Path("-")
    check_output("--json", None if is_printed else arguments.json)
    config = load_config(arguments.config, arguments.overrides, os.environ)
    prices = dict(map(parse_price, arguments.price))
    target = _on_gpus(arguments, "target", prices)
    draft = _on_gpus(arguments, "draft", prices)
    traffic, span, mean_context = _traffic(arguments)
    config = steps_of(config, target, draft, mean_context)
    cluster = SimulatedCluster(
        config,
        traffic,
        num_kv_blocks(config, target, arguments.kv_tokens),
        span,
        arguments.seed,
        NOTHING if arguments.no_overheads else PROGRAMS,
    )
    bar = tqdm(
        total=round(span.until), unit="s", desc="simulated", delay=_PROGRESS_AFTER_SECONDS, file=sys.stderr, leave=False
    )
    with bar:
        cluster.run(_progress(bar, round(span.until)))
    of_target = arguments.target_dollars_per_hour or _dollars(target)
    of_draft = arguments.draft_dollars_per_hour or _dollars(draft)
    figures = cluster.figures(dollars_per_hour(config, of_target, of_draft))
    document = json.dumps(to_json(figures), indent=1) + "\n"
    if is_printed:
        print(document, end="")
        return 0
    if arguments.json is not None:
        arguments.json.write_text(document, encoding="utf-8")
    print(table(figures))
    return 0


def _progress(bar: tqdm[Never], total: int) -> Callable[[float], None]:
    def show(seconds: float) -> None:
        bar.update(min(int(seconds), total) - bar.n)  # the work after the last arrival takes longer

    return show


def _dollars(found: OnGpus | None) -> float | None:
    return None if found is None else found.gpus.dollars_per_hour


def _on_gpus(arguments: argparse.Namespace, role: str, prices: dict[str, float]) -> OnGpus | None:
    from cluster.simulator.hardware import OnGpus

    model, gpus = getattr(arguments, role), getattr(arguments, f"{role}_gpus")
    if (model is None) != (gpus is None):
        raise ConfigurationError(f"--{role} and --{role}-gpus belong together: give both, or none of them")
    return None if model is None else OnGpus(PlannedModel.parse(model), parse_gpus(gpus, prices))


def _traffic(arguments: argparse.Namespace) -> tuple[Traffic, MeasuredSpan, float]:
    """Returns the traffic, the measured interval, and the mean tokens of a sequence while it decodes."""
    from cluster.simulator.cluster import MeasuredSpan
    from cluster.simulator.traffic import ClosedTraffic, Lengths, OpenTraffic, RecordedTraffic

    traffic: Traffic
    prompts, answers = Lengths.parse(arguments.prompt_tokens), Lengths.parse(arguments.answer_tokens)
    mean_context, seconds = prompts.mean + answers.mean / 2, arguments.seconds or 60.0
    if arguments.trace is not None:
        traffic = RecordedTraffic.read(arguments.trace)
        seconds, mean_context = arguments.seconds or traffic.seconds, traffic.mean_context
    elif arguments.streams is not None:
        traffic = ClosedTraffic(
            arguments.streams, seconds, prompts, answers, arguments.seed, ramp_seconds=arguments.ramp_seconds
        )
    else:
        traffic = OpenTraffic(
            arguments.requests_per_second, seconds, prompts, answers, arguments.seed, arguments.burstiness
        )
    warm_up = seconds / 10 if arguments.warm_up is None else arguments.warm_up
    if warm_up >= seconds:
        raise ConfigurationError(
            f"a warm-up of {warm_up:g} s leaves nothing of {seconds:g} s: shorten it, or give --seconds"
        )
    if seconds > _MAX_INTERVALS * arguments.interval:
        raise ConfigurationError(
            f"an interval of {arguments.interval:g} s makes more than {_MAX_INTERVALS:,} of {seconds:g} s: lengthen it"
        )
    return (
        traffic,
        MeasuredSpan(warm_up, seconds, arguments.interval, is_cut=arguments.streams is not None),
        mean_context,
    )
