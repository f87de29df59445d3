"""A drafter with a small model whose tokenizer is not the target's.

The model reads the text in its own tokens, as its tokenizer cuts it. It drafts text in its own tokens, too, and the
drafter proposes the target's tokens of that text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from cluster.drafters.base import DraftSequence
from cluster.drafters.model import LevelStep, ModelDrafter
from cluster.drafters.read_tokens import ContextTokens
from cluster.drafters.translation import MAX_PIECES, DraftText, Translation
from cluster.engine.batch import Segment
from cluster.engine.limits import StepLimits
from cluster.engine.runner import ModelRunner
from cluster.speculation.sampling import SampleRequest
from cluster.vocabulary_map import VocabularyMap

_NUM_MERGED = 16  # likeliest draft tokens that are tried as continuations of an undecided target token


@dataclass(slots=True)
class _Own:
    """A sequence in the draft's tokens: the committed text, then the drafted text."""

    text: DraftText  # committed
    num_read: int  # number of the target's committed tokens in `text`
    token_ids: list[int] = field(default_factory=list)
    drafted: bytes = b""  # text of `token_ids` after the committed text
    num_proposed_bytes: int = 0  # leading bytes of `drafted` that are proposed

    @property
    def undecided(self) -> bytes:
        """The drafted text that is not proposed yet, because its last token may merge with the text after it."""
        return self.drafted[self.num_proposed_bytes :]


class TranslatingDrafter(ModelDrafter):
    """Drafts chains with a model of the PyTorch engine. A step drafts one token of the model for each sequence.

    A draft token is chosen in rounds. Round i sums the probabilities of the draft tokens by their i-th target token.
    The noise of these target tokens chooses among the sums. The rounds end when draft tokens without a further target
    token have half of the probability that is left. Then the likeliest of them is taken.

    The last target token of the drafted text is undecided: it is only proposed after the next step, because it may
    merge with the text of the next draft token.
    """

    translates = True

    def __init__(
        self,
        runner: ModelRunner,
        limits: StepLimits,
        vocabulary: VocabularyMap,
        *,
        context_tokens: ContextTokens = None,
    ) -> None:
        super().__init__(runner, limits, context_tokens=context_tokens)
        self.vocabulary = vocabulary
        self._translation = translation = Translation(vocabulary)
        self.vocab_size = translation.num_target_ids
        self._owns: dict[DraftSequence, _Own] = {}

    def admit(self, sequence: DraftSequence) -> bool:
        if len(self._caches) >= self._limits.max_num_seqs:
            return False
        own = _Own(DraftText(self._translation), sequence.num_committed)
        own.text.append(sequence.token_ids)
        own.token_ids = [*own.text.token_ids]
        if not own.token_ids or not self._allocate(sequence, own.token_ids, own.text.num_certain):
            return False
        self._owns[sequence] = own
        return True

    def rewind(self, sequence: DraftSequence, kept: Sequence[int]) -> None:
        own, translation = self._owns[sequence], self._translation
        news = sequence.token_ids[own.num_read : sequence.num_committed]
        own.num_read = sequence.num_committed
        start = own.text.num_certain  # drafted and committed tokens are equal before it
        own.text.append(news)
        new_text = translation.token_bytes(news)
        certain = slice(start, own.text.num_certain)
        cache = self._caches[sequence]
        has_no_room = len(cache.tokens) >= self.max_model_len or sequence.room(self.max_model_len) <= 0
        is_full = self.context_tokens is not None and has_no_room
        is_as_drafted = own.drafted.startswith(new_text) and own.token_ids[certain] == own.text.token_ids[certain]
        if is_as_drafted and not is_full:
            own.drafted = own.drafted[len(new_text) :]
            own.num_proposed_bytes = len(translation.token_bytes(sequence.draft_token_ids))
            return
        if sequence.parents:
            sequence.drop_drafts()
        own.drafted, own.num_proposed_bytes = b"", 0
        num_equal = start + _num_equal(own.token_ids[start:], own.text.token_ids[start:])
        own.token_ids[num_equal:] = own.text.token_ids[num_equal:]
        if is_full:
            self._begin_again(sequence, own.token_ids, own.text.num_certain)
            return
        # The last token is always computed again: its logits are needed.
        num_equal -= cache.tokens.num_skipped
        cache.num_computed_tokens = min(cache.num_computed_tokens, num_equal, len(cache.tokens) - 1)

    def release(self, sequence: DraftSequence) -> None:
        super().release(sequence)
        del self._owns[sequence]

    def _grow(self, sequence: DraftSequence) -> bool:
        own, cache, blocks = self._owns[sequence], self._caches[sequence], self._runner.blocks
        if len(cache.tokens) >= self.max_model_len:
            sequence.is_exhausted = True
            return True
        if not blocks.grow(cache.block_table, len(cache.tokens)):
            return False
        num_certain = min(cache.num_computed_tokens, own.text.num_certain - cache.tokens.num_skipped)
        blocks.cache(cache.block_table, cache.tokens, num_certain, cache.root)
        return True

    def _num_uncomputed(self, sequence: DraftSequence) -> int:
        cache = self._caches[sequence]
        return len(cache.tokens) - cache.num_computed_tokens

    def _add(self, step: LevelStep, sequence: DraftSequence, most: int) -> None:
        cache = self._caches[sequence]
        end = len(cache.tokens)
        start = min(cache.num_computed_tokens, end - 1)
        if most <= 0 or sequence.is_exhausted:
            return
        is_complete = end <= start + most
        cache.num_computed_tokens = end = min(end, start + most)
        step.add(Segment(cache.tokens[start:end], start, cache.block_table, num_logits=int(is_complete)))
        if is_complete:
            step.extended.append((sequence, sequence.tip, 1))

    def _extend(self, extended: Sequence[tuple[DraftSequence, int, int]], logits: torch.Tensor) -> None:
        """Appends a token of the model to every sequence, and proposes the target tokens that become final."""
        if not extended:
            return
        weights = logits.double().softmax(dim=-1).cpu().numpy()
        choices = [
            _Choice(sequence, self._owns[sequence], self._translation, row)
            for (sequence, *_), row in zip(extended, weights, strict=True)
        ]
        while open_choices := [choice for choice in choices if choice.is_open]:
            rows = torch.from_numpy(np.stack([choice.scores() for choice in open_choices]))
            requests = [
                SampleRequest(
                    choice.sequence.params,
                    choice.sequence.noise_key,
                    choice.sequence.token_ids,
                    choice.sequence.num_prompt_tokens,
                    draft_token_ids=choice.chosen,
                    counts=self._count(choice.sequence),
                )
                for choice in open_choices
            ]
            device = self._runner.model.device
            for choice, token_id in zip(open_choices, self._sampler.sample(rows.to(device), requests), strict=True):
                choice.choose(token_id)


