"""Proposals of draft workers whose vocabulary differs slightly from the target's, and their positions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from cluster.config.file import load_config
from cluster.drafters.pairing import draft_vocabulary
from cluster.drafting.worker import DraftWorker
from cluster.engine.batch import Segment
from cluster.engine.loader import load_model
from cluster.engine.runner import ModelRunner
from cluster.factories.drafters import make_drafter
from cluster.model_folder import resolve_model_folder
from cluster.speculation.drafts import Drafts
from cluster.speculation.noise import NoiseKey, gumbel_noise
from cluster.speculation.params import SamplingParams
from cluster.speculation.tree import Shape
from cluster.tokenization import Tokenizer
from cluster.vocabulary_map import VocabularyMap
from cluster.wire.messages import Advance, Open, SpeculateReply, SpeculateRequest
from tests.near_pairs import DRAFT, TARGET, padded, permuted, without_tokens

K = 4
TEXT = (
    'def main(arguments):\n    """Reads the file of the current object."""\n    for line in self.file:\n        return'
)
KEY = NoiseKey.derive(7, 0)
TREE: Shape = (-1, -1, 0, 0, 1, 2)
NEW_IDS = {0: 1, 1: 2, 2: 0, 300: 301, 301: 300}  # the special tokens, and two tokens of TEXT
MISSING = ("Ġthe", "Ġfile", "Ġcurrent")


class Worker:
    """A draft worker with one link and one sequence."""

    def __init__(self, draft: Path | str, target: Path | str = TARGET, *settings: str) -> None:
        config = load_config(
            None,
            [f"draft.model={draft}", f"target.model={target}", "draft.dtype=float32", "draft.device=cpu", *settings],
        )
        self.drafter = make_drafter(config, vocabulary=draft_vocabulary(config))
        self.worker = DraftWorker(self.drafter)
        self._replies: list[SpeculateReply] = []
        self._link = self.worker.attach(self._replies.append)

    def open(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        shape: Shape | None = None,
        window: int = K,
        num_generated: int = 0,
    ) -> Drafts:
        """Opens a sequence whose last `num_generated` tokens are generated. Returns the first proposal."""
        opening = Open(1, token_ids, len(token_ids) - num_generated, params, KEY, K, window, shape)
        return self._ask(SpeculateRequest(opens={1: opening}), len(token_ids))

    def advance(self, base: int, token_ids: Sequence[int], shape: Shape | None = None) -> Drafts:
        """Commits `token_ids`. Returns the proposal after them."""
        request = SpeculateRequest(advances={1: Advance(1, base, token_ids, K, shape)})
        return self._ask(request, base + len(token_ids))

    def _ask(self, request: SpeculateRequest, base: int) -> Drafts:
        self.worker.receive(self._link, request)
        for _ in range(100):
            self.worker.step()
            for reply in self._replies:
                assert not reply.lost
                assert not reply.refused
            proposals = [reply.proposals[1] for reply in self._replies if reply.proposals]
            if proposals:
                self._replies.clear()
                assert [proposal.base for proposal in proposals] == [base]
                return proposals[0].drafts
        raise AssertionError("no proposal")

    @property
    def coverage(self) -> float:
        (value,) = (r.value for r in self.worker.readings() if r.name == "outrider_draft_vocabulary_coverage")
        return value


def rounds(worker: Worker, token_ids: Sequence[int], params: SamplingParams, shape: Shape | None) -> list[Drafts]:
    """Returns the proposals while `token_ids` are committed, three at a time after the first eight."""
    proposals = [worker.open(token_ids[:8], params, shape)]
    for base in range(8, len(token_ids) - 3, 3):
        proposals.append(worker.advance(base, token_ids[base : base + 3], shape))
    return proposals


@pytest.fixture(scope="module")
def text() -> list[int]:
    """Returns TEXT as the target's tokens, including special tokens."""
    tokenizer = Tokenizer(resolve_model_folder(TARGET))
    return [*tokenizer.encode("<|im_start|>" + TEXT + "<|im_end|>"), *tokenizer.encode("\n" + TEXT)]


