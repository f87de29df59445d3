"""Messages between a worker and the process that compiles its grammars: text, with its length before it."""

from __future__ import annotations

import struct

LENGTH = struct.Struct("<I")


def frame(text: str) -> bytes:
    data = text.encode()
    return LENGTH.pack(len(data)) + data
