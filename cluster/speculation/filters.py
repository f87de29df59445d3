"""Min-p, top-k and top-p filters whose arithmetic gives the same bits on every device.

A token's weight is an integer in proportion to its probability: `2**40 * exp(score - best score)`. The exponential is
Cephes' polynomial (Moshier, 1989) in float32 products and sums, each rounded by itself. Sums of integers do
not depend on their order. By contrast, the last bits of a softmax and of its running sums depend on the device and on
the number of threads, so filters would keep different tokens at their border.
"""

from __future__ import annotations

import torch

NO_TOP_P = 2.0
"A row without top-p keeps everything, whatever the sum of its weights."

WEIGHT_BITS = 40  # weight of the best token; 2**22 tokens of that weight can be summed

# exp(r) = 1 + r + r**2 * polynomial(r) for |r| <= ln 2 / 2, the highest power first.
COEFFICIENTS = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
LOG2_E = 1.44269504088896341
LN2_HIGH = 0.693359375  # its products with small integers are exact
LN2_LOW = -2.12194440e-4
LOWEST = -200.0  # minimum score relative to the best: much higher scores already have a weight of 0
MANTISSA_BITS = 24  # precision of float32


def weights(scores: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """Returns exp(score - best) in fixed point, int64 [num_rows, vocab_size].

    `scores`: float32 [num_rows, vocab_size]. `best`: their row maxima, [num_rows, 1].
    """
    from_best = torch.where(scores == best, 0.0, scores - best)  # the best may be +inf
    distance = torch.where(scores > -torch.inf, from_best, LOWEST).clamp_(min=LOWEST)
    power = (distance * LOG2_E).add_(0.5).floor_()
    rest = (distance - power * LN2_HIGH) - power * LN2_LOW
    polynomial = torch.full_like(rest, COEFFICIENTS[0])
    for coefficient in COEFFICIENTS[1:]:
        polynomial = polynomial.mul_(rest).add_(coefficient)
    mantissa = polynomial.mul_(rest * rest).add_(rest).add_(1.0)
    integer = mantissa.mul_(2.0**MANTISSA_BITS).to(torch.int64) << (WEIGHT_BITS - MANTISSA_BITS)
    return integer >> (-power).clamp_(max=63.0).to(torch.int64)


def filter_rows(
    scores: torch.Tensor, *, min_p: torch.Tensor | None, top_k: torch.Tensor | None, top_p: torch.Tensor | None
) -> torch.Tensor:
    """Applies min-p, then top-k, then top-p, in vLLM's order: filtered tokens become -inf.

    `scores` float32 [num_rows, vocab_size], after temperature. Each filter is [num_rows], or None if no row has it.
    0 disables min-p for a row, the vocabulary's size or more disables top-k, and `NO_TOP_P` disables top-p. Top-k and
    top-p are both given or both None.
    """
    if min_p is None and top_k is None:
        return scores
    best = scores.amax(dim=-1, keepdim=True)
    if min_p is not None:
        least = min_p[:, None].to(torch.float64) * 2.0**WEIGHT_BITS
        scores = scores.masked_fill(weights(scores, best) < least, -torch.inf)
    if top_k is None or top_p is None:
        return scores
    # Stable and descending: among equal scores the lowest ID stays.
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(scores.shape[-1], device=scores.device)[None, :]
    ordered = ordered.masked_fill(ranks >= top_k[:, None], -torch.inf)
    summed = weights(ordered, best).cumsum(dim=-1)
    mass = summed[:, -1:].to(torch.float64) * top_p[:, None].to(torch.float64)
    # Tokens are removed if the mass before them reaches the limit; the most likely token always stays.
    outside = (summed.roll(1, dims=-1).to(torch.float64) >= mass) & (ranks > 0)
    ordered = ordered.masked_fill(outside, -torch.inf)
    return torch.full_like(scores, -torch.inf).scatter_(-1, order, ordered)
