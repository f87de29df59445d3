from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.drafters.translation import DraftText, Translation
from cluster.model_folder import resolve_model_folder
from cluster.tokenization import Tokenizer
from cluster.vocabulary_map import VocabularyMap
from tests.near_pairs import DRAFT, TARGET, foreign

OTHER = "outrider-draft-smollm2-135m"
TEXT = (
    "def f(x):\n    it'rex = don't  \n\n\t# naïve 日本語 🎉🎉 ∀x \r\n"
    "    return 1234567 'll''re  <|im_end|>\n\n  \n  <|im_start|>x(self):\n        pass"
)


def _tokenizer(model: str | Path) -> Tokenizer:
    return Tokenizer(resolve_model_folder(str(model)))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return _tokenizer(foreign(DRAFT, tmp_path_factory.mktemp("pair") / "draft"))


@pytest.fixture(scope="module", params=["foreign", "larger target", "larger draft"])
def pair(request: pytest.FixtureRequest, draft: Tokenizer) -> tuple[Tokenizer, Tokenizer]:
    """Returns the tokenizers of target and draft."""
    if request.param == "foreign":
        return _tokenizer(TARGET), draft
    return (_tokenizer(OTHER), draft) if request.param == "larger target" else (_tokenizer(TARGET), _tokenizer(OTHER))


@pytest.fixture(scope="module")
def translation(pair: tuple[Tokenizer, Tokenizer]) -> Translation:
    target, draft = pair
    return Translation(VocabularyMap(target, draft, draft.vocab_size))


class TestDraftText:
    def test_it_is_what_the_drafts_tokenizer_makes_of_the_text(
        self, pair: tuple[Tokenizer, Tokenizer], translation: Translation
    ) -> None:
        """Checked after every target token that ends a character."""
        target, draft = pair
        text, so_far, num_compared = DraftText(translation), b"", 0
        for token_id in target.encode(TEXT):
            text.append([token_id])
            so_far += target.token_bytes(token_id)
            try:
                expected = draft.encode(so_far.decode())
            except UnicodeDecodeError:
                continue
            assert text.token_ids == expected
            num_compared += 1
        assert num_compared > 50
        assert len(text.token_ids) - 8 < text.num_certain < len(text.token_ids)

    @pytest.mark.parametrize("seed", range(8))
    def test_parts_give_the_tokens_of_the_whole(
        self, seed: int, pair: tuple[Tokenizer, Tokenizer], translation: Translation
    ) -> None:
        """The text consists of random tokens, so that it has stray bytes and special tokens at any place."""
        generator, (target, _) = random.Random(seed), pair
        token_ids = [*generator.choices(target.token_ids, k=60), *target.encode(TEXT)]
        parts, start, certain = DraftText(translation), 0, 0
        while start < len(token_ids):
            end = start + generator.randint(1, 4)
            before = parts.token_ids[: parts.num_certain]
            parts.append(token_ids[start:end])
            whole = DraftText(translation)
            whole.append(token_ids[:end])
            assert parts.token_ids == whole.token_ids
            assert parts.token_ids[: len(before)] == before
            assert parts.num_certain >= certain
            start, certain = end, parts.num_certain


def test_the_pieces_of_a_token_spell_it(pair: tuple[Tokenizer, Tokenizer], translation: Translation) -> None:
    target, draft = pair
    for draft_id in set(draft.token_ids) - draft.added_tokens.keys():
        pieces = [piece for piece in translation.pieces[draft_id].tolist() if piece >= 0]
        assert draft.token_bytes(draft_id).startswith(b"".join(map(target.token_bytes, pieces)))
        assert translation.spellings[draft_id] == (draft.token_bytes(draft_id) if pieces else b"")


def test_special_tokens_are_those_of_the_same_name(translation: Translation, pair: tuple[Tokenizer, Tokenizer]) -> None:
    end, own_end = (tokenizer.special_tokens["<|im_end|>"] for tokenizer in pair)
    assert translation.special_draft_ids(end) == [own_end]
    assert translation.pieces[own_end].tolist()[:2] == [end, -1]


@pytest.fixture
def joined(draft: Tokenizer) -> Callable[[str, str], list[str | None]]:
    """Returns joined(token, draft token), the target's tokens of both."""
    target = _tokenizer(TARGET)
    translation = Translation(VocabularyMap(target, draft, draft.vocab_size))

    def join(token: str, own: str) -> list[str | None]:
        (token_id,), (draft_id,) = target.encode(token), draft.encode(own)
        return target.tokens(translation.joined(token_id, draft_id))

    return join


@pytest.mark.parametrize(
    ("token", "own", "expected"),
    [
        ("):", "\n   ", ["):Ċ", "ĠĠĠ"]),
        (".", "get", [".get"]),
        (" the", "(", ["Ġthe", "("]),
        ("<|im_end|>", "\n", ["<|im_end|>"]),
        ("a", "<|im_end|>", ["a"]),
    ],
)
def test_tokens_merge_as_in_the_targets_text(
    token: str, own: str, expected: list[str], joined: Callable[[str, str], list[str | None]]
) -> None:
    assert joined(token, own) == expected
