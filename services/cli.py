"""The command `outrider`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from cluster.config import Config, load_config
from cluster.errors import ConfigurationError
from cluster.telemetry.logs import setup_logging
from cluster.training.cli import add_arguments as add_train_arguments
from cluster.training.cli import main as run_training

_PROGRAMS = {
    "router": "run the HTTP router",
    "target": "run a target worker",
    "draft": "run a draft worker",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns the exit code. A setting that cannot work is one line on stderr and code 2."""
    arguments = _parser().parse_args(argv)
    setup_logging(arguments.command)
    try:
        return int(arguments.run(arguments))
    except ConfigurationError as error:
        print(f"outrider {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="outrider", description="Speculative decoding across machines, with an OpenAI-compatible endpoint."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="run a whole cluster on this machine")
    _add_serve_arguments(serve)
    serve.set_defaults(run=_serve)
    for program, purpose in _PROGRAMS.items():
        command = commands.add_parser(program, help=purpose)
        _add_config_arguments(command)
        command.set_defaults(run=_run_program)
    train = commands.add_parser("train", help="train the bundled pair of models")
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
    options: tuple[tuple[str, str, str], ...] = (
        ("--host", "H", "address the router listens at (router.host)"),
        ("--port", "P", "port the router listens at (router.port; default 8000)"),
        ("--target", "MODEL", "target model: Hugging Face folder, hub name or bundled model"),
        ("--draft", "MODEL", "draft model, with the same tokenizer"),
        ("--num-speculative-tokens", "K", "draft tokens a round; 0 starts no draft"),
        ("--dtype", "TYPE", "auto, float32 or bfloat16, for target and draft"),
        ("--target-replicas", "N", "target workers"),
        ("--draft-replicas", "N", "draft workers"),
    )
    for option, metavar, purpose in options:
        parser.add_argument(option, metavar=metavar, help=purpose)


# Which settings an option of `serve` stands for.
_SETTINGS = {
    "host": ("router.host",),
    "port": ("router.port",),
    "target": ("target.model",),
    "draft": ("draft.model",),
    "num_speculative_tokens": ("speculation.num_speculative_tokens",),
    "dtype": ("target.dtype", "draft.dtype"),
    "target_replicas": ("target.replicas",),
    "draft_replicas": ("draft.replicas",),
}


def _serve(arguments: argparse.Namespace) -> int:
    from services.launch.local import serve

    options = [
        f"{setting}={value}"
        for option, settings in _SETTINGS.items()
        if (value := getattr(arguments, option)) is not None
        for setting in settings
    ]
    return serve(load_config(arguments.config, [*options, *arguments.overrides]))


def _run_program(arguments: argparse.Namespace) -> int:
    config: Config = load_config(arguments.config, arguments.overrides)
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
