"""The acceptances there are to compare with: what they commit is distributed as the target's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
from scipy import stats

from cluster.config import Config
from cluster.config.speculation import SpeculationConfig
from cluster.config.workers import DraftConfig, TargetConfig
from cluster.engine.batch import Segment
from cluster.engine.blocks import BlockManager
from cluster.engine.limits import StepLimits
from cluster.engine.runner import ModelRunner
from cluster.errors import ConfigurationError
from cluster.factories.targets import make_target
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.targets.base import GenerationRequest
from cluster.targets.rejection import RejectionSampler
from tests.background_loop import BackgroundLoop
from tests.distribution import answer_probabilities
from tests.waiting import wait_until

from .loopback import LoopbackDraft, LoopbackTarget

NewRunner = Callable[..., ModelRunner]

# Head and first layer are the target's, so that drafts are right often and not always.
TARGET = {"seed": 0, "tied": True}
DRAFT = TARGET | {"num_hidden_layers": 1}
TOP_K, TEMPERATURE, NUM_TOKENS, NUM_SAMPLES = 3, 2.0, 3, 900
NUM_TOGETHER = 4  # as many as a target runs at once
# Seeds are fixed, so a test is deterministic; over the choice of seeds it would fail this often.
ERROR_RATE = 1e-4
PROMPT = (5, 310, 45, 77)
SAMPLING = SamplingParams(temperature=TEMPERATURE, top_k=TOP_K, repetition_penalty=1.1)


def request(
    seed: int, params: SamplingParams = SAMPLING, *, max_tokens: int = NUM_TOKENS, k: int = 4, prefix: str = ""
) -> GenerationRequest:
    return GenerationRequest(
        f"{prefix}{seed}", list(PROMPT), len(PROMPT), params, NoiseKey.derive(seed, 0), max_tokens, True, k
    )


@pytest.fixture(scope="module")
def draft(loop: BackgroundLoop, new_runner: NewRunner) -> Iterator[LoopbackDraft]:
    draft = LoopbackDraft(loop, new_runner(8, 128, **DRAFT))
    yield draft
    draft.stop()


@pytest.fixture
def new_target(
    loop: BackgroundLoop, new_runner: NewRunner, draft: LoopbackDraft
) -> Iterator[Callable[..., tuple[LoopbackTarget, BlockManager]]]:
    """new_target(acceptance): a target and the blocks of the draft's copy for `rejection`; both must end up empty."""
    made: list[tuple[LoopbackTarget, BlockManager]] = []

    def start(
        acceptance: str, num_blocks: int = 128, num_draft_blocks: int = 128
    ) -> tuple[LoopbackTarget, BlockManager]:
        copy = new_runner(8, num_draft_blocks, **DRAFT)
        target = LoopbackTarget(
            loop,
            new_runner(8, num_blocks, **TARGET),
            [draft.address],
            acceptance=acceptance,
            rejection=RejectionSampler(copy, StepLimits(256, 8, 16)) if acceptance == "rejection" else None,
        )
        made.append((target, copy.blocks))
        target.wait_for_links()
        return target, copy.blocks

    yield start
    for target, blocks in made:
        target.assert_idle()
        assert blocks.num_used_blocks == 0
        target.stop()


def next_token_probabilities(runner: ModelRunner, tokens: list[int]) -> dict[int, float]:
    """Written apart from the sampler: the repetition penalty, the temperature, then the TOP_K likeliest."""
    logits = runner.run([Segment(tokens, 0, list(range(4)), num_logits=1)])[0].double()
    seen = sorted(set(tokens))
    penalty = SAMPLING.repetition_penalty
    logits[seen] = (logits[seen] / penalty).where(logits[seen] > 0, logits[seen] * penalty)
    values, token_ids = (logits / TEMPERATURE).topk(TOP_K)
    return dict(zip(token_ids.tolist(), values.softmax(-1).tolist(), strict=True))


def acceptance_of(target: LoopbackTarget, requests: list[GenerationRequest]) -> float:
    outputs = [output for request in requests for output in target.outputs(request)]
    return sum(o.num_accepted_tokens for o in outputs) / sum(o.num_draft_tokens for o in outputs)


