"""The answer is the target's own, token for token, whatever the drafter and k: through HTTP and three processes."""

from __future__ import annotations

import random

import pytest
import torch

from cluster.config import Config, TargetConfig
from cluster.engine.cpu_kernels import has_kernels
from cluster.engine.runner import ModelRunner
from cluster.model_folder import resolve_model_folder
from cluster.tokenization import Tokenizer
from cluster.training.corpus import held_out_texts
from services.launch.local import LocalCluster
from tests.system.client import Case, complete_all
from tests.system.conftest import READY_TIMEOUT_SECONDS, cluster_config
from tests.system.near_ties import NearTieJudge

NUM_PROMPTS = 48
DEPTHS = (1, 4, 8)
MAX_NEAR_TIES = 0 if has_kernels() else 2  # of all answers of a comparison; PyTorch's float32 makes them, rarely

SAMPLING: tuple[dict[str, object], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 0.7, "repetition_penalty": 1.2},
    {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.8},
    {"temperature": 0.0, "frequency_penalty": 0.5},
    {"temperature": 1.0, "logit_bias": {"30": 3.0, "200": -5.0}},
)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """Prompts of 1 to 300 tokens of held-out text, every kind of sampling in turn."""
    rng = random.Random(7)
    tokenizer = Tokenizer(resolve_model_folder(Config().target.model))
    texts = [text.text for text in held_out_texts()]
    prompts = []
    while len(prompts) < NUM_PROMPTS:
        text = rng.choice(texts)
        start = rng.randrange(len(text))
        token_ids = tokenizer.encode(text[start : start + 3000])
        prompts.append(token_ids[: rng.choice((1, 2, 15, 16, 17, 60, 130, 300))])
    return [
        Case(
            prompt=tuple(prompt),
            seed=rng.randrange(-(2**63), 2**63),
            max_tokens=rng.choice((1, 7, 24, 48)),
            fields={**SAMPLING[i % len(SAMPLING)], "ignore_eos": i % 3 == 0},
        )
        for i, prompt in enumerate(prompts)
        if prompt
    ]


@pytest.fixture(scope="module")
def plain_answers(cluster: LocalCluster, cases: list[Case]) -> list[list[int]]:
    """Without speculation."""
    return complete_all(cluster.url, cases, num_speculative_tokens=0)


@pytest.fixture(scope="module")
def judge() -> NearTieJudge:
    torch.set_num_threads(1)
    config = TargetConfig(dtype="float32", device="cpu")
    return NearTieJudge(ModelRunner.from_config(config, dtype_on_cpu=torch.float32))


def assert_same(
    cases: list[Case], answers: list[list[int]], plain_answers: list[list[int]], judge: NearTieJudge
) -> None:
    different = [i for i, answer in enumerate(answers) if answer != plain_answers[i]]
    for i in different:
        assert judge.is_near_tie(cases[i], plain_answers[i], answers[i]), (
            f"case {i} ({cases[i].fields}) differs and is no near-tie:\n{plain_answers[i]}\n{answers[i]}"
        )
    print(f"{len(different)} near-ties in {len(answers)} answers of {sum(map(len, answers))} tokens")
    assert len(different) <= MAX_NEAR_TIES


@pytest.mark.parametrize("k", DEPTHS)
def test_same_tokens_with_the_right_draft(
    cluster: LocalCluster, cases: list[Case], plain_answers: list[list[int]], judge: NearTieJudge, k: int
) -> None:
    answers = complete_all(cluster.url, cases, num_speculative_tokens=k)
    assert_same(cases, answers, plain_answers, judge)


@pytest.mark.parametrize("k", [0, *DEPTHS])
def test_same_tokens_with_a_random_draft(
    cluster_with_random_draft: LocalCluster,
    cases: list[Case],
    plain_answers: list[list[int]],
    judge: NearTieJudge,
    k: int,
) -> None:
    answers = complete_all(cluster_with_random_draft.url, cases, num_speculative_tokens=k)
    assert_same(cases, answers, plain_answers, judge)


def test_same_tokens_alone_as_in_a_batch(
    cluster: LocalCluster, cases: list[Case], plain_answers: list[list[int]], judge: NearTieJudge
) -> None:
    answers = complete_all(cluster.url, cases, concurrency=1, num_speculative_tokens=4)
    assert_same(cases, answers, plain_answers, judge)


@pytest.mark.skipif(not has_kernels(), reason="PyTorch's operators are refused in this mode")
@pytest.mark.parametrize("drafter", ["ngram", "layer-skip", "self-int4"])
def test_same_bits_in_bfloat16_with_every_drafter(cases: list[Case], drafter: str) -> None:
    config = cluster_config("target.dtype=bfloat16", "target.numerics=invariant", f"draft.drafter={drafter}")
    with LocalCluster(config) as invariant:
        invariant.wait_ready(READY_TIMEOUT_SECONDS)
        expected = complete_all(invariant.url, cases, num_speculative_tokens=0)
        assert complete_all(invariant.url, cases, concurrency=5, num_speculative_tokens=4) == expected


@pytest.mark.skipif(not has_kernels(), reason="PyTorch's operators are refused in this mode")
def test_same_bits_in_bfloat16_with_trees_and_branches(cases: list[Case]) -> None:
    config = cluster_config(
        "target.dtype=bfloat16",
        "target.numerics=invariant",
        "speculation.tree_width=4",
        "speculation.max_run_ahead=30",
        "speculation.run_ahead_branches=2",
    )
    with LocalCluster(config) as invariant:
        invariant.wait_ready(READY_TIMEOUT_SECONDS)
        expected = complete_all(invariant.url, cases, num_speculative_tokens=0)
        for k in (4, 12):
            assert complete_all(invariant.url, cases, concurrency=5, num_speculative_tokens=k) == expected
