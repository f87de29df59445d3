"""Breaks protobuf messages at random: values at the edge of their types, and flipped bits."""

from __future__ import annotations

import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), -1, 0, 1, 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), -1, 0, 1, 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 1, 2, 70, 511, 4096, 100_000, 2**31, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 1, 7, 2**63, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (0, 1),
}
_FLOATS = (float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 5e-324, 1e-40, 0.5, 1.0, 1e39, 1e308)
STRINGS = (
    "",
    "x",
    "\0",
    "\r\n\x1b[2J",
    "ü" * 1000,
    "../" * 50,
    "{" * 5000,
    "(a+)+" * 20,
    "root ::= root root",
    "[" * 99,
)
_COLUMN_LENGTHS = (1, 1, 3, 300, 20_000)


class Spoiler:
    def __init__(self, source: random.Random) -> None:
        self._random = source

    def mutated(self, data: bytes) -> bytes:
        mutated = bytearray(data or b"\0")
        for _ in range(self._random.choice((1, 3, 30))):
            mutated[self._random.randrange(len(mutated))] ^= 1 << self._random.randrange(8)
        return bytes(mutated[: self._random.randrange(len(mutated)) + 1] if self._random.random() < 0.4 else mutated)

    def spoil(self, message: Message) -> None:
        """Gives a field of `message`, or of one within it, a value at the edge of its type."""
        fields = message.DESCRIPTOR.fields
        if not fields:
            return
        field = self._random.choice(fields)
        value = getattr(message, field.name)
        if field.message_type is not None:
            if field.message_type.GetOptions().map_entry:
                value[self._random.choice(STRINGS)] = self._random.choice(STRINGS)
            elif not field.is_repeated:
                value.SetInParent()
                self.spoil(value)
            elif len(value) and self._random.random() < 0.8:
                self.spoil(self._random.choice(value))
            else:
                self.spoil(value.add())
        elif not field.is_repeated:
            setattr(message, field.name, self._extreme(field))
        elif len(value) and self._random.random() < 0.5:
            value[self._random.randrange(len(value))] = self._extreme(field)
        elif self._random.random() < 0.3:
            del value[:]
        else:
            value.extend([self._extreme(field)] * self._random.choice(_COLUMN_LENGTHS))

    def _extreme(self, field: FieldDescriptor) -> Any:
        if field.cpp_type in _INTEGERS:
            return self._random.choice(_INTEGERS[field.cpp_type])
        if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
            return self._random.choice(_FLOATS)
        if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
            return self._random.random() < 0.5
        text = self._random.choice(STRINGS)
        return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
