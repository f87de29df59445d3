from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from cluster.errors import ConfigurationError
from cluster.tokenization import IncrementalDetokenizer, Tokenizer

TEXTS = [
    "",
    "the quick brown fox",
    "naïve café, Ωμέγα, 日本語, 🦊👩‍👩‍👧",
    "\ufffd a replacement character of its own \ufffd",
    "  spaces\n\n\tand tabs  ",
    "a\x00b",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A byte-level BPE tokenizer: every character beyond ASCII is several tokens."""
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 4, trainer)
    path = tmp_path_factory.mktemp("model")
    raw.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def tokenizer(folder) -> Tokenizer:
    return Tokenizer(folder)


def changed(folder: Path, into: Path, change: Any) -> Tokenizer:
    definition = json.loads((folder / "tokenizer.json").read_text())
    change(definition)
    (into / "tokenizer.json").write_text(json.dumps(definition))
    return Tokenizer(into)


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_undoes_encoding(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_around_a_prompt_can_be_left_out(folder, tmp_path):
    def start_with_a_special_token(definition: dict) -> None:
        definition["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
        }

    tokenizer = changed(folder, tmp_path, start_with_a_special_token)
    bare = tokenizer.encode("fox", add_special_tokens=False)
    assert tokenizer.encode("fox") == [0, *bare]
    assert tokenizer.encode("<|endoftext|>fox", add_special_tokens=False) == [0, *bare]


def test_special_tokens_have_no_text(tokenizer):
    assert tokenizer.decode([0, *tokenizer.encode("fox"), 0]) == "fox"


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_of_a_text_add_up_and_end_between_characters(tokenizer, text):
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.push([token_id]) for token_id in tokenizer.encode(text)]
    pieces.append(detokenizer.flush())
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces)


@pytest.mark.parametrize("seed", range(200))
def test_pieces_of_random_tokens_add_up(tokenizer, seed):
    """Random tokens are mostly bytes that are no UTF-8."""
    source = random.Random(seed)
    text = "".join(source.choices("aé日🦊 \ufffd", k=20))
    token_ids = [
        *source.choices(range(tokenizer.vocab_size), k=source.randrange(40)),
        *tokenizer.encode(text),
        *source.choices(range(tokenizer.vocab_size), k=source.randrange(40)),
    ]
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = []
    start = 0
    while start < len(token_ids):
        end = start + source.randrange(1, 5)
        pieces.append(detokenizer.push(token_ids[start:end]))
        start = end
    pieces.append(detokenizer.flush())
    assert "".join(pieces) == tokenizer.decode(token_ids)


@pytest.fixture(scope="module")
def fallback_tokenizer(tmp_path_factory) -> Tokenizer:
    """As Llama 2's: characters that it does not know are byte tokens, and a space before the first word is dropped."""
    vocabulary = {"<unk>": 0, "<s>": 1} | {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    vocabulary |= {character: 258 + index for index, character in enumerate("▁thequickbrownfx".replace("o", "", 1))}
    raw = RawTokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens(["<s>"])
    path = tmp_path_factory.mktemp("fallback")
    raw.save(str(path / "tokenizer.json"))
    return Tokenizer(path)


def pushed(tokenizer: Tokenizer, token_ids: list[int], source: random.Random) -> str:
    """Returns the text of `token_ids`, which are pushed a few at a time."""
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = []
    while token_ids:
        number = source.randrange(1, 5)
        pieces.append(detokenizer.push(token_ids[:number]))
        token_ids = token_ids[number:]
    return "".join(pieces) + detokenizer.flush()


@pytest.mark.parametrize("seed", range(60))
def test_long_runs_of_bytes_that_are_no_characters_add_up(tokenizer, seed):
    source = random.Random(seed)
    byte_of = {token_id: tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)}
    tails = [token_id for token_id, one in byte_of.items() if len(one) == 1 and 0x80 <= one[0] < 0xC0]
    leads = [token_id for token_id, one in byte_of.items() if len(one) == 1 and one[0] >= 0xC0]
    token_ids: list[int] = []
    while len(token_ids) < 600:
        token_ids += source.choices(source.choice([tails, leads, tails + leads]), k=source.randrange(80))
        token_ids += tokenizer.encode(source.choice(["", "🦊", "日本語" * 20, "fox"]))
        token_ids += [0] * source.randrange(3)
    assert pushed(tokenizer, token_ids, source) == tokenizer.decode(token_ids)


@pytest.mark.parametrize("seed", range(60))
def test_characters_of_byte_tokens_add_up(fallback_tokenizer, seed):
    source = random.Random(seed)
    text = "".join(source.choice(["the quick ", " fox", "🦊", "日本語" * 30, "é", "👩‍👩‍👧"]) for _ in range(12))
    token_ids = fallback_tokenizer.encode(text)
    assert fallback_tokenizer.decode(token_ids) == text
    assert pushed(fallback_tokenizer, token_ids, source) == text


@pytest.mark.parametrize("seed", range(20))
def test_byte_tokens_that_are_no_characters_add_up(fallback_tokenizer, seed):
    source = random.Random(seed)
    token_ids = fallback_tokenizer.encode("the fox 🦊 ")
    token_ids += [2 + source.randrange(0x80, 0xC0) for _ in range(source.randrange(200))]
    token_ids += fallback_tokenizer.encode("quick 🦊")
    assert pushed(fallback_tokenizer, token_ids, source) == fallback_tokenizer.decode(token_ids)


@pytest.mark.parametrize("spelling", ["<|endoftext|>", "\u0142", "🦊"], ids=["special", "tail", "lead"])
def test_tokens_that_complete_nothing_cost_no_more_the_more_there_are(tokenizer, spelling):
    """20,000 took 10 s and more where each was decoded with all before it."""
    (token_id, *_) = tokenizer.encode("🦊")
    if spelling != "🦊":
        token_id = tokenizer._tokenizer.token_to_id(spelling)
    detokenizer = IncrementalDetokenizer(tokenizer)
    began_at = time.process_time()
    pieces = [detokenizer.push([token_id]) for _ in range(20_000)]
    assert time.process_time() - began_at < 4
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode([token_id] * 20_000)


def test_text_comes_out_while_garbage_follows_it(tokenizer):
    detokenizer = IncrementalDetokenizer(tokenizer)
    (first_byte, *_) = tokenizer.encode("🦊")
    assert detokenizer.push([*tokenizer.encode("fox"), first_byte]) == "fox"
    assert detokenizer.push(tokenizer.encode("y")) == "\ufffdy"


def test_the_fingerprint_is_of_the_tokenizers_meaning(folder, tokenizer, tmp_path):
    fingerprint = tokenizer.fingerprint()
    assert len(fingerprint) == 64
    assert Tokenizer(folder).fingerprint() == fingerprint

    def same(definition: dict) -> None:
        merges = definition["model"]["merges"]
        definition["model"]["merges"] = [" ".join(merge) for merge in merges]
        definition["truncation"] = None

    assert changed(folder, tmp_path, same).fingerprint() == fingerprint
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert Tokenizer(tmp_path).fingerprint() == fingerprint


def swap_two_tokens(definition: dict) -> None:
    vocabulary = definition["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def drop_a_merge(definition: dict) -> None:
    definition["model"]["merges"].pop()


def reorder_merges(definition: dict) -> None:
    definition["model"]["merges"].reverse()


def make_ordinary(definition: dict) -> None:
    definition["added_tokens"][0]["special"] = False


def add_a_special_token(definition: dict) -> None:
    token = definition["added_tokens"][0] | {"id": 300, "content": "<|pad|>"}
    definition["added_tokens"].append(token)


@pytest.mark.parametrize("change", [swap_two_tokens, drop_a_merge, reorder_merges, make_ordinary, add_a_special_token])
def test_the_fingerprint_changes_with(folder, tokenizer, tmp_path, change):
    assert changed(folder, tmp_path, change).fingerprint() != tokenizer.fingerprint()


def test_a_folder_with_another_format_says_how_to_convert_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no tokenizer\.json$"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    with pytest.raises(ConfigurationError, match="save_pretrained"):
        Tokenizer(tmp_path)
