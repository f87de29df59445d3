"""A target that drafts from earlier text: the tokens of k = 0, and nothing of another owner is proposed."""

from __future__ import annotations

import random

import pytest

from cluster.config.file import load_config
from cluster.factories.targets import make_target
from cluster.model_folder import resolve_model_folder
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.targets.base import GenerationOutput, GenerationRequest
from cluster.targets.step_loop import StepLoop
from cluster.tokenization import Tokenizer
from tests.soak import length

TARGET = "outrider-target-12m"
NUM_TOKENS = 40
NUM_PROMPTS = length(6, 24)
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=1.0, repetition_penalty=1.1),
)
SETTINGS = (
    f"target.model={TARGET}",
    "target.device=cpu",
    "target.dtype=float32",
    "target.threads=1",
    "draft.placement=in-process",
    "draft.in_process_threads=shared",
    "draft.dtype=float32",
)


class Answers:
    """Answers of one target, and how many drafts it verified for them."""

    def __init__(self, *settings: str) -> None:
        config = load_config(None, [*SETTINGS, *settings])
        target = make_target(config, Tokenizer(resolve_model_folder(TARGET)).fingerprint())
        assert isinstance(target, StepLoop)
        self.target = target
        self.tokens: dict[str, list[int]] = {}
        self.num_drafted = 0

    def ask(self, owner: bytes, seeds: range, k: int | None = None, salt: str = "") -> list[list[int]]:
        """Returns the answers to one prompt for each seed, all at once."""
        self.tokens, self.num_drafted = {}, 0
        for seed in seeds:
            prompt = random.Random(seed).choices(range(300, 900), k=30)
            key, params = NoiseKey.derive(seed, 0), PARAMS[seed % len(PARAMS)]
            self.target.submit(
                GenerationRequest(str(seed), prompt, 30, params, key, NUM_TOKENS, True, k, owner=owner, cache_salt=salt)
            )
        while self.target.run_step(self._publish):
            pass
        return [self.tokens[str(seed)] for seed in seeds]

    def counted(self, name: str) -> float:
        return {reading.name: reading.value for reading in self.target.readings() if not reading.labels}[name]

    def _publish(self, outputs: list[GenerationOutput]) -> None:
        for output in outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            self.num_drafted += output.num_draft_tokens


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return Answers("speculation.num_speculative_tokens=0").ask(b"", range(NUM_PROMPTS), k=0)


@pytest.mark.parametrize("controller", ["goodput", "fixed"])
def test_same_tokens_with_suffixes_beside_a_draft_model(controller: str, plain: list[list[int]]) -> None:
    answers = Answers("speculation.suffix_bytes=1000000", f"speculation.controller={controller}")
    for _ in range(2):
        assert answers.ask(b"alice", range(NUM_PROMPTS)) == plain
    if controller == "fixed":  # the other measures times, and may choose no drafts
        assert answers.counted("outrider_suffix_accepted_tokens") > NUM_PROMPTS * NUM_TOKENS / 3


def test_text_of_another_key_or_salt_is_no_draft() -> None:
    """A repeated answer, which is all that there is to match, is drafted for its own alone."""
    answers = Answers(
        "speculation.suffix_bytes=1000000", "speculation.controller=fixed", "draft.model=outrider-draft-2m"
    )
    accepted = []
    for owner, salt in ((b"alice", ""), (b"alice", ""), (b"bob", ""), (b"alice", "x")):
        before = answers.counted("outrider_suffix_accepted_tokens")
        answers.ask(owner, range(1), salt=salt)
        accepted.append(answers.counted("outrider_suffix_accepted_tokens") - before)
    first, again, others, salted = accepted
    assert again > first + NUM_TOKENS / 3
    assert others == salted == first


def test_a_request_without_drafts_gets_none(plain: list[list[int]]) -> None:
    answers = Answers("speculation.suffix_bytes=1000000", "speculation.controller=fixed")
    answers.ask(b"", range(2))
    assert answers.ask(b"", range(2), k=0) == plain[:2]
    assert answers.num_drafted == 0
