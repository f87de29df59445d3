"""The command `outrider`."""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import get_args

from cluster.config import Config
from cluster.config.file import load_config
from cluster.config.types import LogFormat, LogLevel
from cluster.config.workers import GpuKernels
from cluster.engine.memory_plan import SELF_DRAFTERS, Memory, PlannedModel, describe, plan_pair
from cluster.errors import AddressInUseError, ConfigurationError, OutriderError
from cluster.telemetry.logs import setup_logging
from services.adapters import add_arguments as add_adapter_arguments
from services.adapters import run as change_adapters
from services.certs import add_arguments as add_certs_arguments
from services.certs import run as make_certificates
from services.chat.cli import add_arguments as add_chat_arguments
from services.chat.cli import run as converse
from services.check_config import run as check_config
from services.distill.cli import add_arguments as add_distill_arguments
from services.distill.cli import run as distill_draft
from services.doctor.cli import add_arguments as add_doctor_arguments
from services.doctor.cli import run as examine_cluster
from services.health import add_arguments as add_health_arguments
from services.health import run as check_health
from services.plan.cli import above_zero
from services.plan.cli import add_arguments as add_plan_cluster_arguments
from services.plan.cli import run as plan_cluster
from services.prove.cli import add_arguments as add_prove_arguments
from services.prove.cli import run as prove
from services.settings import AppendOverride, settings_parser
from services.simulate.cli import add_arguments as add_simulate_arguments
from services.simulate.cli import run as simulate
from services.speculation_switch import add_arguments as add_speculation_arguments
from services.speculation_switch import run as switch_speculation
from services.terminal import as_text
from services.top.cli import add_arguments as add_top_arguments
from services.top.cli import run as show_numbers
from services.training.cli import add_arguments as add_train_arguments
from services.training.cli import main as run_training
from services.tune.cli import add_arguments as add_tune_arguments
from services.tune.cli import run as tune_cluster

logger = logging.getLogger(__name__)

_LOG_LEVELS = get_args(LogLevel)
_LOG_FORMATS = get_args(LogFormat)
_PROGRAMS = {
    "router": "run the HTTP router",
    "target": "run a target worker",
    "draft": "run a draft worker",
}


_EPILOG = (
    "Every setting can be given in the file, as `section: {key: VALUE}`; in the environment, as "
    "OUTRIDER_SECTION__KEY=VALUE, which goes before the file; and as --section.key VALUE, which goes before both. "
    "Values are read as YAML. `outrider check-config` shows what comes of it."
)


