"""The vocabulary of a tokenizer for grammars: the text of every token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import xgrammar
from tokenizers import Tokenizer


def read_vocabulary(folder: Path, vocab_size: int, end_token_ids: Sequence[int]) -> xgrammar.TokenizerInfo:
    """Reads the vocabulary of the model in `folder`. The model has `vocab_size` logits; `end_token_ids` end a text.

    Special tokens have no text, so grammars allow none of them except the end tokens.
    """
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    spelled = [""] * vocab_size
    for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id < vocab_size and token_id not in special:
            spelled[token_id] = token
    # Detect the spelling of bytes from the file, as `from_huggingface` does, but without importing all of transformers.
    how = xgrammar.TokenizerInfo._detect_metadata_from_hf(tokenizer.to_str())
    return xgrammar.TokenizerInfo(
        spelled,
        how["vocab_type"],
        vocab_size=vocab_size,
        stop_token_ids=list(end_token_ids),
        add_prefix_space=how["add_prefix_space"],
    )
