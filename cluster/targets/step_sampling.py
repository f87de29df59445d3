"""Rows of a step that yield choices, and how each of them is sampled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from cluster.speculation.drafts import path_to
from cluster.speculation.sampling import SampleRequest
from cluster.speculation.token_counts import TokenCounts
from cluster.targets.token_generator import Scheduled


def logits_of_choices(logits: torch.Tensor, step: Sequence[Scheduled]) -> torch.Tensor:
    """Returns the rows of `logits` that yield choices: all rows except those that only score prompt tokens."""
    if not any(scheduled.num_scored for scheduled in step):
        return logits
    rows: list[int] = []
    end = 0
    for scheduled in step:
        end += scheduled.num_logits
        rows.extend(range(end - scheduled.num_choices, end))
    return logits[rows]


def sample_requests(step: Sequence[Scheduled], vocab_size: int, device: torch.device) -> list[SampleRequest]:
    """Returns the requests of all rows of `step` that yield choices, in order."""
    return [
        request
        for scheduled in step
        if scheduled.yields_choices
        for request in _requests_of(scheduled, scheduled.sequence.count(device, vocab_size))
    ]


def _requests_of(scheduled: Scheduled, counts: TokenCounts | None) -> Iterator[SampleRequest]:
    """Yields sample requests for the rows of `scheduled`: one for a chain, one for each row of a tree.

    `counts`: token counts of the sequence, for penalties.
    """
    generation = scheduled.sequence
    allowed = None if generation.constraint is None else generation.constraint.masks(scheduled.drafts)

    def asked(draft_token_ids: Sequence[int], rows: slice) -> SampleRequest:
        return SampleRequest(
            params=generation.request.params,
            noise_key=generation.request.noise_key,
            token_ids=generation.token_ids,
            draft_token_ids=draft_token_ids,
            num_prompt_tokens=generation.num_prompt_tokens,
            num_rows=rows.stop - rows.start,
            position_shift=scheduled.end - len(generation.token_ids),  # 0 if all tokens are read
            allowed=None if allowed is None else allowed[rows],
            counts=counts,
        )

    token_ids, parents = scheduled.drafts.token_ids, scheduled.drafts.parents
    if parents is None:
        yield asked(token_ids, slice(0, scheduled.num_choices))
    else:
        for node in range(-1, len(token_ids)):
            yield asked([token_ids[i] for i in path_to(node, parents)], slice(node + 1, node + 2))
