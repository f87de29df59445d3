"""The content blocks of an answer, and the stream events that report them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic_core import from_json

from services.router.http.json_values import without_halves
from services.router.output.source import Said

Event = dict[str, Any]
Block = dict[str, Any]

# Clients drop thinking blocks without a signature. The router signs nothing and ignores signatures of requests.
SIGNATURE = "unsigned"

_TYPES = {"content": "text", "reasoning": "thinking", "call": "tool_use", "arguments": "tool_use"}


class ContentBlocks:
    """The blocks of one answer."""

    def __init__(self) -> None:
        self._blocks: list[Block] = []
        self._is_open = False  # whether the last block may still grow
        self._pieces: list[str] = []  # text of the open block

    @property
    def blocks(self) -> list[Block]:
        """The blocks that are complete."""
        return self._blocks[:-1] if self._is_open else self._blocks

    @property
    def has_calls(self) -> bool:
        return any(block["type"] == "tool_use" for block in self._blocks)

    def say(self, said: Sequence[Said], call_ids: Iterator[str]) -> Iterator[Event]:
        """Yields the events of `said`; each call takes one of `call_ids`."""
        for one in said:
            kind = _TYPES[one.kind]
            if not self._is_open or self._blocks[-1]["type"] != kind or one.kind == "call":
                yield from self.close()
                yield from self._begin(kind, one.text, call_ids)
            if one.kind != "call" and one.text:
                self._pieces.append(one.text)
                yield self._delta(_delta(kind, one.text))

    def close(self) -> Iterator[Event]:
        """Yields the events of the end of the last block, if it is open."""
        if not self._is_open:
            return
        self._is_open = False
        block, text = self._blocks[-1], "".join(self._pieces)
        self._pieces = []
        match block["type"]:
            case "tool_use":
                block["input"] = _input(text)
            case "thinking":
                block |= {"thinking": text, "signature": SIGNATURE}
                yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
            case _:
                block["text"] = text
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _begin(self, kind: str, name: str, call_ids: Iterator[str]) -> Iterator[Event]:
        block: Block
        match kind:
            case "tool_use":
                block = {"type": "tool_use", "id": next(call_ids), "name": name, "input": {}}
            case "thinking":
                block = {"type": "thinking", "thinking": "", "signature": ""}
            case _:
                block = {"type": "text", "text": ""}
        self._blocks.append(block)
        self._is_open = True
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}

    def _delta(self, delta: dict[str, str]) -> Event:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}


def _delta(kind: str, text: str) -> dict[str, str]:
    match kind:
        case "tool_use":
            return {"type": "input_json_delta", "partial_json": text}
        case "thinking":
            return {"type": "thinking_delta", "thinking": text}
    return {"type": "text_delta", "text": text}


def _input(arguments: str) -> dict[str, Any]:
    """Returns the object in the JSON text `arguments` of a call.

    If the text is cut off, its incomplete values are dropped. Text that is not a JSON object, or that has NaN or
    Infinity, becomes the only field, `arguments`.
    """
    try:
        value = from_json(without_halves((arguments or "{}").encode()), allow_partial=True)
        json.dumps(value, allow_nan=False)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}
