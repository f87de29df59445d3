"""With heads in the target's process, the tokens are those of k = 0: after preemption, prefix hits and other events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from cluster.config import Config
from cluster.engine.cpu_kernels import has_kernels
from cluster.engine.model_config import ModelConfig
from cluster.factories.targets import make_target
from cluster.model_folder import resolve_model_folder
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.targets.base import GenerationOutput, GenerationRequest
from cluster.targets.torch import TorchTarget
from cluster.tokenization import Tokenizer
from services.held_out import held_out_texts
from tests.cluster.engine.further_heads import NUM_HEADS, save_bundled_target_with_mtp, save_medusa_heads

pytestmark = pytest.mark.skipif(not has_kernels(), reason="PyTorch's operators do not give the same bits at every k")

TARGET = "outrider-target-12m"
SAMPLING = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.2, logit_bias=((7, 1.0),)),
)
NUM_REQUESTS = 8
Changes = dict[str, dict[str, Any]]
TOKENIZER = Tokenizer(resolve_model_folder(TARGET))


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Changes]:
    """Settings of each drafter: the bundled EAGLE head, random Medusa heads, and an MTP module like that EAGLE head."""
    medusa, mtp = tmp_path_factory.mktemp("medusa"), tmp_path_factory.mktemp("mtp")
    config = ModelConfig.from_folder(resolve_model_folder(TARGET))
    save_medusa_heads(medusa, "without outputs", hidden=config.hidden_size, vocab=config.vocab_size)
    save_bundled_target_with_mtp(mtp)
    return {
        "eagle": {"draft": {"drafter": "eagle", "model": "outrider-eagle-12m"}},
        "medusa": {"draft": {"drafter": "medusa", "model": str(medusa)}},
        "mtp": {"target": {"model": str(mtp)}, "draft": {"drafter": "mtp"}},
        "none": {"draft": {"drafter": "ngram", "model": TARGET}},
    }


def new_target(*several: Changes) -> TorchTarget:
    settings: Changes = {
        "target": {"dtype": "float32", "numerics": "invariant", "threads": 1},
        "speculation": {"controller": "fixed", "draft_timeout_ms": 60_000},
    }
    for changes in several:
        for section, values in changes.items():
            settings[section] = settings.get(section, {}) | values
    target = make_target(Config.model_validate(settings), TOKENIZER.fingerprint())
    assert isinstance(target, TorchTarget)
    return target


def requests(k: int | None, max_tokens: int = 40) -> list[GenerationRequest]:
    """Requests with prompts of 1 to 120 tokens."""
    texts = [TOKENIZER.encode(text.text) for text in held_out_texts()[:NUM_REQUESTS]]
    lengths = (1, 17, 120, 40, 64, 33, 2, 90)
    return [
        GenerationRequest(
            str(index),
            text[:length],
            length,
            SAMPLING[index % len(SAMPLING)],
            NoiseKey.derive(index, 0),
            max_tokens,
            ignore_eos=True,
            num_speculative_tokens=k,
        )
        for index, (text, length) in enumerate(zip(texts, lengths, strict=True))
    ]


class Answers:
    """Tokens that a target generated, and how many of its drafts were accepted."""

    def __init__(self, target: TorchTarget, asked: Sequence[GenerationRequest]) -> None:
        self.token_ids: dict[str, list[int]] = {}
        self.num_drafts = self.num_accepted = 0
        for request in asked:
            target.submit(request)
        while target.run_step(self._publish):
            pass
        assert target.load().num_used_blocks == 0

    def _publish(self, outputs: Sequence[GenerationOutput]) -> None:
        for output in outputs:
            assert output.error is None
            self.token_ids.setdefault(output.request_id, []).extend(output.token_ids)
            self.num_drafts += output.num_draft_tokens
            self.num_accepted += output.num_accepted_tokens


@pytest.fixture(scope="module")
def expected(heads: dict[str, Changes]) -> dict[str, list[int]]:
    return Answers(new_target(heads["none"]), requests(0)).token_ids


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"speculation": {"tree_width": 3, "num_speculative_tokens": 6}},
        {"speculation": {"controller": "goodput"}},
        {"target": {"max_num_batched_tokens": 24, "max_num_seqs": 8}, "draft": {"max_num_batched_tokens": 16}},
        {"target": {"block_size": 4, "kv_cache_bytes": 2_000_000}},  # too little for all requests
        {"draft": {"quantization": "int8", "kv_cache_bytes": 100_000}},  # room for a few sequences only
    ],
    ids=["chains", "trees", "goodput", "chunks", "preemption", "little room for the head"],
)
@pytest.mark.parametrize(("drafter", "share"), [("eagle", 0.25), ("medusa", 0.0), ("mtp", 0.25)])
def test_the_tokens_are_those_without_drafts(
    drafter: str, share: float, changes: Changes, heads: dict[str, Changes], expected: dict[str, list[int]]
) -> None:
    """`share`: at least this share of the drafts is accepted if the depth does not depend on the machine's speed."""
    target = new_target(heads[drafter], changes)
    answers = Answers(target, requests(None))
    assert answers.token_ids == expected
    if "controller" not in changes.get("speculation", {}):
        assert answers.num_accepted > share * answers.num_drafts
    if "kv_cache_bytes" in changes.get("target", {}):
        assert sum(r.value for r in target.readings() if r.name == "vllm:num_preemptions") > 0


def test_more_drafts_than_medusa_heads_keep_the_tokens(
    heads: dict[str, Changes], expected: dict[str, list[int]]
) -> None:
    target = new_target(heads["medusa"])
    answers = Answers(target, requests(NUM_HEADS + 3))
    assert answers.token_ids == expected
    num_rounds = sum(map(len, expected.values())) - answers.num_accepted
    assert 0 < answers.num_drafts <= NUM_HEADS * num_rounds


@pytest.mark.parametrize("drafter", ["eagle", "medusa", "mtp"])
def test_a_sequence_goes_on_after_rounds_without_drafts_and_prefixes_are_found(
    drafter: str, heads: dict[str, Changes], expected: dict[str, list[int]]
) -> None:
    target = new_target(heads[drafter])
    first = Answers(target, requests(3))
    again = Answers(target, requests(3))
    assert first.token_ids == again.token_ids == expected
    # Cached prompts are not computed again, but their states are found: nearly the same number of drafts is accepted.
    assert again.num_accepted > 0.9 * first.num_accepted
    assert Answers(target, requests(0)).token_ids == expected


@pytest.mark.parametrize("drafter", ["eagle", "medusa", "mtp"])
def test_the_cache_of_the_target_has_room_for_the_states(drafter: str, heads: dict[str, Changes]) -> None:
    num_bytes = {"target": {"kv_cache_bytes": 4_000_000}}
    with_states = new_target(heads[drafter], num_bytes).load().num_blocks
    without = new_target(heads["none"], num_bytes).load().num_blocks
    assert with_states < without < 1.5 * with_states
