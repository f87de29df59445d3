"""The tokenizer loses nothing and survives being saved."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from bench.factory.corpus import Document
from bench.factory.tokenizer import (
    END_OF_TEXT_ID,
    IM_END_ID,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
)
from bench.factory.tokens import encode_documents
from services.held_out import held_out_texts

VOCABULARY_SIZE = 600


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    texts = (text.text for text in held_out_texts()[:20])
    save_tokenizer(train_tokenizer(texts, 2048, VOCABULARY_SIZE), directory)
    return directory


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    return load_tokenizer(folder)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "  leading and trailing  ",
        "def f(x):\n    if x:\n        return 1\n\n\n\tpass\r\n",
        "emoji 👩‍👩‍👧 and accents é e\u0301, 漢字, العربية",
        "\x00\x01\x7f\ufeff\u2028 control",
        "a ,b . c ' s n't",
        "".join(map(chr, range(1, 1000))),
    ],
)
def test_decoding_gives_the_text_back(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_vocabulary_has_the_size_asked_for(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == VOCABULARY_SIZE
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == END_OF_TEXT_ID
    assert tokenizer.bos_token_id is None
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == IM_END_ID


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ValueError, match="more text"):
        train_tokenizer(["only this"], 2048, VOCABULARY_SIZE)


def test_indentation_is_one_token(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer.encode("\n        x")) <= 4


def test_the_chat_template_is_saved_and_ends_with_the_assistant(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def test_special_tokens_exist_in_dialogues_only(folder: Path) -> None:
    serialized = (folder / "tokenizer.json").read_text()
    text = "x<|im_end|>"
    verbatim = encode_documents(serialized, [Document("a.py", text)])
    dialogue = encode_documents(serialized, [Document("a.py", text, is_dialogue=True)])
    assert IM_END_ID not in verbatim
    assert IM_END_ID in dialogue
    assert verbatim[-1] == dialogue[-1] == END_OF_TEXT_ID
