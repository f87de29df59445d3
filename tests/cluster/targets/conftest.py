"""Targets and draft workers with tiny models, and the answers that are right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest

from cluster.engine.batch import Segment
from cluster.engine.runner import ModelRunner
from cluster.speculation.sampling import Sampler, SampleRequest
from tests.background_loop import BackgroundLoop

from .loopback import OTHER_SEED, TARGET_SEED, LoopbackDraft, LoopbackTarget
from .requests import mixed_requests

NewRunner = Callable[..., ModelRunner]


@pytest.fixture(scope="module")
def same_draft(loop: BackgroundLoop, new_runner: NewRunner) -> Iterator[LoopbackDraft]:
    """The target's own weights: what it proposes is right."""
    draft = LoopbackDraft(loop, new_runner(8, 128, seed=TARGET_SEED))
    yield draft
    draft.stop()


@pytest.fixture(scope="module")
def other_draft(loop: BackgroundLoop, new_runner: NewRunner) -> Iterator[LoopbackDraft]:
    """Other weights: what it proposes is right now and then."""
    draft = LoopbackDraft(loop, new_runner(8, 128, seed=OTHER_SEED))
    yield draft
    draft.stop()


@pytest.fixture
def new_target(loop: BackgroundLoop, new_runner: NewRunner) -> Iterator[Callable[..., LoopbackTarget]]:
    """new_target(drafts, **settings): a target linked to `drafts`; it must leave no block in use."""
    targets: list[LoopbackTarget] = []

    def start(
        drafts: Sequence[LoopbackDraft],
        num_blocks: int = 128,
        model: Mapping[str, Any] = MappingProxyType({"seed": TARGET_SEED}),
        **settings: object,
    ) -> LoopbackTarget:
        runner = new_runner(8, num_blocks, **model)
        target = LoopbackTarget(loop, runner, [draft.address for draft in drafts], **settings)
        targets.append(target)
        target.wait_for_links(len(drafts))
        return target

    yield start
    for target in targets:
        target.assert_idle()
        target.stop()


@pytest.fixture(scope="module")
def expected(new_runner: NewRunner) -> dict[int, list[int]]:
    """The answers to `mixed_requests`, by their place: each alone, one token a step, the whole prefix each time."""
    runner = new_runner(8, 32, seed=TARGET_SEED)
    sampler = Sampler(runner.model.device)
    answers = {}
    for place, request in enumerate(mixed_requests(k=0)):
        tokens = list(request.token_ids)
        for start in range(request.num_prompt_tokens, request.num_prompt_tokens + request.max_tokens):
            computed = 0 if start == request.num_prompt_tokens else start - 1
            logits = runner.run([Segment(tokens[computed:], computed, list(range(32)), num_logits=1)])
            sampled = SampleRequest(request.params, request.noise_key, tokens, len(request.token_ids))
            tokens += sampler.sample(logits, [sampled])
        answers[place] = tokens[request.num_prompt_tokens :]
    return answers