def with_mask(folder: Path, mask_token_id: int) -> Path:
    """Adds a mask token, so that the drafter `parallel` can use the model."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pard_token": mask_token_id}))
    return folder


MAKE: Mapping[str, Callable[[Path], tuple[Path, Path]]] = {
    # Padding rows that copy the rows of frequent tokens, so they would be chosen often.
    "padded draft": lambda folder: (
        padded(DRAFT, folder / "d", [338, 261, 14, 201, 463]),
        resolve_model_folder(TARGET),
    ),
    "padded target": lambda folder: (padded(DRAFT, folder / "d", []), padded(TARGET, folder / "t", [None] * 64)),
    "permuted draft": lambda folder: (permuted(DRAFT, folder / "d", NEW_IDS), resolve_model_folder(TARGET)),
}


# The mask token of each draft, and the bundled draft's token with the same row. The first mask token is padding.
MASKS = {"padded draft": (4098, 14), "padded target": (301, 301), "permuted draft": (300, 301)}


@pytest.mark.parametrize("pair", MAKE)
@pytest.mark.parametrize(
    ("params", "shape", "drafter"),
    [
        (SamplingParams(temperature=0.0), None, "model"),
        (SamplingParams(temperature=1.0), None, "model"),
        (SamplingParams(temperature=1.0), TREE, "model"),
        (SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.2, logit_bias=((338, 2.0),)), None, "model"),
        (SamplingParams(temperature=1.0), None, "parallel"),
    ],
    ids=["greedy", "sampled", "tree", "shaped", "parallel"],
)
def test_proposes_what_a_draft_with_the_targets_vocabulary_proposes(
    params: SamplingParams, shape: Shape | None, drafter: str, pair: str, text: list[int], tmp_path: Path
) -> None:
    draft, target = MAKE[pair](tmp_path)
    mask, usual_mask = MASKS[pair]
    usual = with_mask(padded(DRAFT, tmp_path / "usual", []), usual_mask)
    with_mask(draft, mask)
    settings = (f"draft.drafter={drafter}",)
    found = rounds(Worker(draft, target, *settings), text, params, shape)
    assert found == rounds(Worker(usual, TARGET, *settings), text, params, shape)
    assert all(len(drafts) for drafts in found)


def test_padding_would_win_if_it_were_not_masked(text: list[int], tmp_path: Path) -> None:
    draft = padded(DRAFT, tmp_path / "d", [338, 261, 14, 201, 463])
    alone = rounds(Worker(draft, draft), text, SamplingParams(temperature=1.0), None)
    assert max(max(drafts.token_ids) for drafts in alone) < 4096  # the padded draft is also the target here
    runner = ModelRunner(load_model(draft, torch.float32, torch.device("cpu")), 16, 16)
    logits = runner.run([Segment(text, 0, range(16), num_logits=len(text))])
    noise = torch.from_numpy(gumbel_noise([(KEY, place + 1) for place in range(len(text))], logits.shape[1]))
    assert int((logits + noise).argmax(dim=1).max()) >= 4096


class TestTokensThatTheDraftLacks:
    """The draft spells missing tokens with several of its own, and uses the noise of the target's positions."""

    @pytest.fixture
    def draft(self, tmp_path: Path) -> Path:
        return without_tokens(DRAFT, tmp_path / "d", MISSING)

    @pytest.fixture
    def missing(self) -> set[int]:
        tokenizer = Tokenizer(resolve_model_folder(TARGET))
        return {token_id for token_id in tokenizer.token_ids if tokenizer.tokens([token_id])[0] in MISSING}

    @pytest.fixture
    def expected(self, draft: Path, missing: set[int]) -> Callable[[Sequence[int], SamplingParams], list[int]]:
        """Returns expected(tokens, params): K tokens, argmax(logits / T + noise at the target's position)."""
        runner = ModelRunner(load_model(draft, torch.float32, torch.device("cpu")), 16, 64)
        ours, theirs = Tokenizer(draft), Tokenizer(resolve_model_folder(TARGET))

        def compute(token_ids: Sequence[int], params: SamplingParams) -> list[int]:
            committed = list(token_ids)
            for _ in range(K):
                spelled: list[int] = []
                for token_id in committed:
                    text = theirs.decode([token_id], skip_special_tokens=False)
                    spelled += ours.encode(text, add_special_tokens=False) if token_id in missing else [token_id]
                scores = runner.run([Segment(spelled, 0, range(64), num_logits=1)])[0].clone()
                if not params.is_greedy:
                    noise = gumbel_noise([(KEY, len(committed))], len(scores))[0]
                    scores = scores / params.temperature + torch.from_numpy(noise)
                scores[sorted(missing)] = -torch.inf
                committed.append(int(scores.argmax()))
            return committed[-K:]

        return compute

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize("window", [K, 2 * K + 2])
    def test_drafts_continue_after_them(
        self,
        window: int,
        temperature: float,
        text: list[int],
        draft: Path,
        missing: set[int],
        expected: Callable[[Sequence[int], SamplingParams], list[int]],
    ) -> None:
        assert len(missing) == len(MISSING) == len(missing & {*text})
        worker, params = Worker(draft), SamplingParams(temperature=temperature)
        assert worker.open(text[:8], params, window=window).token_ids == expected(text[:8], params)
        for base in range(8, len(text) - 3, 3):
            committed = text[: base + 3]
            # Messages are cumulative, so this one repeats tokens that the worker has already spelled.
            drafts = worker.advance(base - 3 if base > 8 else base, committed[base - 3 if base > 8 else base :])
            assert drafts.token_ids == expected(committed, params)
        num_committed = len(committed) - 8
        num_lacking = sum(token_id in missing for token_id in committed[8:])
        assert num_lacking > 0
        assert worker.coverage == pytest.approx(1 - num_lacking / num_committed)

    def test_trees_propose_tokens_of_the_target_only(self, text: list[int], draft: Path, missing: set[int]) -> None:
        params = SamplingParams(temperature=1.0)
        proposed = {token for drafts in rounds(Worker(draft), text, params, TREE) for token in drafts.token_ids}
        assert proposed.isdisjoint(missing)
        chains, trees = (rounds(Worker(draft), text, params, shape) for shape in (None, (-1, -1, 0, 2, 3)))
        for chain, tree in zip(chains, trees, strict=True):
            path = tree.main_path(K)
            assert path is not None
            assert path.token_ids == chain.token_ids[: len(path)]

    @pytest.mark.parametrize("drafter", ["model", "parallel"])
    def test_committed_pieces_that_were_drafted_are_no_drafts_of_the_next_positions(
        self, drafter: str, text: list[int], draft: Path, missing: set[int]
    ) -> None:
        """The worker drafted the pieces of a token and further tokens. Then the target chose the whole token."""
        ours, theirs = Tokenizer(draft), Tokenizer(resolve_model_folder(TARGET))
        token_id = min(missing)
        pieces = ours.encode(theirs.decode([token_id]), add_special_tokens=False)
        assert len(pieces) == 2
        # The first piece has the higher score until it is drafted once.
        bias = tuple(zip(pieces, (200.0, 150.0), strict=True))
        params = SamplingParams(temperature=1.0, frequency_penalty=80.0, logit_bias=bias)
        settings = (f"draft.drafter={drafter}",)
        with_mask(draft, 301)
        worker = Worker(draft, TARGET, *settings)
        drafts = worker.open(text[:8], params, window=2 * K + 2)
        assert drafts.token_ids[:1] == pieces[:1]
        assert drafter == "parallel" or drafts.token_ids[:2] == pieces
        after = worker.advance(8, [token_id])
        again = Worker(draft, TARGET, *settings).open([*text[:8], token_id], params, num_generated=1)
        assert after.token_ids[:1] == again.token_ids[:1]
        assert drafter == "parallel" or after == again

    def test_the_first_draft_in_one_pass_is_that_of_the_model(self, text: list[int], draft: Path) -> None:
        params = SamplingParams(temperature=1.0)
        with_mask(draft, 301)
        chains, in_one_pass = (
            rounds(Worker(draft, TARGET, f"draft.drafter={name}"), text, params, None) for name in ("model", "parallel")
        )
        assert [drafts.token_ids[0] for drafts in chains] == [drafts.token_ids[0] for drafts in in_one_pass]

    def test_penalties_count_drafts_after_them(self, text: list[int], draft: Path) -> None:
        params = SamplingParams(temperature=1.0, frequency_penalty=1000.0, logit_bias=((600, 100.0),))
        for drafts in rounds(Worker(draft), text, params, None):
            assert len({*drafts.token_ids}) == K

    def test_tokens_that_only_the_draft_has_are_not_penalised(self) -> None:
        target, other = Tokenizer(resolve_model_folder(TARGET)), "outrider-draft-smollm2-135m"
        vocabulary = VocabularyMap(target, Tokenizer(resolve_model_folder(other)), 49_152)
        special = next(i for i in vocabulary.lacking if max(vocabulary.spell([i]), default=0) >= vocabulary.num_ids)
        params = SamplingParams(temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.5)
        worker = Worker(other)
        assert len(worker.open([300, special, 301], params)) == K
        assert len(worker.advance(3, [special, special])) == K
        assert worker.coverage == 0.0

    def test_a_mask_token_that_only_the_draft_has_is_not_penalised(self, tmp_path: Path) -> None:
        """PARD's mask token is the first ID after the tokenizer's tokens."""
        draft = with_mask(padded(DRAFT, tmp_path / "d", [None]), 4096)
        worker = Worker(draft, TARGET, "draft.drafter=parallel")
        for params in (
            SamplingParams(temperature=1.0, repetition_penalty=1.3),
            SamplingParams(temperature=0.0, frequency_penalty=0.5),
        ):
            assert len(worker.open([5, 17, 200, 43], params)) == K
            assert len(worker.advance(4, [9, 10])) == K

    def test_padding_of_the_target_is_left_out(self, text: list[int], tmp_path: Path) -> None:
        """A target may rarely choose a padding ID, which the draft cannot spell."""
        target = padded(TARGET, tmp_path / "t", [None] * 64)
        params = SamplingParams(temperature=1.0)
        worker = Worker(padded(DRAFT, tmp_path / "d", []), target)
        worker.open(text[:8], params, window=2 * K + 2)
        drafts = worker.advance(8, [4100])
        assert len(drafts) == K
        again = Worker(padded(DRAFT, tmp_path / "e", []), target).open([*text[:8], 4100], params)
        assert drafts.token_ids == again.token_ids
        assert worker.coverage == 0.0


def test_a_draft_with_the_targets_vocabulary_covers_all(text: list[int]) -> None:
    worker = Worker(DRAFT)
    rounds(worker, text, SamplingParams(), None)
    assert worker.coverage == 1.0
