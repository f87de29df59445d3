"""`outrider speculation`: asks routers to speculate for all requests, none, or a share of them."""

from __future__ import annotations

import argparse
import ssl

from cluster.errors import ConfigurationError
from services.http_call import add_trust_arguments, call, trusted_context

_PATH = "/admin/speculation"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "share",
        nargs="?",
        type=_percentage,
        metavar="off|on|PERCENT",
        help="share of the requests that may speculate; without it the share is shown",
    )
    parser.add_argument(
        "--admin",
        action="append",
        required=True,
        metavar="HOST:PORT",
        help="a router's `router.admin_listen`, with https:// in front if the router has TLS; repeat it for every "
        "router. If it requires a key, set OUTRIDER_API_KEY in the environment",
    )
    add_trust_arguments(parser)
    parser.add_argument("--reason", default="", help="recorded in each router's log")
    parser.epilog = "example: outrider speculation off --admin 127.0.0.1:8001 --reason 'acceptance fell'"


def run(arguments: argparse.Namespace) -> int:
    """Prints each router's answer. Raises ConfigurationError if one fails; those before it have changed."""
    context = trusted_context(arguments)
    for address in arguments.admin:
        print(f"{address}: speculation for {_ask(address, arguments, context):g} % of requests")
    return 0


def _ask(address: str, arguments: argparse.Namespace, context: ssl.SSLContext | None) -> float:
    if arguments.share is None:
        answer = call(address, "GET", _PATH, context=context)
    else:
        change = {"percentage": arguments.share, "reason": arguments.reason}
        answer = call(address, "PUT", _PATH, change, context=context)
    share = answer.get("percentage") if isinstance(answer, dict) else None
    if not isinstance(share, int | float):
        raise ConfigurationError(f"{address} does not answer as a router's `router.admin_listen`")
    return share


def _percentage(text: str) -> float:
    if text in ("on", "off"):
        return 100.0 if text == "on" else 0.0
    try:
        percentage = float(text.removesuffix("%"))
    except ValueError:
        percentage = -1.0
    if not 0 <= percentage <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not on, off or a percentage from 0 to 100")
    return percentage
