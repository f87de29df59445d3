"""Rejection sampling of draft tokens, for comparison (Leviathan et al., ICML 2023, algorithm 1; Chen et al., 2023).

A draft token x was drawn from the draft's distribution q; the target's distribution is p.

    x ~ q is accepted with probability min(1, p(x) / q(x));  otherwise the token is drawn from max(0, p - q)

The result is a sample of p, as with coupled noise, but it depends on the draft: another q gives another sample.
Rejection also needs the whole distribution q, while a coupled draft only sends x.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cluster.speculation.noise import NoiseDomain, NoiseKey, gumbel_noise, uniform_noise


def accept_by_rejection(
    draft_token_ids: Sequence[int],
    target_probabilities: torch.Tensor,
    draft_probabilities: torch.Tensor,
    key: NoiseKey,
    first_position: int,
) -> list[int]:
    """Returns the tokens that a round commits: the accepted drafts and one more.

    The last token is drawn from the residual or, if all drafts were accepted, from the target's own distribution.
    `target_probabilities` [k + 1, vocab_size] and `draft_probabilities` [k, vocab_size] start at `first_position`.
    `key` is the sequence's own key. The draft drew its tokens with a key of another domain.
    """
    acceptance_key = key.within(NoiseDomain.ACCEPTANCE)
    for place, token in enumerate(draft_token_ids):
        p, q = target_probabilities[place], draft_probabilities[place]
        if uniform_noise(acceptance_key, first_position + place) * q[token].item() < p[token].item():
            continue
        residual = (p - q).clamp_(min=0.0)
        if residual.any():  # otherwise p and q are equal except for rounding
            return [*draft_token_ids[:place], _draw(residual, key, first_position + place)]
    num_drafts = len(draft_token_ids)
    return [*draft_token_ids, _draw(target_probabilities[num_drafts], key, first_position + num_drafts)]


def _draw(weights: torch.Tensor, key: NoiseKey, position: int) -> int:
    """Returns a token drawn in proportion to `weights` [vocab_size], by the Gumbel-max rule."""
    noise = torch.from_numpy(gumbel_noise([(key, position)], len(weights))[0]).to(weights.device)
    return int((weights.log() + noise).argmax())
