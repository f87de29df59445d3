"""The only place where text becomes token IDs and token IDs become text. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as _Tokenizer

from cluster.errors import ConfigurationError

LONG_TEXT_CHARACTERS = 16_384  # longer ones are encoded without Python's lock, so that a thread helps
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """The tokenizer of a Hugging Face folder (`tokenizer.json`)."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigurationError(f"the model folder {folder} has no tokenizer.json")
        self._definition = path.read_bytes()
        self._tokenizer: _Tokenizer = _Tokenizer.from_buffer(self._definition)

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token IDs of `text`, with whatever the model's tokenizer puts around a prompt if `add_special_tokens`.

        Special tokens that `text` spells out are themselves either way. It must be free of lone surrogates.
        """
        if len(text) > LONG_TEXT_CHARACTERS:
            # Only batches are encoded without the interpreter's lock.
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return list(encoding.ids)
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; bytes that are not UTF-8 become U+FFFD."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def tokens(self, token_ids: Sequence[int]) -> list[str | None]:
        """Each of `token_ids` as the vocabulary spells it; None where it has no such token."""
        return [self._tokenizer.id_to_token(token_id) for token_id in token_ids]

    def fingerprint(self) -> str:
        """SHA-256, in hexadecimal, over what token IDs mean: (ID, token), merges and special IDs.

        A draft and a target may be paired exactly when theirs are equal. The chat template is not part of it.
        """
        definition = json.loads(self._definition)
        model = definition["model"]
        added = definition.get("added_tokens") or []
        vocabulary = {
            int(token_id): token for token, token_id in self._tokenizer.get_vocab(with_added_tokens=True).items()
        }
        meaning = {
            "tokens": sorted(vocabulary.items()),
            "merges": [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges") or []],
            "special": sorted(int(token["id"]) for token in added if token.get("special")),
        }
        canonical = json.dumps(meaning, ensure_ascii=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode("ascii")).hexdigest()


class IncrementalDetokenizer:
    """Turns a stream of token IDs into pieces of text whose concatenation is the text of all of them.

    A piece never ends inside a character: bytes of an unfinished one are held back until it is complete or the
    stream ends. Decoding restarts at the last place where a character ended, with the tokens of one piece before
    it for context (some tokenizers drop a space at the start of a text), so the cost of a token does not grow
    with the stream.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        self._context: list[int] = []  # tokens of the last complete piece
        self._context_text = ""
        self._pending: list[int] = []  # tokens since, perhaps within a character
        self._num_emitted = 0  # characters of the pending tokens' text that are out already

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that `token_ids` complete; "" when they end inside a character."""
        self._pending.extend(token_ids)
        text = self._pending_text()
        complete = text.rstrip(_REPLACEMENT)
        piece = complete[self._num_emitted :]
        if complete and complete == text:
            self._context, self._pending = self._pending, []
            self._context_text = self._tokenizer.decode(self._context, skip_special_tokens=self._skips)
            self._num_emitted = 0
        else:
            self._num_emitted = max(self._num_emitted, len(complete))
        return piece

    def flush(self) -> str:
        """The rest, at the end of the stream; an unfinished character becomes U+FFFD."""
        piece = self._pending_text()[self._num_emitted :]
        self._context, self._pending, self._num_emitted = [], [], 0
        self._context_text = ""
        return piece

    def _pending_text(self) -> str:
        text = self._tokenizer.decode(self._context + self._pending, skip_special_tokens=self._skips)
        return text[len(self._context_text) :]
