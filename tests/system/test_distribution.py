"""Speculation leaves the target's distribution as it is: frequencies over seeds match exact probabilities."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from scipy import stats

from cluster.config.workers import TargetConfig
from cluster.engine.batch import Segment
from cluster.engine.runner import ModelRunner
from services.launch.local import LocalCluster
from tests.distribution import answer_probabilities
from tests.soak import length
from tests.system.client import Case, complete_all

NUM_SAMPLES = length(600, 2000)
TOP_K = 4
NUM_TOKENS = 3
TEMPERATURE = 0.9
# Seeds are fixed, so the test is deterministic; over the choice of seeds it would fail this often.
ERROR_RATE = 1e-4
PROMPT = (600, 310, 45, 1200, 77)


def next_token_probabilities(runner: ModelRunner, prefix: list[int]) -> dict[int, float]:
    """The target's distribution after `prefix`: the TOP_K likeliest tokens, renormalised."""
    table = runner.blocks.allocate(runner.blocks.num_blocks_for(len(prefix)))
    assert table is not None
    logits = runner.run([Segment(prefix, 0, table, num_logits=1)])[0].double() / TEMPERATURE
    runner.blocks.free(table)
    values, token_ids = logits.topk(TOP_K)
    return dict(zip(token_ids.tolist(), values.softmax(-1).tolist(), strict=True))


@pytest.mark.parametrize("k", length([4], [0, 4]))  # answers of one seed are equal: test_exactness.py
def test_frequencies_of_answers_match_the_target(cluster: LocalCluster, k: int) -> None:
    torch.set_num_threads(1)
    runner = ModelRunner.from_config(TargetConfig(dtype="float32", device="cpu"))
    expected = answer_probabilities(partial(next_token_probabilities, runner), PROMPT, NUM_TOKENS)
    fields = {"temperature": TEMPERATURE, "top_k": TOP_K, "ignore_eos": True}
    cases = [Case(PROMPT, seed, NUM_TOKENS, fields) for seed in range(NUM_SAMPLES)]
    counts = dict.fromkeys(expected, 0)
    for answer in complete_all(cluster.url, cases, concurrency=16, num_speculative_tokens=k):
        counts[tuple(answer)] += 1  # an answer outside the TOP_K is a KeyError, and wrong
    observed, wanted = pooled(counts, expected)
    assert len(wanted) >= 8
    assert stats.chisquare(observed, wanted).pvalue > ERROR_RATE


def pooled(
    counts: dict[tuple[int, ...], int], expected: dict[tuple[int, ...], float]
) -> tuple[list[float], list[float]]:
    """Observed and expected counts; answers expected fewer than 5 times are one cell."""
    observed, wanted, rest_observed, rest_wanted = [], [], 0.0, 0.0
    for answer, probability in expected.items():
        if probability * NUM_SAMPLES >= 5:
            observed.append(float(counts[answer]))
            wanted.append(probability * NUM_SAMPLES)
        else:
            rest_observed += counts[answer]
            rest_wanted += probability * NUM_SAMPLES
    if rest_wanted > 0:
        observed.append(rest_observed)
        wanted.append(rest_wanted)
    return observed, wanted
