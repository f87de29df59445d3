"""Chooses a target for a prompt by the work that the choice makes for all sequences there.

A sequence has rows to compute: the tokens of its prompt that the target has not computed for an earlier one, and its
answer. Every sequence at the target waits for each of them, the new one also for the prompts before it (LMetric, arXiv
2603.15202, multiplies the first by the second). Targets of a pool are alike, so rows stand for seconds.

Of targets with about the least work the one is chosen for which the hash of the conversation and its address is
highest (`cluster.placement.rendezvous`), so that routers that have not seen a prompt's beginning agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from cluster.placement.rendezvous import rendezvous_rank, within_bound
from services.router.targets.prefixes import CachedPrefixes, chunk_hashes

_OPENING_TOKENS = 256  # of a prompt without messages: what prompts that continue each other share, most of the time
# Targets whose work is at most this many times the least are alike. With two routers, later turns find 0.77 of what
# they could with 1.03, 0.84 with 1.25, 0.89 with 1.5 (`python -m bench.affinity`).
_ALIKE = 1.5
_ANSWER_TOKENS = 100  # rows of an answer, whose length is not known beforehand: the order of magnitude is enough


class TargetView(Protocol):
    """A target, as far as the choice depends on it."""

    @property
    def address(self) -> str: ...

    @property
    def load(self) -> int:
        """Number of sequences there."""

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens to compute before a new prompt's."""

    @property
    def prefixes(self) -> CachedPrefixes: ...


T = TypeVar("T", bound=TargetView)


@dataclass(frozen=True, slots=True)
class RoutingKey:
    """A prompt, as far as the choice depends on it: its length, its beginnings and its conversation."""

    num_tokens: int
    hashes: Sequence[int]  # of its chunks
    conversation: bytes  # hash of what all turns of the conversation have in common

    @classmethod
    def of(cls, token_ids: Sequence[int], *, opening: str | None, name: str | None, root: str) -> RoutingKey:
        """Returns the key of the prompt `token_ids`.

        `name` is what the client calls the conversation. Without it the conversation is identified by `opening`, the
        text up to the end of the first user message, and without that by the prompt's first tokens. Prompts with
        different `root` share no KV.
        """
        if opening is None and name is None:
            opening = ",".join(map(str, token_ids[:_OPENING_TOKENS]))
        digest = hashlib.blake2b(digest_size=16)
        for part in (root, "name", name) if name is not None else (root, "opening", opening or ""):
            encoded = part.encode("utf-8", "surrogatepass")
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
        return cls(len(token_ids), chunk_hashes(token_ids, root), digest.digest())

    def num_predicted(self, target: TargetView) -> int:
        """Returns the number of prompt tokens that are probably in the prefix cache of `target`."""
        return min(target.prefixes.num_tokens(self.hashes), self.num_tokens - 1)

    def num_uncached(self, target: TargetView) -> int:
        """Returns the number of its tokens that `target` probably has to compute."""
        return self.num_tokens - self.num_predicted(target)


def least_work(key: RoutingKey, targets: Sequence[T]) -> T | None:
    """Returns the one of `targets` that gets the prompt of `key`; None if there are none."""
    targets = within_bound(targets, lambda target: target.load)
    if len(targets) < 2:
        return targets[0] if targets else None
    work = [one.queued_tokens + (key.num_uncached(one) + _ANSWER_TOKENS) * (1 + one.load) for one in targets]
    least = min(work)
    most = _ALIKE * least if key.hashes else least  # a prompt without a whole chunk shares nothing
    alike = [target for target, number in zip(targets, work, strict=True) if number == least or number < most]
    return max(alike, key=lambda target: rendezvous_rank(key.conversation, target.address))


def least_load(key: RoutingKey, targets: Sequence[T]) -> T | None:
    """Returns the one of `targets` with the fewest sequences; None if there are none."""
    least = min((target.load for target in targets), default=0)
    alike = (target for target in targets if target.load == least)
    return max(alike, key=lambda target: rendezvous_rank(key.conversation, target.address), default=None)


Routing = Literal["affinity", "least-loaded"]
CHOICES = {"affinity": least_work, "least-loaded": least_load}
