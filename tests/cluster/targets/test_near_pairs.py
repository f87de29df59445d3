"""Pairs with different vocabularies or contexts give the tokens of k = 0; also tests their acceptance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cluster.config.file import load_config
from cluster.errors import ConfigurationError
from cluster.factories.targets import make_target
from cluster.model_folder import resolve_model_folder
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.targets.base import GenerationOutput, GenerationRequest
from cluster.targets.step_loop import StepLoop
from cluster.tokenization import Tokenizer
from tests.near_pairs import DRAFT, TARGET, foreign, padded, permuted, shortened, without_tokens

OTHER = "outrider-draft-smollm2-135m"
K, NUM_TOKENS = 4, 48
PROMPTS = ["def main(arguments):\n    ", "import os\n\n\nclass Reader:\n    def __init__(self", "for line in"]
SETTINGS = (
    "draft.placement=in-process",
    "draft.in_process_threads=shared",
    "target.device=cpu",
    "target.dtype=float32",
    "draft.dtype=float32",
    "speculation.draft_timeout_ms=60000",
    "speculation.controller=fixed",
    "speculation.tune_draft_temperature=false",
)


@dataclass
class Answers:
    tokens: dict[str, list[int]] = field(default_factory=dict)
    num_drafted: int = 0
    num_accepted: int = 0

    def publish(self, outputs: Sequence[GenerationOutput]) -> None:
        for output in outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            self.num_drafted += output.num_draft_tokens
            self.num_accepted += output.num_accepted_tokens

    @property
    def acceptance(self) -> float:
        return self.num_accepted / self.num_drafted


def new_target(draft: Path | str, target: Path | str, *settings: str) -> StepLoop:
    config = load_config(None, [*SETTINGS, f"draft.model={draft}", f"target.model={target}", *settings])
    made = make_target(config, Tokenizer(resolve_model_folder(config.target.model)).fingerprint())
    assert isinstance(made, StepLoop)
    return made


def answers(draft: Path | str, target: Path | str = TARGET, *settings: str, k: int = K) -> Answers:
    """Runs greedy and sampled requests at once."""
    loop, found = new_target(draft, target, *settings), Answers()
    tokenizer = Tokenizer(resolve_model_folder(str(target)))
    for temperature in (0.0, 1.0):
        for number, prompt in enumerate(PROMPTS):
            token_ids = tokenizer.encode(prompt)
            params, key = SamplingParams(temperature=temperature), NoiseKey.derive(number, 0)
            name = f"{temperature} {number}"
            loop.submit(GenerationRequest(name, token_ids, len(token_ids), params, key, NUM_TOKENS, True, k))
    while loop.run_step(found.publish):
        pass
    assert all(len(tokens) == NUM_TOKENS for tokens in found.tokens.values())
    return found


LACKING = ["Ġself", "Ġlist", "Ġcurrent", "):Ċ", ".ĊĊ"]
_NEVER = 127  # the byte 0xC0, which no text has
Pair = tuple[Path | str, Path | str]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """Returns pairs(name): the folders of draft and target."""
    made: dict[str, Pair] = {}

    def make(name: str) -> Pair:
        if name not in made:
            folder = tmp_path_factory.mktemp("pair")
            made[name] = _make(name, folder / "draft", folder / "target")
        return made[name]

    return make


def _make(name: str, draft: Path, target: Path) -> Pair:
    if name == "padded draft":
        return padded(DRAFT, draft, [338, 261, 14, 201, 463]), TARGET
    if name == "padded target":
        return DRAFT, padded(TARGET, target, [_NEVER] * 64)
    if name == "permuted specials":
        return permuted(DRAFT, draft, {0: 1, 1: 2, 2: 0, 300: 301, 301: 300}), TARGET
    if name == "permuted target":
        return DRAFT, permuted(TARGET, target, {0: 1, 1: 2, 2: 0})
    if name == "lacking draft":
        return without_tokens(DRAFT, draft, LACKING), TARGET
    if name == "foreign draft":
        return foreign(DRAFT, draft), TARGET
    if name == "short foreign draft":
        return shortened(str(foreign(DRAFT, draft.with_name("long"))), draft, 32), TARGET
    assert name == "short draft"
    return shortened(DRAFT, draft, 32), TARGET


@pytest.fixture(scope="module")
def usual() -> Answers:
    """Returns the answers of the bundled pair."""
    return answers(DRAFT)


ALL = ["padded draft", "padded target", "permuted specials", "permuted target", "lacking draft", "short draft"]
ALL += ["foreign draft", "short foreign draft"]
RUN_AHEAD = ("draft.in_process_threads=own",)


@pytest.mark.parametrize("settings", [(), ("speculation.tree_width=2",)], ids=["chains", "trees"])
@pytest.mark.parametrize("name", ALL)
def test_the_tokens_of_k_0(name: str, settings: tuple[str, ...], pairs: Callable[[str], Pair]) -> None:
    draft, target = pairs(name)
    found = answers(draft, target, *settings)
    assert found.num_accepted > 0
    assert found.tokens == answers(draft, target, k=0).tokens


@pytest.mark.parametrize("name", ["padded draft", "padded target", "permuted specials"])
def test_the_acceptance_of_an_equal_pair(name: str, pairs: Callable[[str], Pair], usual: Answers) -> None:
    """In float32 the drafts are the same, so the numbers of drafted and accepted tokens are the same, too."""
    found = answers(*pairs(name))
    assert found.tokens == usual.tokens
    assert (found.num_drafted, found.num_accepted) == (usual.num_drafted, usual.num_accepted)


def test_tokens_that_the_draft_lacks_cost_their_own_acceptance_only(
    pairs: Callable[[str], Pair], usual: Answers
) -> None:
    """If the noise were that of other positions or IDs, sampled drafts would only be accepted by chance."""
    draft, target = pairs("lacking draft")
    found = answers(draft, target)
    assert found.tokens == usual.tokens
    assert found.acceptance > 0.8 * usual.acceptance


def test_a_draft_with_a_shorter_context_stops_at_its_limit(pairs: Callable[[str], Pair], usual: Answers) -> None:
    """Longer sequences continue without drafts and with the same tokens."""
    found = answers(*pairs("short draft"))
    assert found.tokens == usual.tokens
    assert 0 < found.num_drafted < usual.num_drafted


def test_a_foreign_draft_that_runs_ahead_gives_the_tokens_of_k_0(pairs: Callable[[str], Pair], usual: Answers) -> None:
    assert answers(*pairs("foreign draft"), *RUN_AHEAD).tokens == usual.tokens


def test_a_foreign_draft_proposes_tokens_that_it_lacks(pairs: Callable[[str], Pair], usual: Answers) -> None:
    """A draft that only proposed common tokens, each read by itself, had 0.1 of the acceptance."""
    found = answers(*pairs("foreign draft"))
    assert found.tokens == usual.tokens
    assert found.acceptance > 0.3 * usual.acceptance


@pytest.mark.parametrize("names", [(DRAFT, OTHER), (OTHER, DRAFT)])
def test_bundled_models_of_different_tokenizers_pair(names: tuple[str, str], caplog: pytest.LogCaptureFixture) -> None:
    found = answers(*names)
    assert found.num_drafted > 0
    assert found.tokens == answers(*names, k=0).tokens
    number = "2727 of the 4096" if names == (OTHER, DRAFT) else "2727 of the 49152"
    assert f"has {number} tokens" in caplog.text


def test_a_pair_without_common_tokens_is_refused(tmp_path: Path) -> None:
    draft = without_tokens(DRAFT, tmp_path / "d", [*Tokenizer(resolve_model_folder(DRAFT)).tokens(range(4096))])
    definition = (draft / "tokenizer.json").read_text(encoding="utf-8")
    for special in ("<|endoftext|>", "<|im_start|>", "<|im_end|>"):
        definition = definition.replace(special, special[2:-2])
    (draft / "tokenizer.json").write_text(definition, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"cannot draft for the target .* has none of the 4096 tokens"):
        new_target(draft, TARGET)


def test_rejection_needs_equal_tokenizers(pairs: Callable[[str], Pair]) -> None:
    draft, target = pairs("permuted specials")
    with pytest.raises(ConfigurationError, match=r"acceptance rejection .* needs the tokenizer"):
        new_target(draft, target, "speculation.acceptance=rejection")
