"""Sends all turns of a conversation to one target, which has cached the earlier ones.

The router keeps no state for this. Among the targets with about the least load it chooses the one with the highest hash
of conversation and address: rendezvous hashing (Thaler and Ravishankar 1998). So all routers choose the same target,
and if a target joins or leaves, only its share of the conversations moves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from services.router.targets.replica import Replica

# First tokens that identify a prompt without messages; a prompt that continues another usually shares them.
_OPENING_TOKENS = 256
# How many more sequences than the least loaded target the one with the earlier turns may have. Waiting for one sequence
# is cheaper than computing the earlier turns again.
_MORE_SEQUENCES = 1


@dataclass(frozen=True, slots=True)
class ConversationKey:
    """Identifies a conversation by what all of its turns have in common."""

    digest: bytes
    has_earlier_turns: bool

    @classmethod
    def of(
        cls, token_ids: Sequence[int], *, opening: str | None, name: str | None, salt: str, has_earlier_turns: bool
    ) -> ConversationKey:
        """Returns the key of a prompt of `token_ids`.

        `name`: the client's name of the conversation. If it is None, the key is made from `opening`, the text up to the
        end of the first user message. If that is None too, it is made from the prompt's first tokens.
        """
        if opening is None:  # without messages, the length decides if there were earlier turns
            has_earlier_turns = len(token_ids) > _OPENING_TOKENS
            if name is None:
                opening = ",".join(map(str, token_ids[:_OPENING_TOKENS]))
        digest = hashlib.blake2b(digest_size=16)
        for part in (salt, "name", name) if name is not None else (salt, "opening", opening or ""):
            encoded = part.encode("utf-8", "surrogatepass")
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
        return cls(digest.digest(), has_earlier_turns)

    def preferred(self, replicas: Sequence[Replica]) -> Replica | None:
        """Returns the replica that gets the conversation; None if `replicas` is empty."""
        least = min((replica.load for replica in replicas), default=0)
        most = least + (_MORE_SEQUENCES if self.has_earlier_turns else 0)
        return max((replica for replica in replicas if replica.load <= most), key=self._rank, default=None)

    def _rank(self, replica: Replica) -> bytes:
        return hashlib.blake2b(replica.address.encode(), key=self.digest, digest_size=8).digest()
