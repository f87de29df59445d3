"""The command `outrider top`."""

from __future__ import annotations

import argparse
import contextlib
import os
import ssl
import sys
import time
from pathlib import Path

from cluster.config_file import load_config
from cluster.errors import ConfigurationError
from cluster.transport.dialing import Dialer
from services.doctor.pages import read_page
from services.doctor.workers import ClusterFacts, look_around
from services.http_call import API_KEY, add_trust_arguments, trusted_context
from services.plan.cli import above_zero
from services.top.view import Change, Look

_CLEAR = "\x1b[H\x1b[2J"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "A running cluster's numbers, anew every few seconds until Ctrl-C: requests, tokens, acceptance by place, k, "
        "steps, waits, links and drafts. It asks the metrics pages of router and workers and sends no request."
    )
    parser.epilog = "example: outrider top --url http://127.0.0.1:8000 --once"
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", metavar="URL", help="of the router; default %(default)s"
    )
    parser.add_argument("--seconds", type=above_zero(float), default=2.0, metavar="S", help="between looks; default 2")
    parser.add_argument("--once", action="store_true", help="two looks, and no more")
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML configuration whose `tls` is used")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    add_trust_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Raises ConfigurationError."""
    context = trusted_context(arguments)
    config = load_config(arguments.config, arguments.overrides, os.environ)
    dialer = Dialer.of(config.tls, "router", config.target.tls_server_name)
    url = arguments.url.rstrip("/")
    facts = look_around(url, dialer, context)
    before = _look(facts, context)
    try:
        while True:
            time.sleep(arguments.seconds)
            try:
                after = _look(facts, context)
                _show(Change(facts, before, after).lines(), clears=not arguments.once)
                if arguments.once:
                    return 0
                before = after
                now = look_around(url, dialer, context)
                if now.workers_by_name() != facts.workers_by_name():  # workers come and go
                    facts, before = now, _look(now, context)
            except ConfigurationError as error:  # one that is being started again has no page yet
                if arguments.once:
                    raise
                print(f"{error}; asked again in {arguments.seconds:g} s", file=sys.stderr)
                with contextlib.suppress(ConfigurationError):
                    facts = look_around(url, dialer, context)
                    before = _look(facts, context)
    except KeyboardInterrupt:
        return 0


def _show(lines: list[str], *, clears: bool) -> None:
    print((_CLEAR if clears and sys.stdout.isatty() else "") + "\n".join(lines), flush=True)


def _look(facts: ClusterFacts, context: ssl.SSLContext | None) -> Look:
    router = read_page(f"{facts.url}/metrics", context, key=os.environ.get(API_KEY))
    return Look(time.monotonic(), router, facts.target_pages(context), facts.draft_pages(context))
