"""The command `outrider`."""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from cluster.config import Config
from cluster.config_file import load_config
from cluster.engine.memory_plan import Memory, PlannedModel, describe, plan_pair
from cluster.errors import ConfigurationError
from cluster.telemetry.logs import setup_logging
from cluster.training.cli import add_arguments as add_train_arguments
from cluster.training.cli import main as run_training
from services.health import add_arguments as add_health_arguments
from services.health import run as check_health
from services.plan.cli import above_zero
from services.plan.cli import add_arguments as add_plan_cluster_arguments
from services.plan.cli import run as plan_cluster
from services.speculation_switch import add_arguments as add_speculation_arguments
from services.speculation_switch import run as switch_speculation

_PROGRAMS = {
    "router": "run the HTTP router",
    "target": "run a target worker",
    "draft": "run a draft worker",
}


@dataclass(frozen=True, slots=True)
class ServeOption:
    """A flag of `serve` that stands for settings."""

    flag: str
    metavar: str
    settings: tuple[str, ...]
    purpose: str

    @property
    def destination(self) -> str:
        return self.flag.removeprefix("--").replace("-", "_")


SERVE_OPTIONS = (
    ServeOption("--host", "H", ("router.host",), "address the router listens at"),
    ServeOption("--port", "P", ("router.port",), "port the router listens at; default 8000"),
    ServeOption("--target", "MODEL", ("target.model",), "Hugging Face folder, hub name or bundled model"),
    ServeOption("--draft", "MODEL", ("draft.model",), "likewise, with the target's tokenizer"),
    ServeOption(
        "--num-speculative-tokens",
        "K",
        ("speculation.num_speculative_tokens",),
        "draft tokens a round, at first; 0 starts no draft worker and gives the target every core",
    ),
    ServeOption(
        "--controller", "C", ("speculation.controller",), "who chooses k: goodput (default), threshold or fixed"
    ),
    ServeOption("--dtype", "TYPE", ("target.dtype", "draft.dtype"), "auto, float32 or bfloat16, for target and draft"),
    ServeOption("--served-model-name", "NAME", ("router.served_model_name",), "what clients call the model"),
    ServeOption("--target-replicas", "N", ("target.replicas",), "target workers"),
    ServeOption("--draft-replicas", "N", ("draft.replicas",), "draft workers"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns the exit code. A setting that cannot work is one line on stderr and code 2."""
    arguments = make_parser().parse_args(argv)
    setup_logging(arguments.command)
    try:
        return int(arguments.run(arguments))
    except ConfigurationError as error:
        print(f"outrider {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="outrider", description="Speculative decoding across machines, with an OpenAI-compatible endpoint."
    )
    parser.add_argument("--version", action="version", version=f"outrider {version('outrider')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="run a whole cluster, on this machine or on Ray")
    _add_serve_arguments(serve)
    serve.set_defaults(run=_serve)
    down = commands.add_parser("down", help="end what `serve --launcher ray` left running when it was killed")
    _add_config_arguments(down)
    down.set_defaults(run=_down)
    for program, purpose in _PROGRAMS.items():
        command = commands.add_parser(program, help=purpose)
        _add_config_arguments(command)
        command.set_defaults(run=_run_program)
    health = commands.add_parser("health", help="tell whether a router or a worker answers")
    add_health_arguments(health)
    health.set_defaults(run=check_health)
    speculation = commands.add_parser("speculation", help="switch speculation off, on, or on for some requests, live")
    add_speculation_arguments(speculation)
    speculation.set_defaults(run=switch_speculation)
    plans = commands.add_parser("plan", help="tell what a deployment needs").add_subparsers(
        required=True, metavar="WHAT"
    )
    plan_memory = plans.add_parser("memory", help="GPU memory of a pair: weights, KV cache, largest batch")
    _add_plan_memory_arguments(plan_memory)
    plan_memory.set_defaults(run=_plan_memory)
    cluster = plans.add_parser("cluster", help="throughput, latency and dollars of ways to place a draft")
    add_plan_cluster_arguments(cluster)
    cluster.set_defaults(run=plan_cluster)
    train = commands.add_parser("train", help="train the bundled pair of models, or an EAGLE head for a target")
    add_train_arguments(train)
    train.set_defaults(run=run_training)
    return parser


def _add_config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML configuration (default: all defaults)")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override one setting; may be repeated",
    )


def _add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    _add_config_arguments(parser)
    parser.add_argument(
        "--launcher",
        choices=("local", "ray"),
        default="local",
        help="local: processes of this machine (default); ray: a Ray Serve application, on a new Ray if none is here",
    )
    for option in SERVE_OPTIONS:
        parser.add_argument(option.flag, metavar=option.metavar, help=option.purpose)


def _add_plan_memory_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "A MODEL is a size (1B, 1.5B, 7B, 8B, 13B, 70B), a size with its layers, KV heads and head size "
        "(34B/48x8x128), a folder or a bundled model; its DTYPE fp32, fp16 (default), bf16, int8 or int4. "
        "The exit code is 1 when not even one sequence fits."
    )
    parser.add_argument("--target", required=True, metavar="MODEL[:DTYPE]")
    parser.add_argument("--draft", required=True, metavar="MODEL[:DTYPE]")
    parser.add_argument(
        "--gpu-memory", type=above_zero(float), default=80.0, metavar="GB", help="of one GPU; default 80"
    )
    parser.add_argument("--gpus", type=above_zero(int), default=1, metavar="N", help="that share the target; default 1")
    parser.add_argument(
        "--draft-gpu-memory",
        type=above_zero(float),
        metavar="GB",
        help="of the GPU that the draft has to itself (default: it shares the target's)",
    )
    parser.add_argument("--context", type=above_zero(int), default=4096, metavar="TOKENS", help="default 4096")
    parser.add_argument("--sequences", type=above_zero(int), default=1, metavar="N", help="at once; default 1")
    parser.add_argument(
        "--num-speculative-tokens", type=int, choices=range(1, 65), default=5, metavar="K", help="default 5"
    )
    parser.add_argument("--block-size", type=above_zero(int), default=16, metavar="TOKENS", help="default 16")
    parser.add_argument(
        "--memory-utilization",
        type=above_zero(float, at_most=1),
        default=0.9,
        metavar="SHARE",
        help="of what the weights leave, for the KV cache; default 0.9",
    )


def _serve(arguments: argparse.Namespace) -> int:
    if arguments.launcher == "ray":
        _require_ray()
        from services.launch.ray.launcher import serve
    else:
        from services.launch.local import serve

    options = [
        f"{setting}={value}"
        for option in SERVE_OPTIONS
        if (value := getattr(arguments, option.destination)) is not None
        for setting in option.settings
    ]
    return serve(load_config(arguments.config, [*options, *arguments.overrides]))


def _down(arguments: argparse.Namespace) -> int:
    _require_ray()
    from services.launch.ray.launcher import down

    return down(load_config(arguments.config, arguments.overrides))


def _require_ray() -> None:
    """Raises ConfigurationError when Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigurationError("Ray is not installed: pip install 'outrider[ray]' (`make setup-ray`)")


def _plan_memory(arguments: argparse.Namespace) -> int:
    def memory(gigabytes: float) -> Memory:
        return Memory(gigabytes, arguments.memory_utilization, arguments.block_size)

    draft_gigabytes: float | None = arguments.draft_gpu_memory
    budgets = plan_pair(
        PlannedModel.parse(arguments.target),
        PlannedModel.parse(arguments.draft),
        arguments.num_speculative_tokens,
        memory(arguments.gpu_memory * arguments.gpus),
        None if draft_gigabytes is None else memory(draft_gigabytes),
    )
    print("\n\n".join(describe(budget, arguments.context, arguments.sequences) for budget in budgets))
    return 0 if all(budget.largest_batch(arguments.context) for budget in budgets) else 1


def _run_program(arguments: argparse.Namespace) -> int:
    config: Config = load_config(arguments.config, arguments.overrides)
    # A program that is still loading has nothing to finish; what it serves later has handlers of its own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    # Imported here: the router must not import torch, the workers need not import the router's HTTP server.
    if arguments.command == "router":
        from services.router.main import run
    elif arguments.command == "target":
        from services.target.main import run
    else:
        from services.draft.main import run
    return run(config)


if __name__ == "__main__":
    sys.exit(main())
