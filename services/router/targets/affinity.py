"""Sends the turns of a conversation to one target, which has their keys and values, without keeping any state.

Of the targets with about the least load the one is chosen for which the hash of the conversation and its address is
highest: rendezvous hashing (Thaler and Ravishankar 1998). All routers agree, and a target that joins or leaves changes
the target of only its share of the conversations.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from services.router.targets.replica import Replica

_OPENING_TOKENS = 256  # of a prompt without messages: what prompts that continue each other share, most of the time
_MORE_SEQUENCES = 1  # than the least loaded target may have the one with the earlier turns: cheaper than their prompt


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

        `name` is what the client calls the conversation. Without it the key is made of `opening`, the text up to the
        end of the first user message, and without that of the prompt's first tokens.
        """
        if opening is None:  # no messages show whether there were earlier turns
            has_earlier_turns = len(token_ids) > _OPENING_TOKENS
            if name is None:
                opening = ",".join(map(str, token_ids[:_OPENING_TOKENS]))
        digest = hashlib.blake2b(digest_size=16)
        for part in (salt, "name", name) if name is not None else (salt, "opening", opening or ""):
            encoded = part.encode("utf-8", "surrogatepass")
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
        return cls(digest.digest(), has_earlier_turns)

    def preferred(self, replicas: Sequence[Replica]) -> Replica | None:
        """Returns the one of `replicas` that gets the conversation; None if there are none."""
        least = min((replica.load for replica in replicas), default=0)
        most = least + (_MORE_SEQUENCES if self.has_earlier_turns else 0)
        return max((replica for replica in replicas if replica.load <= most), key=self._rank, default=None)

    def _rank(self, replica: Replica) -> bytes:
        return hashlib.blake2b(replica.address.encode(), key=self.digest, digest_size=8).digest()