@pytest.mark.parametrize("acceptance", ["coupled", "greedy", "rejection"])
def test_frequencies_of_answers_match_the_target(
    acceptance: str, new_target: Callable[..., tuple[LoopbackTarget, BlockManager]], new_runner: NewRunner
) -> None:
    expected = answer_probabilities(partial(next_token_probabilities, new_runner(8, 32, **TARGET)), PROMPT, NUM_TOKENS)
    target, _ = new_target(acceptance)
    requests = [request(seed) for seed in range(NUM_SAMPLES)]
    counts = dict.fromkeys(expected, 0)
    # Drafts of requests that begin together are waited for from the first token on; others' come later.
    for start in range(0, NUM_SAMPLES, NUM_TOGETHER):
        for answer in target.generate(requests[start:][:NUM_TOGETHER]):
            counts[tuple(answer)] += 1  # an answer outside the TOP_K is a KeyError, and wrong
    assert 0.1 < acceptance_of(target, requests) < 0.95
    assert all(probability * NUM_SAMPLES >= 5 for probability in expected.values())
    wanted = [probability * NUM_SAMPLES for probability in expected.values()]
    assert stats.chisquare(list(counts.values()), wanted).pvalue > ERROR_RATE


def test_greedy_drafts_leave_every_token_as_it_is_and_rejection_does_not(
    new_target: Callable[..., tuple[LoopbackTarget, BlockManager]],
) -> None:
    answers = {}
    for acceptance in ("coupled", "greedy", "rejection"):
        target, _ = new_target(acceptance)
        plain, speculative = (
            target.generate([request(seed, max_tokens=20, k=k, prefix=f"k={k} ") for seed in range(8)]) for k in (0, 4)
        )
        answers[acceptance] = speculative
        assert (plain == speculative) == (acceptance != "rejection")
    assert answers["coupled"] == answers["greedy"]


def test_rejection_leaves_greedy_requests_as_they_are(
    new_target: Callable[..., tuple[LoopbackTarget, BlockManager]],
) -> None:
    target, _ = new_target("rejection")
    greedy = SamplingParams(temperature=0.0)
    with_drafts, without = (request(0, greedy, max_tokens=60, k=k, prefix=f"k={k}") for k in (4, 0))
    # One after the other: while another request goes on without drafts, those of this one are not waited for.
    assert target.generate([with_drafts]) == target.generate([without])
    assert acceptance_of(target, [with_drafts]) > 0


def test_a_copy_without_room_falls_back_on_the_targets_own_choices(
    new_target: Callable[..., tuple[LoopbackTarget, BlockManager]],
) -> None:
    target, _ = new_target("rejection", num_draft_blocks=1)
    with_drafts, without = (request(0, max_tokens=40, k=k, prefix=f"k={k}") for k in (4, 0))
    with_drafts, without = (
        replace(r, token_ids=[*PROMPT, *PROMPT], num_prompt_tokens=8) for r in (with_drafts, without)
    )
    # One after the other: while another request goes on without drafts, those of this one are not waited for.
    assert target.generate([with_drafts]) == target.generate([without])


def test_aborted_and_preempted_sequences_free_the_copys_blocks(
    new_target: Callable[..., tuple[LoopbackTarget, BlockManager]],
) -> None:
    """Prompts are longer than a step of the copy; 32 blocks of 8 tokens do not hold four sequences."""
    target, blocks = new_target("rejection", num_blocks=32)
    requests = [
        replace(request(seed, max_tokens=150), token_ids=list(PROMPT) * 10, num_prompt_tokens=40) for seed in range(4)
    ]
    for each in requests:
        target.target.submit(each)
    wait_until(lambda: blocks.num_used_blocks > 0)
    wait_until(lambda: target.readings()["vllm:num_preemptions"] > 0)
    target.target.abort(requests[0].request_id)
    wait_until(lambda: all(target.is_finished(each) for each in requests[1:]))
    assert [len(target.token_ids(each)) for each in requests[1:]] == [150] * 3
    last = replace(requests[0], request_id="the last, and alone", max_tokens=200)
    target.target.submit(last)
    wait_until(lambda: len(target.outputs(last)) > 3 and blocks.num_used_blocks > 0)
    target.target.abort(last.request_id)
    target.assert_idle()
    assert blocks.num_used_blocks == 0


def test_rejection_needs_one_vocabulary(tiny_folder: Callable[..., object]) -> None:
    config = Config(
        target=TargetConfig(model=str(tiny_folder(**TARGET)), dtype="float32", device="cpu"),
        draft=DraftConfig(model=str(tiny_folder(vocab_size=448)), dtype="float32", device="cpu"),
        speculation=SpeculationConfig(acceptance="rejection"),
    )
    with pytest.raises(ConfigurationError, match=r"448 tokens, the target's\s+512"):
        make_target(config, "any")
