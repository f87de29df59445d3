"""Who proposes: the interface of every drafter, and the state of a sequence that is drafted for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.telemetry.metrics import Reading


@dataclass(eq=False, slots=True)
class DraftSequence:
    """One sequence as a draft worker sees it: committed tokens, then the drafts past them."""

    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    noise_key: NoiseKey
    num_speculative_tokens: int  # k: drafts owed in each round
    window: int  # how far past the committed tokens drafts may run
    num_committed: int = 0
    is_exhausted: bool = False  # the drafter has nothing more to propose after these tokens

    def __post_init__(self) -> None:
        self.num_committed = self.num_committed or len(self.token_ids)

    @property
    def num_drafted(self) -> int:
        return len(self.token_ids) - self.num_committed

    @property
    def draft_token_ids(self) -> list[int]:
        return self.token_ids[self.num_committed :]

    def commit(self, base: int, token_ids: Sequence[int]) -> int | None:
        """Takes in every token committed since `base`, keeping the part of the drafts that came true.

        Returns how many leading tokens are as they were before: what followed them is gone or replaced. None when
        the news is older than what is known, which changes nothing. `base` must not be behind (`is_behind`).
        """
        assert not self.is_behind(base)
        num_committed = base + len(token_ids)
        if num_committed < self.num_committed:
            return None
        num_kept = base
        for known, committed in zip(self.token_ids[base:num_committed], token_ids, strict=False):
            if known != committed:
                break
            num_kept += 1
        self.num_committed = num_committed
        self.is_exhausted = False
        if num_kept == num_committed:
            return len(self.token_ids)
        # A draft was wrong, or the target ran past the drafts: whatever came after is worthless.
        self.token_ids[num_kept:] = token_ids[num_kept - base :]
        return num_kept

    def is_behind(self, base: int) -> bool:
        """Whether tokens before `base` were committed that this worker was never told."""
        return base > self.num_committed


class Drafter(ABC):
    """Proposes tokens. Called from one thread; a sequence is handed in by reference and extended in place."""

    max_model_len: int
    vocab_size: int  # a sequence with other token IDs cannot be drafted for
    dtype: str
    num_blocks: int  # of the KV cache

    @property
    @abstractmethod
    def num_used_blocks(self) -> int:
        """Blocks of the KV cache in use."""

    @abstractmethod
    def admit(self, sequence: DraftSequence) -> bool:
        """Makes room for `sequence`; False, changing nothing, when there is none or it cannot be drafted for."""

    @abstractmethod
    def draft(self, sequences: Sequence[DraftSequence]) -> list[DraftSequence]:
        """One step: appends draft tokens to `sequences`, or works towards it (a prefill chunk).

        Takes those first in line when not all of them fit in a step. One that it has nothing to propose for, it
        marks as exhausted. Returns those that cannot go on because there is no room for their next token; the
        caller releases them.
        """

    @abstractmethod
    def rewind(self, sequence: DraftSequence, num_tokens: int) -> None:
        """Tokens from index `num_tokens` on are no longer those that were drafted or computed on."""

    @abstractmethod
    def release(self, sequence: DraftSequence) -> None:
        """Forgets `sequence` and frees what it held."""

    def readings(self) -> Iterable[Reading]:
        """The metrics of its KV cache; any thread."""
        yield Reading("outrider_kv_blocks", "KV blocks in all.", self.num_blocks)
        yield Reading("outrider_kv_blocks_used", "KV blocks in use.", self.num_used_blocks)
