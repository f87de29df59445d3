"""Parses messages of other programs, which may be no messages.

gRPC's own deserializers log a traceback for each of these.
"""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

M = TypeVar("M", bound=Message)


def parse(kind: type[M], data: bytes) -> M:
    """Returns the message in `data`. Raises ValueError if there is none."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise ValueError(f"no {kind.DESCRIPTOR.name}: {error}") from error