class _Choice:
    """Choice of a sequence's next draft token, level by level: each level chooses a token of the target."""

    def __init__(
        self, sequence: DraftSequence, own: _Own, translation: Translation, weights: npt.NDArray[np.float64]
    ) -> None:
        """`weights`: the model's probabilities, [number of draft IDs]; changed in place."""
        self.sequence = sequence
        self.chosen: list[int] = []  # target tokens of the levels before
        self._own, self._translation = own, translation
        # The draft tokens that are left, their weights and their target tokens, [number, MAX_PIECES].
        self._left: npt.NDArray[np.int64] = translation.draft_ids
        self._weights, self._pieces = weights, translation.pieces
        weights[self._pieces[:, 0] < 0] = 0.0
        self._merged: dict[int, tuple[int, ...]] = {}  # draft tokens whose text merges with `_undecided`
        self._undecided: int | None = None
        if undecided := translation.target_ids(own.undecided):
            for token_id in undecided[:-1]:
                self._propose(token_id)
            self._merge_with(undecided[-1])
        self.is_open = True
        self._check()

    def _merge_with(self, token_id: int) -> None:
        """Finds likely draft tokens that merge with `token_id`, and proposes it if there are none."""
        likely = np.argpartition(self._weights, -_NUM_MERGED)[-_NUM_MERGED:].tolist()
        joined = {i: self._translation.joined(token_id, i) for i in likely if self._weights[i] > 0.0}
        self._merged = {draft_id: pieces for draft_id, pieces in joined.items() if pieces[0] != token_id}
        if self._merged:
            self._undecided = token_id
        else:
            self._propose(token_id)

    def scores(self) -> npt.NDArray[np.float32]:
        """Returns the logarithms of the weights of the target's tokens at this level, [number of target IDs]."""
        number = self._translation.num_target_ids
        sums: npt.NDArray[np.float64] = np.zeros(number)
        if self._undecided is None:
            column = np.maximum(self._pieces[:, len(self.chosen)], 0)  # draft tokens without this piece have no weight
            sums += np.bincount(column, weights=self._weights, minlength=number)
        else:
            for draft_id, pieces in self._merged.items():
                sums[pieces[0]] += self._weights[draft_id]
            sums[self._undecided] = max(0.0, self._weights.sum() - sums.sum())
        with np.errstate(divide="ignore"):
            return np.log(sums).astype(np.float32)

    def choose(self, token_id: int) -> None:
        """Applies the target token that was sampled in this round."""
        undecided, self._undecided = self._undecided, None
        if token_id == undecided:
            self._propose(token_id)
            self._weights[[*self._merged]] = 0.0
            self._check()
            return
        if undecided is not None:
            self._left = np.array([*self._merged], dtype=np.int64)
            self._weights = self._weights[self._left]
            self._pieces = np.array([(*p, *[-1] * (MAX_PIECES - len(p))) for p in self._merged.values()])
        self._keep((self._pieces[:, len(self.chosen)] == token_id) & (self._weights > 0.0))
        self.chosen.append(token_id)
        ends = self._pieces[:, len(self.chosen)] < 0 if len(self.chosen) < MAX_PIECES else self._weights > 0.0
        if 2.0 * self._weights[ends].sum() >= self._weights.sum():
            self._keep(ends)
            self._take(int(self._left[self._weights.argmax()]))
        else:
            self._keep(~ends)

    def _check(self) -> None:
        """Ends the choice and the drafting if no candidate is left."""
        if not self._weights.any():
            self.is_open, self.sequence.is_exhausted = False, True

    def _keep(self, kept: npt.NDArray[np.bool_]) -> None:
        self._left, self._weights, self._pieces = self._left[kept], self._weights[kept], self._pieces[kept]

    def _take(self, draft_id: int) -> None:
        self._own.token_ids.append(draft_id)
        self._own.drafted += self._translation.spellings[draft_id]
        if not self._translation.is_special(self.chosen[-1]):
            del self.chosen[-1]  # it may merge with the text that follows
        for token_id in self.chosen:
            self._propose(token_id)
        self.is_open = False

    def _propose(self, token_id: int) -> None:
        self.sequence.append(token_id)
        self._own.num_proposed_bytes += len(self._translation.token_bytes([token_id]))


def _num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns the length of the longest common prefix."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
