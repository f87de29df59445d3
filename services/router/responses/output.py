"""The items of an answer, and the events that report them while it is generated."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from services.router.output.source import Said
from services.router.responses.custom_input import CustomInput
from services.router.responses.tools import CallOrigin

Event = dict[str, Any]
Item = dict[str, Any]

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
_DELTAS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}
_CALL_TEXTS = {"function_call": "arguments", "custom_tool_call": "input"}  # the field with a call's text


class OutputItems:
    """The items of one answer while it is generated."""

    def __init__(self, origins: Mapping[str, CallOrigin]) -> None:
        """`origins`: how calls are reported, by the tools' names for the model."""
        self._origins = origins
        self._items: list[Item] = []
        self._is_open = False  # whether the last item may still grow
        self._pieces: list[str] = []  # pieces that are not in the last item's text yet
        self._input = CustomInput()  # input of a custom tool's last call

    @property
    def items(self) -> list[Item]:
        """The items so far, with their text so far."""
        if self._pieces:
            item, text = self._items[-1], "".join(self._pieces)
            if item["type"] in _CALL_TEXTS:
                item[_CALL_TEXTS[item["type"]]] += text
            else:
                item["content"][0]["text"] += text
            self._pieces = []
        return self._items

    def say(self, said: Sequence[Said], call_ids: Iterator[str]) -> Iterator[Event]:
        """Yields the events of `said`; each call takes one of `call_ids`."""
        for one in said:
            kind = self._item_type(one)
            if not self._is_open or self._items[-1]["type"] != kind or one.kind == "call":
                yield from self.close()
                yield from self._begin(kind, one.text if one.kind == "call" else "", call_ids)
            if one.kind == "call":
                continue
            text = self._input.push(one.text) if kind == "custom_tool_call" else one.text
            if text:
                yield self._delta(text)

    def close(self, status: str = "completed") -> Iterator[Event]:
        """Yields the events of the end of the last item, if it is open."""
        if not self._is_open:
            return
        kind = self._items[-1]["type"]
        if kind == "custom_tool_call" and (text := self._input.end()):
            yield self._delta(text)
        self._is_open = False
        item = self.items[-1]
        item["status"] = status
        done: Event = {"type": f"{_DELTAS[kind]}.done", **self._place(kind)}
        if kind == "function_call":
            yield done | {"name": item["name"], "arguments": item["arguments"]}
        elif kind == "custom_tool_call":
            yield done | {"input": item["input"]}
        else:
            (part,) = item["content"]
            yield done | {"text": part["text"]} | ({"logprobs": []} if kind == "message" else {})
            yield {"type": "response.content_part.done", **self._place(kind), "part": dict(part)}
        yield {"type": "response.output_item.done", "output_index": len(self._items) - 1, "item": _copy(item)}

    def _item_type(self, said: Said) -> str:
        match said.kind:
            case "call":
                return self._origin(said.text).item_type
            case "arguments":  # arguments follow their call
                kind: str = self._items[-1]["type"]
                return kind
            case "content":
                return "message"
        return "reasoning"

    def _origin(self, name: str) -> CallOrigin:
        return self._origins.get(name) or CallOrigin("function_call", name)

    def _begin(self, kind: str, name: str, call_ids: Iterator[str]) -> Iterator[Event]:
        item: Item = {"id": f"{_PREFIXES[kind]}_{secrets.token_hex(16)}", "type": kind, "status": "in_progress"}
        if kind in _CALL_TEXTS:
            item |= {"call_id": next(call_ids), **self._origin(name).fields, _CALL_TEXTS[kind]: ""}
            self._input = CustomInput()
        elif kind == "message":
            item |= {"role": "assistant", "content": []}
        else:
            item |= {"summary": [], "content": []}
        self._items.append(item)
        self._is_open = True
        yield {"type": "response.output_item.added", "output_index": len(self._items) - 1, "item": _copy(item)}
        if kind in _CALL_TEXTS:
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
        return place if kind in _CALL_TEXTS else place | {"content_index": 0}


def _copy(item: Item) -> Item:
    return item | {"content": [dict(part) for part in item["content"]]} if "content" in item else dict(item)
