from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from cluster.model_folder import resolve_model_folder
from cluster.tokenization import Tokenizer
from cluster.vocabulary_map import VocabularyMap
from tests.near_pairs import DRAFT, TARGET, padded, permuted, without_tokens, word_tokenizer

NUM_TOKENS = 4096

NewTokenizer = Callable[..., Tokenizer]


@pytest.fixture
def new_tokenizer(tmp_path: Path) -> NewTokenizer:
    """Returns new_tokenizer(tokens, special); `tokens` maps tokens to IDs, or lists them in order of IDs."""
    made = 0

    def make(tokens: Mapping[str, int] | Sequence[str], special: Sequence[str] = ()) -> Tokenizer:
        nonlocal made
        made += 1
        ids = tokens if isinstance(tokens, Mapping) else {token: number for number, token in enumerate(tokens)}
        return word_tokenizer(tmp_path / str(made), ids, special)

    return make


def bundled(name: str) -> Tokenizer:
    return Tokenizer(resolve_model_folder(name))


@pytest.mark.parametrize("num_rows", [NUM_TOKENS, NUM_TOKENS + 100])
def test_equal_vocabularies_keep_all(num_rows: int) -> None:
    vocabulary = VocabularyMap(bundled(TARGET), bundled(DRAFT), num_rows)
    assert (vocabulary.num_ids, vocabulary.lacking, vocabulary.rows) == (NUM_TOKENS, (), None)
    assert vocabulary.keeps_ids
    assert vocabulary.fingerprint == bundled(TARGET).fingerprint()
    token_ids = [5, 17, NUM_TOKENS - 1]
    assert vocabulary.spell(token_ids) is token_ids


def test_merges_do_not_matter(tmp_path: Path) -> None:
    draft = padded(DRAFT, tmp_path / "d", [])
    definition = json.loads((draft / "tokenizer.json").read_text())
    definition["model"]["merges"].pop()
    (draft / "tokenizer.json").write_text(json.dumps(definition))
    assert Tokenizer(draft).fingerprint() != bundled(TARGET).fingerprint()
    assert VocabularyMap(bundled(TARGET), Tokenizer(draft), NUM_TOKENS).keeps_ids


def test_moved_tokens_take_their_rows_along(tmp_path: Path) -> None:
    draft = Tokenizer(permuted(DRAFT, tmp_path / "d", {0: 1, 1: 2, 2: 0, 300: 301, 301: 300}))
    vocabulary = VocabularyMap(bundled(TARGET), draft, NUM_TOKENS)
    assert vocabulary.rows is not None
    assert [*vocabulary.rows[:4], *vocabulary.rows[299:303]] == [1, 2, 0, 3, 299, 301, 300, 302]
    assert (vocabulary.num_common, vocabulary.num_same, vocabulary.lacking) == (NUM_TOKENS, NUM_TOKENS - 5, ())


def test_missing_tokens_are_spelled_by_bytes(tmp_path: Path) -> None:
    target, draft = bundled(TARGET), Tokenizer(without_tokens(DRAFT, tmp_path / "d", ["Ġthe", "Ġself"]))
    vocabulary = VocabularyMap(target, draft, NUM_TOKENS)
    assert sorted(target.tokens(vocabulary.lacking)) == ["Ġself", "Ġthe"]
    assert vocabulary.rows is None  # the draft's own tokens at the missing IDs are only read
    token_ids = target.encode("for the self")
    spelled = vocabulary.spell(token_ids)
    assert len(spelled) > len(token_ids)
    assert draft.decode(spelled) == "for the self"
    assert not vocabulary.has_all(token_ids)


@pytest.mark.parametrize("token", [b"\xe2\x94", b"\xbd"])
def test_a_part_of_a_character_is_spelled_too(token: bytes, tmp_path: Path) -> None:
    target = bundled(TARGET)
    (token_id,) = [i for i in target.token_ids if target.token_bytes(i) == token]
    (spelling,) = target.tokens([token_id])
    assert spelling is not None
    draft = Tokenizer(without_tokens(DRAFT, tmp_path / "d", [spelling]))
    spelled = VocabularyMap(target, draft, NUM_TOKENS).spell([token_id])
    assert b"".join(map(draft.token_bytes, spelled)) == (
        token if len(token) > 1 else b""
    )  # a single byte has no smaller parts


@pytest.mark.parametrize("small", [True, False])
def test_vocabularies_of_quite_other_sizes(small: bool) -> None:
    """A target token that the draft lacks is spelled by draft tokens with the same bytes."""
    other = "outrider-draft-smollm2-135m"
    target, draft = (bundled(other), bundled(DRAFT)) if small else (bundled(TARGET), bundled(other))
    vocabulary = VocabularyMap(target, draft, draft.vocab_size)
    rows = vocabulary.rows or [*range(draft.vocab_size)]
    special = {*target.special_tokens.values()}
    for token_id in target.token_ids[::7]:
        spelled = b"".join(draft.token_bytes(rows[new_id]) for new_id in vocabulary.spell([token_id]))
        expected = target.token_bytes(token_id)
        assert spelled in (expected, b"") or token_id in special
    assert sorted({*rows}) == [*range(draft.vocab_size)]  # no row is lost


