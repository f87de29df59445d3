"""Remembers which beginnings of prompts each target probably has in its prefix cache.

A prompt is a chain of chunks, each identified by a hash of its tokens and of all tokens before them. For each target a
router keeps the chunks of its prompts that were computed there, at most the number that the target's KV cache holds.
The least recently used chunk is forgotten first, and within a prompt the last one, as in the target's own cache.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

CHUNK_TOKENS = 64  # a prompt of 8,192 tokens takes 0.3 ms
_MAX_CHUNKS = 2**16  # of one target, 4M tokens: 11 MB
_HASH_BYTES = 8


def chunk_hashes(token_ids: Sequence[int], root: str) -> list[int]:
    """Returns the hashes of the whole chunks of `token_ids`.

    `root`: what KV depends on in addition to the tokens. Prompts with different ones share nothing.
    """
    data = memoryview(array("I", token_ids)).cast("B")
    size = CHUNK_TOKENS * data.nbytes // max(len(token_ids), 1)
    before = hashlib.blake2b(root.encode("utf-8", "surrogatepass"), digest_size=_HASH_BYTES).digest()
    hashes = []
    for end in range(size, data.nbytes + 1, size or 1):
        before = hashlib.blake2b(data[end - size : end], key=before, digest_size=_HASH_BYTES).digest()
        hashes.append(int.from_bytes(before, "little"))
    return hashes


class CachedPrefixes:
    """Chunks of the prompts that one target has computed, the oldest first."""

    def __init__(self, num_chunks: int = 0) -> None:
        self._chunks: OrderedDict[int, None] = OrderedDict()
        self._limit = 0
        self.limit(num_chunks)

    def __len__(self) -> int:
        return len(self._chunks)

    def limit(self, num_chunks: int) -> None:
        """Sets how many chunks the target can hold."""
        self._limit = min(num_chunks, _MAX_CHUNKS)
        self._shrink()

    def num_tokens(self, hashes: Sequence[int]) -> int:
        """Returns the number of tokens at the beginning of a prompt that were computed before."""
        chunks = self._chunks
        for number, chunk in enumerate(hashes):
            if chunk not in chunks:
                return number * CHUNK_TOKENS
        return len(hashes) * CHUNK_TOKENS

    def add(self, hashes: Sequence[int]) -> None:
        """Records that a prompt was computed."""
        chunks = self._chunks
        for chunk in reversed(hashes):
            chunks[chunk] = None
            chunks.move_to_end(chunk)
        self._shrink()

    def clear(self) -> None:
        self._chunks.clear()

    def _shrink(self) -> None:
        while len(self._chunks) > self._limit:
            self._chunks.popitem(last=False)
