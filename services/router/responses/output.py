"""The items that an answer becomes, and the events that tell of them while it comes."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from services.router.output.source import Said

Event = dict[str, Any]
Item = dict[str, Any]

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
_DELTAS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}
_ITEM_OF = {"content": "message", "reasoning": "reasoning", "call": "function_call", "arguments": "function_call"}


class OutputItems:
    """The items of one answer, as they come to be."""

    def __init__(self) -> None:
        self._items: list[Item] = []
        self._is_open = False  # the last of them
        self._pieces: list[str] = []  # of its text, which are not in it yet

    @property
    def items(self) -> list[Item]:
        """Those so far, with their text so far."""
        if self._pieces:
            item, text = self._items[-1], "".join(self._pieces)
            if item["type"] == "function_call":
                item["arguments"] += text
            else:
                item["content"][0]["text"] += text
            self._pieces = []
        return self._items

    def say(self, said: Sequence[Said], call_ids: Iterator[str]) -> Iterator[Event]:
        """The events of what was said; each call takes one of `call_ids`."""
        for one in said:
            kind = _ITEM_OF[one.kind]
            if not self._is_open or self._items[-1]["type"] != kind or one.kind == "call":
                yield from self.close()
                yield from self._begin(kind, one.text if one.kind == "call" else "", call_ids)
            if one.kind != "call" and one.text:
                yield self._delta(one.text)

    def close(self, status: str = "completed") -> Iterator[Event]:
        """The events of the end of the last item, if it is open."""
        if not self._is_open:
            return
        self._is_open = False
        item = self.items[-1]
        item["status"] = status
        kind = item["type"]
        done: Event = {"type": f"{_DELTAS[kind]}.done", **self._place(kind)}
        if kind == "function_call":
            yield done | {"name": item["name"], "arguments": item["arguments"]}
        else:
            (part,) = item["content"]
            yield done | {"text": part["text"]} | ({"logprobs": []} if kind == "message" else {})
            yield {"type": "response.content_part.done", **self._place(kind), "part": dict(part)}
        yield {"type": "response.output_item.done", "output_index": len(self._items) - 1, "item": _copy(item)}

    def _begin(self, kind: str, name: str, call_ids: Iterator[str]) -> Iterator[Event]:
        item: Item = {"id": f"{_PREFIXES[kind]}_{secrets.token_hex(16)}", "type": kind, "status": "in_progress"}
        if kind == "function_call":
            item |= {"call_id": next(call_ids), "name": name, "arguments": ""}
        elif kind == "message":
            item |= {"role": "assistant", "content": []}
        else:
            item |= {"summary": [], "content": []}
        self._items.append(item)
        self._is_open = True
        yield {"type": "response.output_item.added", "output_index": len(self._items) - 1, "item": _copy(item)}
        if kind == "function_call":
            return
        part: Item = {"type": _PARTS[kind], "text": ""}
        if kind == "message":
            part |= {"annotations": [], "logprobs": []}
        item["content"].append(part)
        yield {"type": "response.content_part.added", **self._place(kind), "part": dict(part)}

    def _delta(self, text: str) -> Event:
        kind = self._items[-1]["type"]
        self._pieces.append(text)
        delta: Event = {"type": f"{_DELTAS[kind]}.delta", **self._place(kind), "delta": text}
        return delta | {"logprobs": []} if kind == "message" else delta

    def _place(self, kind: str) -> dict[str, Any]:
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return place if kind == "function_call" else place | {"content_index": 0}


def _copy(item: Item) -> Item:
    return item | {"content": [dict(part) for part in item["content"]]} if "content" in item else dict(item)
