"""`outrider speculation`: asks routers to speculate for all requests, none, or a share of them."""

from __future__ import annotations

import argparse

from cluster.errors import ConfigurationError
from services.http_call import call

_PATH = "/admin/speculation"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "share",
        nargs="?",
        type=_percentage,
        metavar="off|on|PERCENT",
        help="share of the requests to speculate for; without it the share is shown",
    )
    parser.add_argument(
        "--admin",
        action="append",
        required=True,
        metavar="HOST:PORT",
        help="a router's `router.admin_listen`; repeat it for every router",
    )
    parser.add_argument("--reason", default="", help="kept in each router's log")
    parser.epilog = "example: outrider speculation off --admin 127.0.0.1:8001 --reason 'acceptance fell'"


def run(arguments: argparse.Namespace) -> int:
    """Prints what each router answers. Raises ConfigurationError when one does not; those before it have changed."""
    for address in arguments.admin:
        print(f"{address}: speculation for {_ask(address, arguments.share, arguments.reason):g} % of requests")
    return 0


def _ask(address: str, percentage: float | None, reason: str) -> float:
    if percentage is None:
        answer = call(address, "GET", _PATH)
    else:
        answer = call(address, "PUT", _PATH, {"percentage": percentage, "reason": reason})
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
