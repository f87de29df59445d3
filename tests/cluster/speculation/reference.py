"""Straightforward implementations from the publications, to compare the product's with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cluster.speculation.params import SamplingParams

_MASK = 2**64 - 1


def philox4x64_10(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Four words for one counter of four words and a key of two (Salmon et al. 2011, sections 3.3 and 4.3)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2E7470EE14C6C93 * c0, 2**64)
        high1, low1 = divmod(0xCA5A826395121157 * c2, 2**64)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & _MASK, (k1 + 0xBB67AE8584CAA73B) & _MASK
    return [c0, c1, c2, c3]


def shaped_logits(
    logits: npt.NDArray[np.float32], params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int
) -> npt.NDArray[np.float64]:
    """One row's logits before noise, token by token in float64; `token_ids` are all tokens before the one drawn."""
    scores = [float(x) for x in logits]
    for token, bias in params.logit_bias:
        scores[token] += bias
    counts = Counter(token_ids[num_prompt_tokens:])
    for token in set(token_ids):
        value = scores[token]
        scores[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for token, count in counts.items():
        scores[token] -= params.frequency_penalty * count + params.presence_penalty
    if params.temperature < 1e-5:
        return np.array(scores)
    scores = [value / params.temperature for value in scores]

    kept = list(range(len(scores)))
    probabilities = _softmax(scores, kept)
    kept = [t for t in kept if probabilities[t] >= params.min_p * max(probabilities.values())]
    kept.sort(key=lambda token: (-scores[token], token))
    if params.top_k:
        kept = kept[: params.top_k]
    if params.top_p < 1.0:
        probabilities, mass = _softmax(scores, kept), 0.0
        nucleus = []
        for token in kept:
            if nucleus and mass >= params.top_p:
                break
            nucleus.append(token)
            mass += probabilities[token]
        kept = nucleus
    return np.array([scores[t] if t in set(kept) else -np.inf for t in range(len(scores))])


def _softmax(scores: Sequence[float], tokens: Sequence[int]) -> dict[int, float]:
    largest = max(scores[token] for token in tokens)
    weights = {token: float(np.exp(scores[token] - largest)) for token in tokens}
    total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def softmax(scores: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    weights = np.exp(scores - scores.max())
    result: npt.NDArray[np.float64] = weights / weights.sum()
    return result
