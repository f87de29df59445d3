"""The target's tokens are its own inside vLLM's V2 runner too, whatever is drafted for it."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from cluster.config.workers import TargetConfig
from cluster.engine.batch import Segment
from cluster.engine.runner import ModelRunner
from cluster.model_folder import resolve_model_folder
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.speculation.sampling import Sampler, SampleRequest
from cluster.tokenization import Tokenizer
from services.held_out import held_out_texts
from tests.background_loop import BackgroundLoop
from tests.soak import only_in_soak
from tests.system.client import Case
from tests.system.near_ties import NearTieJudge

from .engine import Engine
from .knowing_draft import KnowingDraft, Quality

VOCAB_SIZE = 4096
NUM_CASES = 40
MAX_NEAR_TIES = 2  # vLLM's matrix products are not ours: float32 makes them, rarely
MAX_DRAFTS = 6
SAMPLING: tuple[dict[str, object], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05, "logit_bias": {"30": 3.0, "200": -5.0}},
    {"temperature": 1.0, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.8},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.95, "min_p": 0.02, "frequency_penalty": 0.4},
)
# The interpreter takes minutes. `test_bound_steps.py` has a short form.
pytestmark = only_in_soak
PROMPT_LENGTHS = (1, 31, 32, 33, 70)  # about the limits of a block
NUM_DRAFTED = 12  # of the cases: two of each kind of sampling
TIGHT = {"max_num_seqs": 12, "max_num_batched_tokens": 128, "block_size": 32, "num_gpu_blocks_override": 10}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(resolve_model_folder(TargetConfig().model))


@pytest.fixture(scope="module")
def cases(tokenizer: Tokenizer) -> list[Case]:
    """Held-out text, every kind of sampling in turn."""
    rng = random.Random(7)
    texts = [text.text for text in held_out_texts()]
    cases = []
    while len(cases) < NUM_CASES:
        text, length = rng.choice(texts), PROMPT_LENGTHS[len(cases) % len(PROMPT_LENGTHS)]
        start = rng.randrange(len(text))
        token_ids = tokenizer.encode(text[start : start + 1000])[:length]
        fields = {**SAMPLING[len(cases) % len(SAMPLING)], "ignore_eos": True}
        if token_ids:
            cases.append(Case(tuple(token_ids), rng.randrange(-(2**63), 2**63), 20, fields))
    return cases


@pytest.fixture(scope="module")
def constrained(cases: list[Case]) -> list[Case]:
    """Cases with features that only vLLM applies, all of them before the coupled choice."""
    return [
        Case(cases[1].prompt, 3, 20, {"temperature": 1.0, "regex": "[a-z]{5,12} = [0-9]{4,9};"}),
        Case(cases[2].prompt, 4, 16, {"temperature": 0.7, "min_tokens": 16, "bad_words": ["self", " the"]}),
        Case(cases[3].prompt, 5, 10, {"temperature": 1.0, "allowed_token_ids": list(range(300, 900, 7))}),
        Case(cases[4].prompt, 6, 10, {"temperature": 1.0, "n": 3}),
    ]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Coupled sampling alone."""
    settings = {"draft_addresses": []}
    with Engine(tmp_path_factory.mktemp("plain"), {"outrider": settings}, max_model_len=160, max_num_seqs=48) as engine:
        yield engine


@pytest.fixture(scope="module")
def answers(plain: Engine, cases: list[Case]) -> list[list[int]]:
    return plain.generate(cases)


@pytest.fixture(scope="module")
def constrained_answers(plain: Engine, constrained: list[Case]) -> list[list[list[int]]]:
    return plain.generate_choices(constrained)


@pytest.fixture(scope="module")
def draft(
    loop: BackgroundLoop,
    tokenizer: Tokenizer,
    cases: list[Case],
    answers: list[list[int]],
    constrained: list[Case],
    constrained_answers: list[list[list[int]]],
) -> Iterator[KnowingDraft]:
    draft = KnowingDraft(loop, VOCAB_SIZE, tokenizer.fingerprint())
    choices = [[answer] for answer in answers] + constrained_answers
    prompts = [case.prompt for case in [*cases, *constrained]]
    draft.worker.truths = [
        [*prompt, *choice] for prompt, of_case in zip(prompts, choices, strict=True) for choice in of_case
    ]
    yield draft
    draft.stop()


