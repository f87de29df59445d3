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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from cluster.config import Config
from cluster.config.file import load_config
from cluster.config.types import LogFormat, LogLevel
from cluster.errors import AddressInUseError, ConfigurationError, OutriderError, UnavailableError
from cluster.telemetry.logs import log_name, setup_logging
from services import adapters, check_config, drafts, health, speculation_switch
from services.argument_types import name_and_value
from services.chat import cli as chat
from services.distill import cli as distill
from services.doctor import cli as doctor
from services.plan import choose as plan_choose
from services.plan import cli as plan_cluster
from services.plan import draft as plan_draft
from services.plan import memory as plan_memory
from services.prove import cli as prove
from services.settings import AppendOverride, known_options, settings_parser
from services.simulate import cli as simulate
from services.terminal import as_text
from services.top import cli as top
from services.tune import cli as tune
from services.version import ShowVersion

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
    "OUTRIDER_SECTION__KEY=VALUE, which overrides the file; and as --section.key VALUE, which overrides both. "
    "Values are parsed as YAML. `outrider check-config` shows the result."
)


@dataclass(frozen=True, slots=True)
class ServeOption:
    """A flag of `serve` that sets several settings."""

    flag: str
    metavar: str
    settings: tuple[str, ...]
    purpose: str
    is_mapping: bool = False  # repeated NAME=VALUE, which replaces the whole setting
    is_list: bool = False  # one or more values, also repeated

    @property
    def destination(self) -> str:
        return self.flag.removeprefix("--").replace("-", "_")


SERVE_OPTIONS = (
    ServeOption("--host", "H", ("router.host",), "address the router listens at"),
    ServeOption("--port", "P", ("router.port",), "port the router listens at; default 8000"),
    ServeOption("--target", "MODEL", ("target.model",), "Hugging Face folder, hub name or bundled model"),
    ServeOption(
        "--draft",
        "MODEL",
        ("draft.model",),
        "Hugging Face folder, hub name or bundled model, best with the target's tokenizer",
    ),
    ServeOption(
        "--num-speculative-tokens",
        "K",
        ("speculation.num_speculative_tokens",),
        "initial draft tokens per round; 0 starts no draft worker and gives the target every core",
    ),
    ServeOption("--controller", "C", ("speculation.controller",), "how k is chosen: goodput (default) or fixed"),
    ServeOption("--dtype", "TYPE", ("target.dtype", "draft.dtype"), "auto, float32 or bfloat16, for target and draft"),
    ServeOption(
        "--served-model-name",
        "NAME",
        ("router.served_model_name",),
        "names of the model in requests; ALIAS=NAME: another name of the model or of an adapter",
        is_list=True,
    ),
    ServeOption("--chat-template", "FILE", ("router.chat_template",), "chat template, in place of the model's"),
    ServeOption("--tensor-parallel-size", "N", ("target.tensor_parallel_size",), "GPUs of each target"),
    ServeOption("--gpu-memory-utilization", "SHARE", ("target.memory_utilization",), "share of a GPU for the target"),
    ServeOption("--max-num-seqs", "N", ("target.max_num_seqs",), "sequences that a target computes at once"),
    ServeOption("--max-model-len", "N", ("target.max_model_len",), "tokens of a prompt and its answer"),
    ServeOption("--target-replicas", "N", ("target.replicas",), "target workers"),
    ServeOption("--draft-replicas", "N", ("draft.replicas",), "draft workers"),
    ServeOption(
        "--lora",
        "NAME=FOLDER",
        ("target.lora",),
        "LoRA adapter, and the `model` of requests for it; may be repeated",
        is_mapping=True,
    ),
)


_OF_VLLM = {
    "--api-key": "write NAME:KEY in a file, and set --router.api_keys_file FILE",
    "--root-path": "let the proxy remove the prefix of the path (docs/OPERATING.md, Gateways)",
}
"""Instructions for options of `vllm serve` that have no counterpart here."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command with its own options, without settings."""

    name: str
    purpose: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


