"""`outrider adapter`: loads a LoRA adapter on all targets of a router, unloads one, or lists them."""

from __future__ import annotations

import argparse
import ssl
from typing import Any
from urllib.parse import quote

from cluster.errors import ConfigurationError
from services.http_call import add_trust_arguments, call, trusted_context
from services.terminal import as_line

_PATH = "/admin/adapters"
_SECONDS = 320.0  # a target may take minutes to load one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    load = actions.add_parser("load", help="load an adapter on every target at run time")
    load.add_argument("name", metavar="NAME", help="the name that requests give as their `model`")
    load.add_argument(
        "path", metavar="PATH", help="the adapter's folder on each target's disk, below its `target.lora_root`"
    )
    load.add_argument("--replace", action="store_true", help="replace an adapter of that name with other contents")
    unload = actions.add_parser("unload", help="refuse new requests for an adapter; running ones end normally")
    unload.add_argument("name", metavar="NAME")
    listed = actions.add_parser("list", help="list the adapters of each target")
    for action in (load, unload, listed):
        action.add_argument(
            "--admin",
            required=True,
            metavar="HOST:PORT",
            help="a router's `router.admin_listen`, with https:// in front if the router has TLS; one router is "
            "enough. If it requires a key, set OUTRIDER_API_KEY in the environment",
        )
        add_trust_arguments(action)
    for action in (load, unload):
        action.add_argument("--reason", default="", help="recorded in the router's log")
    parser.epilog = "example: outrider adapter load sql-v2 sql/v2 --admin 127.0.0.1:8001"


def run(arguments: argparse.Namespace) -> int:
    """Prints the results, one target per line; returns 1 if one failed. Raises ConfigurationError if all did."""
    context = trusted_context(arguments)
    if arguments.action == "list":
        return _list(arguments.admin, context)
    if arguments.action == "load":
        body = {
            "name": arguments.name,
            "path": arguments.path,
            "replace": arguments.replace,
            "reason": arguments.reason,
        }
        answer = call(arguments.admin, "POST", _PATH, body, seconds=_SECONDS, context=context)
    else:
        path = f"{_PATH}/{quote(arguments.name)}?reason={quote(arguments.reason)}"
        answer = call(arguments.admin, "DELETE", path, seconds=_SECONDS, context=context)
    has_failed = False
    for target in _entries(arguments.admin, answer, "targets"):
        has_failed |= "error" in target
        print(as_line(f"{target.get('address')}: {_outcome(target)}"))
    return int(has_failed)


def _outcome(target: dict[str, Any]) -> str:
    if "error" in target:
        return f"failed: {target['error']}"
    if "fingerprint" in target:
        return f"loaded, {str(target['fingerprint'])[:12]}"
    return f"unloaded; {target.get('num_running', 0)} running requests still use it"


def _list(address: str, context: ssl.SSLContext | None) -> int:
    for adapter in _entries(address, call(address, "GET", _PATH, context=context), "adapters"):
        targets = adapter.get("targets") or []
        holders = ", ".join(map(str, targets))
        print(as_line(f"{adapter.get('name')} {str(adapter.get('fingerprint'))[:12]} on {holders}"))
    return 0


def _entries(address: str, answer: Any, name: str) -> list[dict[str, Any]]:
    entries = answer.get(name) if isinstance(answer, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigurationError(f"{address} does not answer as a router's `router.admin_listen`")
    return entries
