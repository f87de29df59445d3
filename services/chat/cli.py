"""The command `outrider chat`."""

from __future__ import annotations

import argparse
import os
import ssl
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from cluster.errors import ConfigurationError
from services.argument_types import above_zero, depth_or_auto
from services.chat.painter import Painter
from services.event_stream import stream_events
from services.http_call import add_trust_arguments, add_url_argument, call, trusted_context
from services.terminal import as_line

_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "A chat with a running cluster. Each token is marked by its origin: accepted drafts in green, the target's "
        "corrections underlined in yellow, bonus tokens bold in cyan, plain decodes unmarked. Without a question "
        "it reads one line per turn, until an empty one or Ctrl-D."
    )
    parser.epilog = "example: outrider chat --url http://127.0.0.1:8000 --temperature 0 'def main('"
    parser.add_argument("words", nargs="*", help="a single question (default: one line per turn)")
    add_url_argument(parser)
    parser.add_argument("--model", metavar="NAME", help="default: the router's first model")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--temperature", type=float, default=0.7, metavar="T", help="default 0.7")
    parser.add_argument(
        "--max-tokens", type=above_zero(int), default=256, metavar="N", help="maximum tokens of an answer; default 256"
    )
    parser.add_argument(
        "--seed", type=int, metavar="N", help="seed: equal seeds give equal answers to the same messages"
    )
    parser.add_argument(
        "--num-speculative-tokens",
        default="auto",
        type=depth_or_auto,
        metavar="K",
        help="draft tokens per round: auto (default) or a number",
    )
    parser.add_argument(
        "--completion",
        action="store_true",
        help="continue the words instead of answering them, without a chat template",
    )
    parser.add_argument("--no-color", action="store_true", help="no colours, as with NO_COLOR or without a terminal")
    add_trust_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Raises ConfigurationError."""
    context = trusted_context(arguments)
    url = arguments.url
    model = arguments.model or _served_model(url, context)
    has_colours = sys.stdout.isatty() and not arguments.no_color and not os.environ.get("NO_COLOR")
    if has_colours:
        print(f"{as_line(model)}: {Painter(has_colours).legend()}")
    messages = [{"role": "system", "content": arguments.system}] if arguments.system else []
    for words in [" ".join(arguments.words)] if arguments.words else _lines():
        messages.append({"role": "user", "content": words})
        body: dict[str, Any] = {
            "model": model,
            "temperature": arguments.temperature,
            "max_tokens": arguments.max_tokens,
            "num_speculative_tokens": arguments.num_speculative_tokens,
            "return_rounds": True,
        }
        if arguments.seed is not None:
            body["seed"] = arguments.seed
        body |= {"prompt": words} if arguments.completion else {"messages": messages}
        painter = Painter(has_colours)
        answer = _answer(url, _COMPLETIONS if arguments.completion else _CHAT, body, painter, context)
        messages.append({"role": "assistant", "content": answer})
    return 0


def _served_model(url: str, context: ssl.SSLContext | None) -> str:
    served = call(url, "GET", "/v1/models", context=context)
    try:
        return str(served["data"][0]["id"])
    except (LookupError, TypeError):
        raise ConfigurationError(f"{url} does not answer as a router") from None


def _answer(url: str, path: str, body: dict[str, Any], painter: Painter, context: ssl.SSLContext | None) -> str:
    """Prints the answer as it arrives, and its statistics; returns its text."""
    started_at, text = time.perf_counter(), []
    try:
        for event in stream_events(url, path, body, context):
            for choice in event.get("choices", ()):
                text.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
                print(painter.paint(choice.get("rounds") or ()), end="", flush=True)
    except KeyboardInterrupt:  # ends the answer, but not the conversation
        pass
    print(f"\n[{painter.summary(time.perf_counter() - started_at)}]")
    return "".join(text)


def _lines() -> Iterable[str]:
    def read() -> Iterator[str]:
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "")
            except EOFError:
                return
            if not line.strip():
                return
            yield line

    return read()
