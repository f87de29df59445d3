"""Rows of mask tokens, from which a draft learns to propose several tokens at once.

This is the training of PARD (An et al., arXiv 2504.18583, sections 3.2 and 3.3): in addition to its text, an answer has
mask rows. Mask i after place p of the answer must predict the token at place p + i. It attends to the text up to p and
to the masks before it, so each answer is read once. Masks are dropped at random (conditional drop-token): of the places
with mask i - 1, a share of `RETENTION` also has mask i. This costs little of what the draft learns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from services.training.teaching import Lesson

RETENTION = 0.7


@dataclass(frozen=True)
class MaskRows:
    """The masks of one answer: the place that each mask follows, and its distance."""

    places: tuple[int, ...]  # places before the masks
    offsets: tuple[int, ...]  # 1 for the first mask after a place

    @property
    def labels(self) -> list[int]:
        """The places whose tokens the masks must predict."""
        return [place + offset for place, offset in zip(self.places, self.offsets, strict=True)]


def mask_rows(num_places: int, num_masks: int, generator: np.random.Generator | None = None) -> MaskRows:
    """Returns up to `num_masks` masks after each place; with `generator`, a random share of them."""
    places: list[int] = []
    offsets: list[int] = []
    kept = np.arange(num_places)
    for offset in range(1, num_masks + 1):
        kept = kept[kept + offset < num_places]
        if generator is not None:
            kept = kept[generator.random(len(kept)) < RETENTION]
        places += kept.tolist()
        offsets += [offset] * len(kept)
    return MaskRows(tuple(places), tuple(offsets))


def parallel_states(
    model: LlamaForCausalLM, lessons: Sequence[Lesson], masks: Sequence[MaskRows], mask_token_id: int
) -> list[Tensor]:
    """Returns the states of each answer's places and then of its masks.

    Each tensor is [places + masks, hidden_size].
    """
    texts = [lesson.answer.all_token_ids[:-1] for lesson in lessons]
    firsts = [len(text) - len(lesson.answer.token_ids) for text, lesson in zip(texts, lessons, strict=True)]
    width = max(len(text) + len(own.places) for text, own in zip(texts, masks, strict=True))
    token_ids = torch.zeros(len(lessons), width, dtype=torch.long)
    positions = torch.zeros(len(lessons), width, dtype=torch.long)
    may_attend = torch.zeros(len(lessons), width, width, dtype=torch.bool)
    for row, (text, first, own) in enumerate(zip(texts, firsts, masks, strict=True)):
        length, end = len(text), len(text) + len(own.places)
        followed = first + torch.tensor(own.places, dtype=torch.long)
        offsets = torch.tensor(own.offsets, dtype=torch.long)
        token_ids[row, :length] = torch.tensor(text)
        token_ids[row, length:end] = mask_token_id
        positions[row, :length] = torch.arange(length)
        positions[row, length:end] = followed + offsets
        seen = may_attend[row]
        seen[:length, :length] = torch.ones(length, length, dtype=torch.bool).tril()
        seen[length:end, :length] = torch.arange(length) <= followed[:, None]
        is_before = (followed[:, None] == followed[None]) & (offsets[:, None] >= offsets[None])
        seen[length:end, length:end] = is_before
        seen[end:, 0] = True  # padding rows: a softmax needs at least one value
    hidden = model.model(
        input_ids=token_ids, position_ids=positions, attention_mask=may_attend[:, None], use_cache=False
    ).last_hidden_state
    return [
        hidden[row, first : len(text) + len(own.places)]
        for row, (text, first, own) in enumerate(zip(texts, firsts, masks, strict=True))
    ]


def unused_token_id(vocab_size: int, lessons: Sequence[Lesson], reserved: Sequence[int]) -> int:
    """Returns the highest token ID that is neither used nor `reserved`, to be the mask.

    Raises ValueError if there is none.
    """
    used = {token for lesson in lessons for token in lesson.answer.all_token_ids} | set(reserved)
    for token_id in reversed(range(vocab_size)):
        if token_id not in used:
            return token_id
    raise ValueError(f"all {vocab_size} tokens of the vocabulary are used: none is left for the mask")


def add_mask_token(model: LlamaForCausalLM, mask_token_id: int) -> None:
    """Makes `mask_token_id` the mask token of `model`.

    Its embedding starts as the mean of all embeddings. The configuration has it as `pard_token`, as in PARD.
    """
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding[mask_token_id] = embedding.mean(dim=0)
    model.config.pard_token = mask_token_id
