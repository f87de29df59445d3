"""`outrider speculation`: asks routers to speculate for all requests, none, or a share of them."""

from __future__ import annotations

import argparse
import json
import urllib.error
import urllib.request

from cluster.errors import ConfigurationError

_TIMEOUT_SECONDS = 10.0


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
    request = urllib.request.Request(f"http://{address}/admin/speculation")
    if percentage is not None:
        request.method = "PUT"
        request.data = json.dumps({"percentage": percentage, "reason": reason}).encode()
        request.add_header("content-type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:
            return float(json.load(answer)["percentage"])
    except urllib.error.HTTPError as error:
        raise ConfigurationError(f"{address} refused: {error.read(500).decode(errors='replace')}") from error
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(f"{address} does not answer as a router's `router.admin_listen`: {error}") from error


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
