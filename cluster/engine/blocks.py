"""Manager of the KV cache's blocks: their owners, and a prefix cache over their contents.

A block is in one of three states:

    used    It is in the table of a sequence, or of several that begin with the same tokens.
    cached  It is in no table, but its contents can be used again.
    free    It is in no table, and its contents are of no use.

A full block of committed tokens is identified by a hash of its tokens and of all tokens before them: SHA-256 over the
hash of the previous block and the block's token IDs. For the first block, the previous hash is a root, which separates
requests that must not share KV. Speculative tokens are never hashed. A shared block is never written, because a
sequence only writes slots whose KV is not computed yet.

If no block is free, the manager takes the cached block that was given back first. It takes tables back from their end,
so that the beginnings of sequences, which are likelier to be shared, stay longest.

Block tables are arrays of int64, which a step copies without converting each number.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, MutableSequence, Sequence

from cluster.telemetry.metrics import Reading


class BlockManager:
    """Allocates fixed-size blocks of the KV cache, for target and draft engines.

    Share of the tokens that did not have to be computed:
        rate(vllm:prefix_cache_hits_total[1m]) / rate(vllm:prefix_cache_queries_total[1m])
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_queried_tokens = 0  # tokens of the sequences that got blocks from `allocate_for`
        self.num_hit_tokens = 0  # tokens of these sequences whose KV was cached
        self.caches_prefixes = enable_prefix_caching
        # Taken from the end, so that low block numbers are used first and a single sequence gets adjacent blocks.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # the first one returned comes first
        self._num_owners = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        # If two sequences computed the same tokens concurrently, this contains only one of their blocks.
        self._block_of: dict[bytes, int] = {}

    @property
    def num_cached_blocks(self) -> int:
        return len(self._cached)

    @property
    def num_available_blocks(self) -> int:
        """Number of blocks that can be allocated: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - self.num_available_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_available_for(self, prefix: Sequence[int], without: Iterable[Sequence[int]] = ()) -> int:
        """Returns the number of blocks that a new table which begins with the blocks `prefix` can have.

        `without`: block tables that would be given back before.
        """
        num_less = Counter(itertools.chain.from_iterable(without))
        num_given_back = sum(self._num_owners[block] == number for block, number in num_less.items())
        num_shared = sum(self._num_owners[block] > num_less[block] for block in prefix)
        return self.num_available_blocks + num_given_back + num_shared

    def allocate(self, num_blocks: int) -> array[int] | None:
        """Returns a block table of `num_blocks` blocks. Returns None and changes nothing if fewer are available."""
        if num_blocks > self.num_available_blocks:
            return None
        return array("q", (self._take() for _ in range(num_blocks)))

    def allocate_for(
        self,
        token_ids: Sequence[int],
        num_tokens: int,
        *,
        reserve: int = 0,
        root: bytes | None = None,
        uses_cache: bool = True,
    ) -> tuple[array[int], int] | None:
        """Returns a block table for `num_tokens` tokens that begin with `token_ids`, and the number of computed tokens.

        If `uses_cache`, the table begins with the blocks of the longest prefix that is cached under `root`. The prefix
        never includes the last of `token_ids`, because its logits are needed. Returns None and changes nothing if fewer
        than `reserve` blocks would stay available.
        """
        if self.num_available_blocks <= reserve:  # the last token takes a block, so the prefix does not matter
            return None
        block_table = self.cached_prefix(token_ids, root) if uses_cache else array("q")
        num_shared = len(block_table)
        num_blocks = self.num_blocks_for(num_tokens)
        if num_blocks + reserve > self.num_available_for(block_table):
            return None
        for block in block_table:
            self._cached.pop(block, None)
            self._num_owners[block] += 1
        block_table.extend(self._take() for _ in range(num_blocks - num_shared))
        self.num_queried_tokens += len(token_ids)
        self.num_hit_tokens += num_shared * self.block_size
        return block_table, num_shared * self.block_size

    def grow(self, block_table: MutableSequence[int], num_tokens: int) -> bool:
        """Extends `block_table` to hold `num_tokens` tokens.

        Returns False and changes nothing if too few blocks are available.
        """
        num_missing = self.num_blocks_for(num_tokens) - len(block_table)
        if num_missing <= 0:  # the usual case
            return True
        if num_missing > self.num_available_blocks:
            return False
        block_table.extend(self._take() for _ in range(num_missing))
        return True

    def shrink(self, block_table: MutableSequence[int], num_tokens: int) -> None:
        """Takes back all blocks of `block_table` that are not needed for `num_tokens` tokens."""
        num_kept = self.num_blocks_for(num_tokens)
        beyond = block_table[num_kept:]
        del block_table[num_kept:]
        self.free(beyond)

    def free(self, block_table: MutableSequence[int]) -> None:
        """Takes back a block table and empties it."""
        for block in reversed(block_table):
            assert self._num_owners[block] > 0, f"block {block} freed twice"
            self._num_owners[block] -= 1
            if self._num_owners[block] == 0:
                self._put_back(block)
        del block_table[:]

    def cache(
        self,
        block_table: Sequence[int],
        token_ids: Sequence[int],
        num_tokens: int,
        root: bytes | None = None,
    ) -> None:
        """Adds the full blocks of the first `num_tokens` of `token_ids` to the prefix cache, under `root`.

        These tokens must be committed and their KV computed.
        """
        hash_of, size = self._hash_of, self.block_size
        num_full = num_hashed = num_tokens // size
        while num_hashed > 0 and hash_of[block_table[num_hashed - 1]] is None:
            num_hashed -= 1
        if num_hashed == num_full or not self.caches_prefixes:
            return
        parent = hash_of[block_table[num_hashed - 1]] if num_hashed else root
        for index in range(num_hashed, num_full):
            block = block_table[index]
            parent = _hash(parent, token_ids[index * size : (index + 1) * size])
            hash_of[block] = parent
            self._block_of.setdefault(parent, block)

    def cached_prefix(self, token_ids: Sequence[int], root: bytes | None = None) -> array[int]:
        """Returns the blocks of the longest cached prefix that leaves at least one token."""
        block_table = array("q")
        parent = root
        for end in range(self.block_size, len(token_ids), self.block_size):
            parent = _hash(parent, token_ids[end - self.block_size : end])
            block = self._block_of.get(parent)
            if block is None:
                break
            block_table.append(block)
        return block_table

    def num_cached_tokens(self, token_ids: Sequence[int], root: bytes | None = None) -> int:
        """Returns the number of tokens whose KV `allocate_for` would find in the prefix cache."""
        return len(self.cached_prefix(token_ids, root)) * self.block_size

    def readings(self) -> Iterator[Reading]:
        """Returns the metrics of the KV cache."""
        yield Reading("outrider_kv_blocks", "Total KV blocks.", self.num_blocks)
        yield Reading("outrider_kv_blocks_used", "KV blocks in use.", self.num_used_blocks)
        yield Reading("outrider_kv_blocks_cached", "Unused KV blocks that hold a prefix.", self.num_cached_blocks)
        for name, documentation, value in (
            ("queries", "Tokens of admitted sequences.", self.num_queried_tokens),
            ("hits", "Tokens of admitted sequences whose KV was in the prefix cache.", self.num_hit_tokens),
        ):
            yield Reading(f"vllm:prefix_cache_{name}", documentation, value, is_counter=True)

    def _take(self) -> int:
        """Returns a block for a new owner; its contents are no longer cached."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            digest = self._hash_of[block]
            assert digest is not None
            del self._block_of[digest]
            self._hash_of[block] = None
        self._num_owners[block] = 1
        return block

    def _put_back(self, block: int) -> None:
        digest = self._hash_of[block]
        if digest is not None and self._block_of.setdefault(digest, block) == block:
            self._cached[block] = None
        else:
            self._hash_of[block] = None
            self._free.append(block)


def _hash(parent: bytes | None, token_ids: Sequence[int]) -> bytes:
    """Returns the hash of a full block whose previous block has the hash `parent`."""
    return hashlib.sha256((parent or b"") + array("q", token_ids).tobytes()).digest()