PLANS = (
    Command(
        "memory", "GPU memory of a pair: weights, KV cache, largest batch", plan_memory.add_arguments, plan_memory.run
    ),
    Command(
        "cluster",
        "throughput, latency and dollars of ways to place a draft",
        plan_cluster.add_arguments,
        plan_cluster.run,
    ),
    Command(
        "draft",
        "which models at hand can draft for a target, and why others cannot",
        plan_draft.add_arguments,
        plan_draft.run,
    ),
    Command(
        "choose",
        "the way to draft with the most requests a dollar within limits, for five workloads",
        plan_choose.add_arguments,
        plan_choose.run,
    ),
)
COMMANDS = (
    Command(
        "health", "check that a router or a worker answers, and which targets are up", health.add_arguments, health.run
    ),
    Command(
        "speculation",
        "switch speculation off, on, or on for a share of the requests, at run time",
        speculation_switch.add_arguments,
        speculation_switch.run,
    ),
    Command("adapter", "load, unload or list LoRA adapters at run time", adapters.add_arguments, adapters.run),
    Command("drafts", "load, take back or list versions of the draft at run time", drafts.add_arguments, drafts.run),
    Command(
        "doctor", "examine a running cluster: the gain of drafts, and its limits", doctor.add_arguments, doctor.run
    ),
    Command(
        "tune", "try the settings that the doctor suspects, and write the faster ones", tune.add_arguments, tune.run
    ),
    Command("top", "a running cluster's metrics, live in the terminal", top.add_arguments, top.run),
    Command("chat", "a chat that marks the drafted tokens", chat.add_arguments, chat.run),
    Command("distill", "train a draft on a target's answers to your prompts", distill.add_arguments, distill.run),
    Command("simulate", "simulate a cluster under traffic, in virtual time", simulate.add_arguments, simulate.run),
    Command(
        "prove", "measure on two devices whether Outrider pays, next to `vllm serve`", prove.add_arguments, prove.run
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand. Returns the exit code.

    An unusable setting is one line on stderr and code 2. A cluster that cannot start is code 1. A port that another
    program has, and may free later, is code 75 (EX_TEMPFAIL).
    """
    arguments = _parse(argv)
    if "log_level" in arguments:
        setup_logging(arguments.command, arguments.log_level, arguments.log_format)
    else:
        setup_logging(arguments.command)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal prints a substitute for a character it lacks
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
        if is_passing:
            return os.EX_TEMPFAIL
        return 1 if isinstance(error, UnavailableError) and arguments.command == "serve" else 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader closed the output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # no error for the remaining output at exit
        return 128 + signal.SIGPIPE


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the parsed arguments. Exits with code 2 if they are unusable.

    An unknown option is an error of its command: argparse would print the usage of `outrider`.
    """
    arguments, unknown = make_parser().parse_known_args(argv)
    if unknown:
        parser: argparse.ArgumentParser = arguments.own_parser
        option = next((text.partition("=")[0] for text in unknown if text.startswith("-")), "")
        known = known_options(option, parser) if option else []
        hint = f"did you mean {' or '.join(known)}?" if known else f"see {parser.prog} --help"
        hint = _OF_VLLM.get(option, hint)
        shown = [text.partition("=")[0] for text in unknown if text.startswith("-")] or unknown  # values may be secret
        parser.error(f"unrecognized arguments: {' '.join(shown)}; {hint}")
    return arguments


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="outrider", description="Speculative decoding across machines, with an OpenAI-compatible endpoint."
    )
    parser.add_argument("--version", action=ShowVersion, help="show the version, commit, wire and kernels, and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    settings = [settings_parser()]
    serve = commands.add_parser("serve", parents=settings, help="run a whole cluster, on this machine or on Ray")
    _add_serve_arguments(serve)
    serve.set_defaults(run=_serve, own_parser=serve)
    down = commands.add_parser(
        "down", parents=settings, help="end the application that a killed `serve --launcher ray` left running"
    )
    _add_config_arguments(down)
    down.set_defaults(run=_down, own_parser=down)
    for program, purpose in _PROGRAMS.items():
        command = commands.add_parser(program, parents=settings, help=purpose)
        _add_config_arguments(command)
        command.set_defaults(run=_run_program, own_parser=command)
    check = commands.add_parser(
        "check-config", parents=settings, help="show the configuration that results from file, environment and options"
    )
    _add_config_arguments(check)
    check.set_defaults(run=_check_config, own_parser=check)
    plans = commands.add_parser("plan", help="estimate what a deployment needs").add_subparsers(
        required=True, metavar="WHAT"
    )
    for parsers, listed in ((plans, PLANS), (commands, COMMANDS)):
        for own in listed:
            command = parsers.add_parser(own.name, help=own.purpose)
            own.add_arguments(command)
            _add_log_options(command)
            command.set_defaults(run=own.run, own_parser=command)
    return parser


def _add_config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML configuration (default: all defaults)")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="the same as --SECTION.KEY VALUE; may be repeated",
    )
    parser.add_argument(
        "--log-level",
        action=AppendOverride,
        dest="overrides",
        const=("logging.level",),
        default=[],
        choices=_LOG_LEVELS,
        help="lowest level that is logged (default: info); the same as --logging.level",
    )
    parser.add_argument(
        "--log-format",
        action=AppendOverride,
        dest="overrides",
        const=("logging.format",),
        default=[],
        choices=_LOG_FORMATS,
        help="format of the log (default: text); the same as --logging.format",
    )
    parser.add_argument(
        "--allow-untested-vllm",
        action=AppendOverride,
        nargs=0,
        dest="overrides",
        const=("target.allow_untested_vllm", "draft.allow_untested_vllm"),
        default=[],
        help="start workers even if an untested version of vLLM differs in internals that Outrider uses; the "
        "differences are logged",
    )
    parser.usage = f"{parser.prog} [OPTION ...] [--SECTION.KEY VALUE ...]"  # argparse would list two hundred options
    parser.epilog = _EPILOG


def _add_log_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options to a command without a configuration."""
    parser.add_argument("--log-level", choices=_LOG_LEVELS, default="info", help="default: info")
    parser.add_argument("--log-format", choices=_LOG_FORMATS, default="text", help="default: text")


def _add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    _add_config_arguments(parser)
    parser.add_argument(
        "--launcher",
        choices=("local", "ray"),
        default="local",
        help="local: processes on this machine (default); ray: a Ray Serve application, on a new Ray cluster if "
        "none runs here",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="the same as --target MODEL")
    parser.add_argument("--open", action="store_true", help="open the page in a browser when it is ready")
    for option in SERVE_OPTIONS:
        if option.is_mapping:
            parser.add_argument(
                option.flag,
                action="append",
                type=name_and_value,
                dest=option.destination,
                default=[],
                metavar=option.metavar,
                help=option.purpose,
            )
            continue
        if option.is_list:
            parser.add_argument(
                option.flag, action="extend", nargs="+", default=[], metavar=option.metavar, help=option.purpose
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


def _serve(arguments: argparse.Namespace) -> int:
    if arguments.launcher == "ray":
        _require_ray()
        from services.launch.ray.launcher import serve
    else:
        from services.launch.local import serve

    collected = [
        f"{setting}={json.dumps(dict(values) if option.is_mapping else values)}"
        for option in SERVE_OPTIONS
        if (option.is_mapping or option.is_list) and (values := getattr(arguments, option.destination))
        for setting in option.settings
    ]
    model = [] if arguments.model is None else [f"target.model={arguments.model}"]
    if model and any(override.startswith("target.model=") for override in arguments.overrides):
        raise ConfigurationError(f"MODEL {arguments.model} and --target name two models: give one of them")
    if not model and (names := arguments.served_model_name) and "/" in names[-1]:
        raise ConfigurationError(f"--served-model-name takes {names[-1]} as a name: write MODEL before it, or --target")
    arguments.overrides = [*collected, *arguments.overrides, *model]
    config = _load(arguments)
    if arguments.open and not config.router.has_page:
        raise ConfigurationError("--open: there is no page to open, as router.page is off")
    return serve(config, arguments.open)


def _load(arguments: argparse.Namespace) -> Config:
    """Returns the configuration and sets up the log accordingly. Raises ConfigurationError."""
    config = load_config(arguments.config, arguments.overrides, os.environ)
    arguments.log_format = config.logging.format
    setup_logging(log_name(arguments.command), config.logging.level, config.logging.format)
    return config


def _check_config(arguments: argparse.Namespace) -> int:
    return check_config.run(_load(arguments))


def _down(arguments: argparse.Namespace) -> int:
    _require_ray()
    from services.launch.ray.launcher import down

    return down(_load(arguments))


def _require_ray() -> None:
    """Raises ConfigurationError if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigurationError("Ray is not installed: pip install 'outrider[ray]' (`make setup-ray`)")


def _run_program(arguments: argparse.Namespace) -> int:
    config = _load(arguments)
    # A program that is still loading has nothing to finish; its server installs handlers of its own later.
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