@pytest.fixture(scope="module")
def speculating(tmp_path_factory: pytest.TempPathFactory, draft: KnowingDraft) -> Iterator[Engine]:
    """Engine with automatic k, and with so few KV blocks that it preempts sequences and computes prompts in chunks."""
    speculation = {"max_speculative_tokens": MAX_DRAFTS, "draft_timeout_ms": 10_000}
    settings = {"draft_addresses": [draft.address], "speculation": speculation}
    folder = tmp_path_factory.mktemp("speculating")
    with Engine(folder, {"outrider": settings}, max_model_len=160, **TIGHT) as engine:
        yield engine


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    torch.set_num_threads(1)
    return ModelRunner.from_config(TargetConfig(dtype="float32", device="cpu"))


@pytest.fixture(scope="module")
def judge(runner: ModelRunner) -> NearTieJudge:
    return NearTieJudge(runner)


@pytest.mark.parametrize("quality", ["good", "random"])
def test_drafts_change_no_token(
    speculating: Engine,
    draft: KnowingDraft,
    cases: list[Case],
    answers: list[list[int]],
    constrained: list[Case],
    constrained_answers: list[list[list[int]]],
    quality: Quality,
) -> None:
    draft.worker.quality = quality
    before = speculating.counters()
    expected = [[answer] for answer in answers[:NUM_DRAFTED]] + constrained_answers
    assert speculating.generate_choices([*cases[:NUM_DRAFTED], *constrained]) == expected
    counted = {name: value - before[name] for name, value in speculating.counters().items()}
    drafted, accepted = (counted[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted"))
    if quality == "good":  # the first quality that runs; afterwards k may be 0
        assert accepted > 0.4 * drafted > 0
        assert counted["vllm:num_preemptions"] > 0
    else:
        assert accepted <= 0.1 * drafted


def test_choices_differ(constrained_answers: list[list[list[int]]]) -> None:
    first, second, third = constrained_answers[-1]
    assert first != second != third != first


def test_same_tokens_as_our_own_engine(
    cases: list[Case], answers: list[list[int]], runner: ModelRunner, judge: NearTieJudge
) -> None:
    assert_same(cases, answers, [_generate(runner, case) for case in cases], judge)


def assert_same(cases: list[Case], answers: list[list[int]], others: list[list[int]], judge: NearTieJudge) -> None:
    """But for near-ties."""
    different = [i for i, answer in enumerate(answers) if answer != others[i]]
    for i in different:
        assert judge.is_near_tie(cases[i], others[i], answers[i]), f"{cases[i].fields}\n{others[i]}\n{answers[i]}"
    print(f"{len(different)} near-ties in {len(answers)} answers")
    assert len(different) <= MAX_NEAR_TIES


def _generate(runner: ModelRunner, case: Case) -> list[int]:
    """One token a step."""
    fields = {name: value for name, value in case.fields.items() if name not in ("ignore_eos", "logit_bias")}
    bias = tuple((int(token), value) for token, value in case.fields.get("logit_bias", {}).items())
    params, key = SamplingParams(**fields, logit_bias=bias), NoiseKey.derive(case.seed, 0)
    tokens, sampler = list(case.prompt), Sampler(runner.model.device)
    table = runner.blocks.allocate(runner.blocks.num_blocks_for(len(tokens) + case.max_tokens))
    assert table is not None
    num_computed = 0
    for _ in range(case.max_tokens):
        logits = runner.run([Segment(tokens[num_computed:], num_computed, table, num_logits=1)])
        num_computed = len(tokens)
        tokens += sampler.sample(logits, [SampleRequest(params, key, tokens, len(case.prompt))])
    runner.blocks.free(table)
    return tokens[len(case.prompt) :]
