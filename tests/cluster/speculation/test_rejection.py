"""Rejection sampling. The keys are fixed, so every test is deterministic; over the choice of keys those of
distributions would fail once in 10,000 times."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from scipy import stats

from cluster.speculation.noise import NoiseDomain, NoiseKey, gumbel_noise, uniform_noise
from cluster.speculation.rejection import accept_by_rejection

ERROR_RATE = 1e-4
P = torch.tensor(
    [[0.5, 0.3, 0.2, 0.0, 0.0], [0.1, 0.2, 0.3, 0.4, 0.0], [0.0, 0.25, 0.25, 0.25, 0.25]], dtype=torch.float64
)
Q = torch.tensor([[0.2, 0.2, 0.2, 0.2, 0.2], [0.7, 0.1, 0.1, 0.1, 0.0]], dtype=torch.float64)
POSITION = 17


def keys(number: int) -> list[NoiseKey]:
    return [NoiseKey.derive(seed, 0) for seed in range(number)]


def drafts_of(key: NoiseKey) -> list[int]:
    """Two tokens that are samples of Q, as a draft would draw them."""
    draws = [(key.within(NoiseDomain.DRAFT), POSITION + place) for place in range(len(Q))]
    return (Q.log() + torch.from_numpy(gumbel_noise(draws, Q.shape[1]))).argmax(-1).tolist()


def test_drafts_of_the_targets_own_distribution_are_always_accepted():
    same = torch.cat([Q, P[-1:]])
    for key in keys(300):
        drafts = drafts_of(key)
        committed = accept_by_rejection(drafts, same, Q, key, POSITION)
        assert committed[:2] == drafts
        assert len(committed) == 3


def test_drafts_the_target_never_chooses_are_never_accepted():
    for token in (3, 4):
        for key in keys(100):
            (committed,) = accept_by_rejection([token, 0], P, Q, key, POSITION)
            assert P[0, committed] > Q[0, committed]


def test_a_token_is_accepted_as_often_as_p_over_q_says():
    drafted = torch.tensor([[0.5, 0.125, 0.125, 0.125, 0.125]])
    wanted = torch.tensor([[0.2, 0.2, 0.2, 0.2, 0.2]] * 2)
    number = 4000
    accepted = sum(len(accept_by_rejection([0], wanted, drafted, key, POSITION)) == 2 for key in keys(number))
    assert stats.binomtest(accepted, number, 0.2 / 0.5).pvalue > ERROR_RATE
    assert all(len(accept_by_rejection([1], wanted, drafted, key, POSITION)) == 2 for key in keys(100))


def test_what_takes_a_rejected_drafts_place_is_of_the_residual():
    residual = (P[0] - Q[0]).clamp(min=0)
    counts = Counter(accept_by_rejection([4], P[:2], Q[:1], key, POSITION)[0] for key in keys(4000))
    assert set(counts) == {0, 1}
    expected = (residual / residual.sum() * 4000).tolist()[:2]
    assert stats.chisquare([counts[0], counts[1]], expected).pvalue > ERROR_RATE


def test_without_drafts_the_token_is_of_the_targets_distribution():
    counts = Counter(accept_by_rejection([], P[:1], Q[:0], key, POSITION)[0] for key in keys(4000))
    expected = (P[0, :3] * 4000).tolist()
    assert stats.chisquare([counts[token] for token in range(3)], expected).pvalue > ERROR_RATE


@pytest.mark.parametrize("place", [0, 1, 2])
def test_committed_tokens_are_samples_of_the_target(place):
    """Tests the token at each place in the rounds that reach it. P and Q do not depend on earlier tokens."""
    committed = [accept_by_rejection(drafts_of(key), P, Q, key, POSITION) for key in keys(6000)]
    reached = [tokens[place] for tokens in committed if len(tokens) > place]
    counts = Counter(reached)
    tokens = [token for token in range(P.shape[1]) if P[place, token] > 0]
    assert set(counts) <= set(tokens)
    expected = [float(P[place, token]) * len(reached) for token in tokens]
    assert len(reached) > 1000
    assert stats.chisquare([counts[token] for token in tokens], expected).pvalue > ERROR_RATE


def test_rounding_alone_rejects_nothing():
    """Where q is larger than p at one token and p nowhere larger than q, there is nothing else to choose."""
    p = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    q = torch.tensor([[0.75, 0.5]])
    assert all(accept_by_rejection([0], p, q, key, POSITION) == [0, 0] for key in keys(100))


def test_domains_are_independent():
    """Uniform numbers are uniform, and say nothing about the same positions in another domain."""
    key = NoiseKey.derive(1, 0)
    acceptance, draft = key.within(NoiseDomain.ACCEPTANCE), key.within(NoiseDomain.DRAFT)
    assert len({key, acceptance, draft}) == 3
    numbers = [[uniform_noise(k, position) for position in range(2000)] for k in (key, acceptance, draft)]
    for own in numbers:
        assert stats.kstest(own, "uniform").pvalue > ERROR_RATE
    assert abs(stats.pearsonr(numbers[1], numbers[2])[0]) < 0.1
    assert abs(stats.pearsonr(numbers[0], numbers[1])[0]) < 0.1