class TestSpecialTokens:
    def test_text_and_special_tokens_with_one_spelling_differ(self, new_tokenizer: NewTokenizer) -> None:
        target = new_tokenizer(["a", "b", "<s>", "?"], special=["<s>"])
        draft = new_tokenizer(["a", "<s>", "b", "?"])
        vocabulary = VocabularyMap(target, draft, 4)
        assert vocabulary.rows == (0, 2, 1, 3)  # they pair, because no other token does
        both = new_tokenizer(["<s>", "a", "b", "?", "<t>"], special=["<t>"])
        assert VocabularyMap(target, both, 5).num_common == 4

    def test_the_ends_of_a_text_pair_by_their_role(self, new_tokenizer: NewTokenizer, tmp_path: Path) -> None:
        for number, eos in enumerate(("<eos>", "<end>"), start=1):
            new_tokenizer(["a", "b", eos, "?"], special=[eos])
            (tmp_path / str(number) / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": eos}}))
        target, draft = (Tokenizer(tmp_path / name) for name in ("1", "2"))
        assert VocabularyMap(target, draft, 4).keeps_ids

    def test_another_special_token_at_the_same_id_is_never_proposed(self, new_tokenizer: NewTokenizer) -> None:
        target = new_tokenizer(["a", "b", "<think>", "?"], special=["<think>"])
        draft = new_tokenizer(["a", "b", "<box>", "?"], special=["<box>"])
        vocabulary = VocabularyMap(target, draft, 4)
        assert (vocabulary.lacking, vocabulary.rows, vocabulary.num_common) == ((2,), None, 3)
        assert vocabulary.spell([0, 2, 1]) == [0, 1]  # the draft has no tokens for its bytes


def test_a_special_token_that_the_draft_lacks_is_spelled_as_text(tmp_path: Path) -> None:
    """In a distilled Qwen model, some IDs of special tokens mean other tokens than in its base model."""
    folder = padded(DRAFT, tmp_path / "d", [])
    definition = (folder / "tokenizer.json").read_text(encoding="utf-8")
    (folder / "tokenizer.json").write_text(definition.replace("<|im_end|>", "<|box_end|>"), encoding="utf-8")
    draft, end = Tokenizer(folder), bundled(TARGET).special_tokens["<|im_end|>"]
    vocabulary = VocabularyMap(bundled(TARGET), draft, NUM_TOKENS)
    assert (vocabulary.lacking, vocabulary.rows) == ((end,), None)
    spelled = vocabulary.spell([5, end])
    assert len(spelled) > 2
    assert draft.decode(spelled[1:], skip_special_tokens=False) == "<|im_end|>"


def test_tokens_beyond_the_drafts_rows_are_missing(new_tokenizer: NewTokenizer) -> None:
    target, draft = (new_tokenizer(["a", "b", "?", "ab"]) for _ in range(2))
    vocabulary = VocabularyMap(target, draft, 3)
    assert (vocabulary.num_ids, vocabulary.num_common, vocabulary.keeps_ids) == (3, 3, False)
    assert vocabulary.spell([3, 2]) == [0, 1, 2]


def test_a_byte_with_two_tokens_keeps_both(new_tokenizer: NewTokenizer) -> None:
    """Vocabularies of SentencePiece have a token for each byte, in addition to those for characters."""
    tokens = ["<0x41>", "A", "B", "?"]
    assert VocabularyMap(new_tokenizer(tokens), new_tokenizer([*tokens, "C"]), 5).keeps_ids
    turned = VocabularyMap(new_tokenizer(tokens), new_tokenizer(["?", *tokens[:3]]), 4)
    assert turned.num_common == 4
    assert turned.rows is not None
    assert sorted(turned.rows) == [0, 1, 2, 3]


class TestByteTokens:
    """SentencePiece has <0x41> and A, and writes A for a text; a byte-level vocabulary only has A."""

    byte_tokens = ("<0x41>", "<0x42>", "<0xE2>", "A", "B", "?")

    def test_text_of_a_byte_level_target_is_not_drafted_as_byte_tokens(self, new_tokenizer: NewTokenizer) -> None:
        vocabulary = VocabularyMap(new_tokenizer(["?", "A", "B"]), new_tokenizer(self.byte_tokens), 6)
        assert vocabulary.rows is not None
        assert vocabulary.rows[:3] == (5, 3, 4)

    def test_a_byte_level_draft_drafts_text_rather_than_byte_tokens(self, new_tokenizer: NewTokenizer) -> None:
        draft = new_tokenizer(["A", "?", "B"])  # A has the ID of <0x41>
        vocabulary = VocabularyMap(new_tokenizer(self.byte_tokens), draft, 3)
        assert vocabulary.lacking == (0, 1, 2)
        assert vocabulary.spell([0, 1, 3]) == vocabulary.spell([3, 4, 3]) == [3, 4, 3]

    def test_spellings_prefer_text(self, new_tokenizer: NewTokenizer) -> None:
        vocabulary = VocabularyMap(new_tokenizer(["?", "AB"]), new_tokenizer(self.byte_tokens), 6)
        assert vocabulary.rows is not None
        assert [vocabulary.rows[new_id] for new_id in vocabulary.spell([1])] == [3, 4]