@dataclass(frozen=True, slots=True)
class ServeOption:
    """A flag of `serve` that stands for settings."""

    flag: str
    metavar: str
    settings: tuple[str, ...]
    purpose: str
    is_mapping: bool = False  # NAME=VALUE, repeated for each, in the place of the whole setting

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
    ServeOption(
        "--lora",
        "NAME=FOLDER",
        ("target.lora",),
        "a LoRA adapter, and the `model` that requests call it by; may be repeated",
        is_mapping=True,
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns the exit code. A setting that cannot work is one line on stderr and code 2; a port of
    a program that another has, which may be free later, is code 75 (EX_TEMPFAIL)."""
    arguments = make_parser().parse_args(argv)
    if "log_level" in arguments:
        setup_logging(arguments.command, arguments.log_level, arguments.log_format)
    else:
        setup_logging(arguments.command)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows another
    try:
        code = int(arguments.run(arguments))
        sys.stdout.flush()
        return code
    except OutriderError as error:
        if getattr(arguments, "log_format", "text") == "json":
            logger.error("%s", error)
        else:
            print(as_text(f"outrider {arguments.command}: {error}"), file=sys.stderr)
        is_passing = isinstance(error, AddressInUseError) and arguments.command in _PROGRAMS
        return os.EX_TEMPFAIL if is_passing else 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read what is printed has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # of what is left nothing is told at exit
        return 128 + signal.SIGPIPE


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="outrider", description="Speculative decoding across machines, with an OpenAI-compatible endpoint."
    )
    parser.add_argument("--version", action="version", version=f"outrider {version('outrider')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    settings = [settings_parser()]
    serve = commands.add_parser("serve", parents=settings, help="run a whole cluster, on this machine or on Ray")
    _add_serve_arguments(serve)
    serve.set_defaults(run=_serve)
    down = commands.add_parser(
        "down", parents=settings, help="end what `serve --launcher ray` left running when it was killed"
    )
    _add_config_arguments(down)
    down.set_defaults(run=_down)
    for program, purpose in _PROGRAMS.items():
        command = commands.add_parser(program, parents=settings, help=purpose)
        _add_config_arguments(command)
        command.set_defaults(run=_run_program)
    check = commands.add_parser(
        "check-config", parents=settings, help="show the configuration that comes of file, environment and options"
    )
    _add_config_arguments(check)
    check.set_defaults(run=_check_config)
    health = commands.add_parser("health", help="tell whether a router or a worker answers")
    add_health_arguments(health)
    _add_log_options(health)
    health.set_defaults(run=check_health)
    certs = commands.add_parser("certs", help="make certificates of an authority of one's own, for development")
    add_certs_arguments(certs)
    _add_log_options(certs)
    certs.set_defaults(run=make_certificates)
    speculation = commands.add_parser("speculation", help="switch speculation off, on, or on for some requests, live")
    add_speculation_arguments(speculation)
    _add_log_options(speculation)
    speculation.set_defaults(run=switch_speculation)
    adapter = commands.add_parser("adapter", help="load, unload or list LoRA adapters, live")
    add_adapter_arguments(adapter)
    _add_log_options(adapter)
    adapter.set_defaults(run=change_adapters)
    plans = commands.add_parser("plan", help="tell what a deployment needs").add_subparsers(
        required=True, metavar="WHAT"
    )
    plan_memory = plans.add_parser("memory", help="GPU memory of a pair: weights, KV cache, largest batch")
    _add_plan_memory_arguments(plan_memory)
    _add_log_options(plan_memory)
    plan_memory.set_defaults(run=_plan_memory)
    cluster = plans.add_parser("cluster", help="throughput, latency and dollars of ways to place a draft")
    add_plan_cluster_arguments(cluster)
    _add_log_options(cluster)
    cluster.set_defaults(run=plan_cluster)
    doctor = commands.add_parser("doctor", help="examine a running cluster: what drafts give, and what keeps them back")
    add_doctor_arguments(doctor)
    _add_log_options(doctor)
    doctor.set_defaults(run=examine_cluster)
    tune = commands.add_parser("tune", help="try the settings that the doctor suspects, and write what was faster")
    add_tune_arguments(tune)
    _add_log_options(tune)
    tune.set_defaults(run=tune_cluster)
    top = commands.add_parser("top", help="a running cluster's numbers, live in the terminal")
    add_top_arguments(top)
    _add_log_options(top)
    top.set_defaults(run=show_numbers)
    chat = commands.add_parser("chat", help="a conversation that shows which tokens were drafted")
    add_chat_arguments(chat)
    _add_log_options(chat)
    chat.set_defaults(run=converse)
    distill = commands.add_parser("distill", help="teach a draft what a target answers to your prompts")
    add_distill_arguments(distill)
    _add_log_options(distill)
    distill.set_defaults(run=distill_draft)
    simulated = commands.add_parser("simulate", help="tell what a cluster would do under traffic, in virtual time")
    add_simulate_arguments(simulated)
    _add_log_options(simulated)
    simulated.set_defaults(run=simulate)
    proof = commands.add_parser("prove", help="measure on two devices whether Outrider pays, next to `vllm serve`")
    add_prove_arguments(proof)
    _add_log_options(proof)
    proof.set_defaults(run=prove)
    train = commands.add_parser("train", help="train the bundled pair of models, or an EAGLE head for a target")
    add_train_arguments(train)
    _add_log_options(train)
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
        help="another way to write --SECTION.KEY VALUE; may be repeated",
    )
    parser.add_argument(
        "--log-level",
        action=AppendOverride,
        dest="overrides",
        const=("logging.level",),
        default=[],
        choices=_LOG_LEVELS,
        help="the least that is logged (default: info); the same as --logging.level",
    )
    parser.add_argument(
        "--log-format",
        action=AppendOverride,
        dest="overrides",
        const=("logging.format",),
        default=[],
        choices=_LOG_FORMATS,
        help="how it is written (default: text); the same as --logging.format",
    )
    parser.usage = f"{parser.prog} [OPTION ...] [--SECTION.KEY VALUE ...]"  # argparse would list two hundred
    parser.epilog = _EPILOG


def _add_log_options(parser: argparse.ArgumentParser) -> None:
    """To a command that has no configuration of its own."""
    parser.add_argument("--log-level", choices=_LOG_LEVELS, default="info", help="default: info")
    parser.add_argument("--log-format", choices=_LOG_FORMATS, default="text", help="default: text")


def _add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    _add_config_arguments(parser)
    parser.add_argument(
        "--launcher",
        choices=("local", "ray"),
        default="local",
        help="local: processes of this machine (default); ray: a Ray Serve application, on a new Ray if none is here",
    )
    parser.add_argument("--open", action="store_true", help="open the page in a browser when it is ready")
    for option in SERVE_OPTIONS:
        if option.is_mapping:
            parser.add_argument(
                option.flag,
                action="append",
                type=_pair,
                dest=option.destination,
                default=[],
                metavar=option.metavar,
                help=option.purpose,
            )
            continue
        parser.add_argument(
            option.flag,
            action=AppendOverride,
            dest="overrides",
            const=option.settings,
            default=[],
            metavar=option.metavar,
            help=option.purpose,
        )


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not (separator and name and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _add_plan_memory_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "A MODEL is a size (1B, 1.5B, 7B, 8B, 13B, 70B), a size with its layers, KV heads and head size "
        "(34B/48x8x128), a folder or a bundled model; its DTYPE fp32, fp16 (default), bf16, int8 or int4. "
        "The exit code is 1 when not even one sequence fits."
    )
    parser.add_argument("--target", required=True, metavar="MODEL[:DTYPE]")
    parser.add_argument(
        "--draft",
        required=True,
        metavar="MODEL[:DTYPE]",
        help=f"or {' or '.join(SELF_DRAFTERS)}: made of the target, in its process",
    )
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
    parser.add_argument(
        "--gpu-kernels",
        choices=get_args(GpuKernels),
        default="torch",
        help="as the setting; triton: the memory of the steps it records is counted (default: %(default)s)",
    )
    parser.add_argument(
        "--max-num-batched-tokens",
        type=above_zero(int),
        default=512,
        metavar="N",
        help="of a step (default: %(default)s)",
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

    mappings = [
        f"{setting}={json.dumps(dict(pairs))}"
        for option in SERVE_OPTIONS
        if option.is_mapping and (pairs := getattr(arguments, option.destination))
        for setting in option.settings
    ]
    arguments.overrides = [*mappings, *arguments.overrides]
    config = _load(arguments)
    if arguments.open and not config.router.has_page:
        raise ConfigurationError("--open: there is no page to open, as router.page is off")
    return serve(config, arguments.open)


def _load(arguments: argparse.Namespace) -> Config:
    """The configuration, with the log as it says from here on. Raises ConfigurationError."""
    config = load_config(arguments.config, arguments.overrides, os.environ)
    arguments.log_format = config.logging.format
    setup_logging(arguments.command, config.logging.level, config.logging.format)
    return config


def _check_config(arguments: argparse.Namespace) -> int:
    return check_config(_load(arguments))


def _down(arguments: argparse.Namespace) -> int:
    _require_ray()
    from services.launch.ray.launcher import down

    return down(_load(arguments))


def _require_ray() -> None:
    """Raises ConfigurationError when Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigurationError("Ray is not installed: pip install 'outrider[ray]' (`make setup-ray`)")


def _plan_memory(arguments: argparse.Namespace) -> int:
    def memory(gigabytes: float) -> Memory:
        rows = arguments.max_num_batched_tokens if arguments.gpu_kernels == "triton" else 0
        return Memory(gigabytes, arguments.memory_utilization, arguments.block_size, rows, arguments.context)

    draft_gigabytes: float | None = arguments.draft_gpu_memory
    target = PlannedModel.parse(arguments.target)
    if arguments.draft in SELF_DRAFTERS:
        if draft_gigabytes is not None:
            raise ConfigurationError(
                f"--draft {arguments.draft} is on the target's GPU, whose tensors it has: leave --draft-gpu-memory out"
            )
        draft = target.drafting_in_process(arguments.draft)
    else:
        draft = PlannedModel.parse(arguments.draft)
    budgets = plan_pair(
        target,
        draft,
        arguments.num_speculative_tokens,
        memory(arguments.gpu_memory * arguments.gpus),
        None if draft_gigabytes is None else memory(draft_gigabytes),
    )
    print("\n\n".join(describe(budget, arguments.context, arguments.sequences) for budget in budgets))
    return 0 if all(budget.largest_batch(arguments.context) for budget in budgets) else 1


def _run_program(arguments: argparse.Namespace) -> int:
    config = _load(arguments)
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
