"""The command `outrider top`."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path

from cluster.errors import ConfigurationError
from services.argument_types import above_zero
from services.http_call import add_url_argument
from services.running_cluster.access import Access, access_of, add_access_arguments, config_of
from services.running_cluster.workers import ClusterFacts, look_around
from services.terminal import as_line, as_lines
from services.top.view import Change, Look

_MAX_SECONDS = 86_400.0
_CLEAR = "\x1b[H\x1b[2J"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "A running cluster's metrics, updated every few seconds until Ctrl-C: requests, tokens, acceptance by "
        "place, k, steps, waits, links and drafts. It polls the metrics pages of router and workers and sends no "
        "request."
    )
    parser.epilog = "example: outrider top --url http://127.0.0.1:8000 --once"
    add_url_argument(parser)
    parser.add_argument(
        "--seconds",
        type=above_zero(float, _MAX_SECONDS),
        default=2.0,
        metavar="S",
        help="seconds between updates; default 2",
    )
    parser.add_argument("--once", action="store_true", help="print one update and exit")
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML configuration with the `tls` to use")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    add_access_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Raises ConfigurationError."""
    access = access_of(arguments, config_of(arguments))
    url = arguments.url
    facts = look_around(url, access)
    before = _look(facts, access)
    try:
        while True:
            time.sleep(arguments.seconds)
            try:
                after = _look(facts, access)
                show(Change(facts, before, after).lines(), clears=not arguments.once)
                if arguments.once:
                    return 0
                before = after
                now = look_around(url, access)
                if now.workers_by_name() != facts.workers_by_name():  # workers come and go
                    facts, before = now, _look(now, access)
            except ConfigurationError as error:  # a restarting worker has no page yet
                if arguments.once:
                    raise
                print(f"{as_line(str(error))}; retrying in {arguments.seconds:g} s", file=sys.stderr)
                with contextlib.suppress(ConfigurationError):
                    now = look_around(url, access)
                    facts, before = now, _look(now, access)
    except KeyboardInterrupt:
        return 0


def show(lines: list[str], *, clears: bool) -> None:
    """Prints `lines`, on a terminal in place of the previous ones."""
    print((_CLEAR if clears and sys.stdout.isatty() else "") + as_lines(lines), flush=True)


def _look(facts: ClusterFacts, access: Access) -> Look:
    router = access.router.read_page(facts.url)
    return Look(time.monotonic(), router, facts.target_pages(access), facts.draft_pages(access))
