"""Converts the target's token IDs, which links carry, to the drafter's token IDs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from cluster.drafters.base import Drafter, DraftSequence
from cluster.telemetry.metrics import Reading
from cluster.wire.messages import Advance, Open


class Spelling:
    """Spells sequences in the drafter's tokens, and counts the target's tokens that the draft has.

    Without a `vocabulary` the drafter has the target's tokens, and nothing is converted.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._num_committed = self._num_lacking = 0

    def readings(self) -> Iterator[Reading]:
        """Yields the vocabulary coverage. Thread-safe."""
        number, num_lacking = self._num_committed, self._num_lacking
        coverage = 1.0 - num_lacking / number if number else 1.0
        what = "Share of the targets' committed tokens that are one token in the draft's vocabulary, without prompts."
        yield Reading("outrider_draft_vocabulary_coverage", what, coverage)

    def knows(self, token_ids: Sequence[int]) -> bool:
        """Returns True if the drafter can read `token_ids`; False for IDs above its vocabulary if it has no map."""
        return self._drafter.vocabulary is not None or max(token_ids, default=0) < self._drafter.vocab_size

    def open(self, opening: Open) -> DraftSequence | None:
        """Returns the sequence of `opening` in the drafter's tokens; None if the drafter has no tokens for it."""
        vocabulary, params, num_prompt_tokens = self._drafter.vocabulary, opening.params, opening.num_prompt_tokens
        prompt, rest = opening.token_ids[:num_prompt_tokens], opening.token_ids[num_prompt_tokens:]
        if vocabulary is not None:
            if not self._drafter.translates:
                prompt, rest = vocabulary.spell(prompt), vocabulary.spell(rest)
            if params.logit_bias:
                known = tuple(bias for bias in params.logit_bias if self._may_propose(bias[0]))
                params = replace(params, logit_bias=known)
        token_ids = [*prompt, *rest]
        biased = (token_id for token_id, _ in params.logit_bias)
        if not token_ids or not self.knows([*token_ids, *biased]):
            return None
        return DraftSequence(
            token_ids=token_ids,
            num_prompt_tokens=len(prompt),
            params=params,
            noise_key=opening.noise_key,
            num_owed=opening.num_owed,
            window=opening.window,
            cache_root=opening.cache_root,
            num_added=len(token_ids) - len(opening.token_ids),
            wire_id=opening.wire_id,
        )

    def _may_propose(self, token_id: int) -> bool:
        """Returns True if the drafter, which has a vocabulary, may propose the target's `token_id`."""
        assert self._drafter.vocabulary is not None
        is_below = token_id < self._drafter.vocab_size
        return is_below and (self._drafter.translates or self._drafter.vocabulary.has(token_id))

    def advance(self, sequence: DraftSequence, advance: Advance) -> tuple[Advance, int]:
        """Returns `advance` in the drafter's tokens, and how many tokens the conversion added.

        The sequence must not be behind.
        """
        vocabulary = self._drafter.vocabulary
        if vocabulary is None:
            return advance, 0
        news = advance.token_ids[sequence.base - advance.base :]
        self._num_committed += len(news)
        if vocabulary.has_all(news):
            return advance, 0
        self._num_lacking += sum(not vocabulary.has(token_id) for token_id in news)
        if self._drafter.translates:
            return advance, 0
        spelled = vocabulary.spell(news)
        return replace(advance, base=sequence.base, token_ids=spelled), len(spelled) - len(news)
