"""A drafter whose model drafts all tokens of a proposal in one step, from mask tokens.

PARD (An et al., arXiv 2504.18583, section 3.1): after the last committed token the input has one mask token for each
further draft. The row of the last committed token gives the first draft, the row of the first mask gives the second,
and so on. A mask attends to all committed tokens and to the masks before it. Each draft is the best token under the
noise of its position, as in `cluster.drafters.model`, but it does not depend on the drafts before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cluster.drafters.base import DraftSequence
from cluster.drafters.levels import extend_by_levels
from cluster.drafters.model import LevelStep, ModelDrafter
from cluster.drafters.read_tokens import ContextTokens
from cluster.engine.batch import Segment
from cluster.engine.limits import StepLimits
from cluster.engine.runner import ModelRunner
from cluster.speculation.drafts import path_to
from cluster.speculation.sampling import SampleRequest
from cluster.vocabulary_map import VocabularyMap

_MAX_ROUND_TOKENS = 65  # maximum tokens of a round: speculation.max_speculative_tokens is at most 64


class ParallelDrafter(ModelDrafter):
    """Drafts with a model of the PyTorch engine that was trained for mask tokens.

    The next step overwrites the keys and values of masks. To run ahead, a step extends several drafts, each with its
    own masks. Only these drafts and the drafts on the paths to them become inputs.
    """

    is_one_pass = True

    def __init__(
        self,
        runner: ModelRunner,
        limits: StepLimits,
        mask_token_id: int,
        vocabulary: VocabularyMap | None = None,
        *,
        context_tokens: ContextTokens = None,
    ) -> None:
        super().__init__(runner, limits, vocabulary=vocabulary, context_tokens=context_tokens)
        self._mask_token_id = mask_token_id

    def _has_blocks(self, sequence: DraftSequence, num_drafts: int) -> bool:
        """Returns True if enough blocks are free for `num_drafts` drafts, their siblings and their masks."""
        blocks = self._runner.blocks
        return blocks.num_available_blocks * blocks.block_size >= num_drafts * (1 + sequence.width)

    def _num_round_tokens(self, sequence: DraftSequence) -> int:
        return max(super()._num_round_tokens(sequence), _MAX_ROUND_TOKENS)  # accepted drafts are not computed

    def _num_prompt_rows(self, sequence: DraftSequence) -> int:
        return self._num_uncomputed(sequence) + sequence.num_drafts_after(-1, self.max_model_len) - 1

    def _add(self, step: LevelStep, sequence: DraftSequence, most: int) -> None:
        if most <= 0:
            return
        cache = self._caches[sequence]
        start, end = cache.num_computed_tokens, sequence.num_committed - sequence.num_skipped
        if most < end - start:
            step.add(Segment(cache.tokens[start : start + most], start, cache.block_table, num_logits=0))
            cache.num_computed_tokens += most
            return
        rows = _Rows(sequence, cache.tokens, start)
        for node in sequence.to_extend or [sequence.tip]:
            path = [other for other in path_to(node, sequence.parents)[:-1] if other not in cache.computed_nodes]
            num_masks = min(sequence.num_drafts_after(node, self.max_model_len) - 1, most - rows.number(node, path))
            is_ahead = rows.extended or sequence.depth(node) >= sequence.proposal_depth
            if num_masks < 0 or (is_ahead and not self._has_blocks(sequence, num_masks + 1)):
                break
            num_tokens = len(cache.tokens) + rows.num_masks + num_masks
            if not self._runner.blocks.grow(cache.block_table, num_tokens):
                num_masks = 0  # the tokens have blocks, but the masks do not
            rows.extend(node, path, num_masks)
            step.extended.append((sequence, node, 1 + num_masks))
        if not rows.extended:  # the step has no room for a whole path
            rows.inputs.update(path[: most - (end - start)])
        if rows.extended or rows.inputs:
            step.add(rows.segment(cache.block_table, self._mask_token_id))
            cache.num_computed_tokens = end
            cache.computed_nodes.update(rows.inputs, [node for node, _ in rows.extended if node >= 0])

    def _extend(self, extended: Sequence[tuple[DraftSequence, int, int]], logits: torch.Tensor) -> None:
        if not extended:
            return
        requests = [
            SampleRequest(
                s.params,
                s.noise_key,
                s.tokens_to(node),
                s.num_prompt_tokens,
                num_drafts,
                [self._mask_token_id] * (num_drafts - 1),
                counts=self._count(s),
                position_shift=-s.num_added,
            )
            for s, node, num_drafts in extended
        ]
        width = max(sequence.width for sequence, *_ in extended)
        best = iter(self._sampler.best_choices(logits, requests, width))
        for sequence, node, num_drafts in extended:
            levels = [next(best) for _ in range(num_drafts)]
            extend_by_levels(sequence, node, levels, self.max_model_len)


class _Rows:
    """Rows of one sequence in a step.

    The rows are the committed tokens from `start` on, then the drafts that become inputs, then the nodes to extend,
    each followed by its masks. Places are counted from `start`: first the committed tokens, then the drafts, then the
    masks.
    """

    def __init__(self, sequence: DraftSequence, tokens: Sequence[int], start: int) -> None:
        """`tokens`: those of the sequence that have places in the cache."""
        self.inputs: set[int] = set()  # nodes that become inputs but are not extended
        self.extended: list[tuple[int, int]] = []  # nodes to extend, each with its number of masks
        self.num_masks = 0
        self._sequence = sequence
        self._tokens = tokens
        self._start = start

    def number(self, node: int, path: Sequence[int]) -> int:
        """Returns the number of rows once `path` and `node` are added, excluding the masks of `node`."""
        if node < 0:
            return max(1, self._num_committed)
        num_others = sum(1 for other in path if other not in self.inputs)
        return self._num_committed + len(self.inputs) + len(self.extended) + self.num_masks + num_others + 1

    def extend(self, node: int, path: Sequence[int], num_masks: int) -> None:
        if node < 0 and self._num_committed == 0:
            self._start -= 1  # the last committed token needs a row, even if it was computed before
        self.inputs.update(path)
        self.extended.append((node, num_masks))
        self.num_masks += num_masks

    @property
    def _num_committed(self) -> int:
        return self._sequence.num_committed - self._sequence.num_skipped - self._start

    def segment(self, block_table: Sequence[int], mask_token_id: int) -> Segment:
        sequence, offset = self._sequence, self._num_committed
        parents = [*range(-1, offset - 1), *(offset + parent for parent in sequence.parents)]
        places = [*range(offset), *(offset + node for node in sorted(self.inputs))]
        num_before = len(places)
        for node, num_masks in self.extended:
            last = offset + node
            if node < 0:
                places.remove(last)
                num_before -= 1
            places.append(last)
            for _ in range(num_masks):
                places.append(len(parents))
                parents.append(last)
                last = places[-1]
        num_real = offset + len(sequence.parents)
        tokens = self._tokens[self._start :]
        token_ids = [tokens[place] if place < num_real else mask_token_id for place in places]
        num_logits = len(places) - num_before
        if all(parent == place - 1 for place, parent in enumerate(parents)):
            return Segment(token_ids, self._start + places[0], block_table, num_logits)
        return Segment(token_ids, self._start, block_table, num_logits, parents, places)
