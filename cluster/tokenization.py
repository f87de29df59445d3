"""Converts text to token IDs and back; no other module does. Imports no torch."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from pathlib import Path

from tokenizers import AddedToken
from tokenizers import Tokenizer as _Tokenizer

from cluster.errors import ConfigurationError, ContextLengthError

LONG_TEXT_CHARACTERS = 2048  # longer ones are encoded without Python's lock, so that a thread helps
_MAX_PENDING_TOKENS = 32  # pending tokens that end inside a character
_LONGEST_CHARACTER = 4  # bytes
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """The tokenizer of a Hugging Face folder (`tokenizer.json`)."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            hint = ""
            if (folder / "tokenizer.model").is_file():
                convert = f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
                hint = f"; write it from its tokenizer.model with transformers: {convert}"
            raise ConfigurationError(f"the model folder {folder} has no tokenizer.json{hint}")
        self._definition = path.read_bytes()
        self._tokenizer: _Tokenizer = _Tokenizer.from_buffer(self._definition)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_tokens = {token.content: token_id for token_id, token in added.items() if token.special}
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._folder = folder
        decoder = self._tokenizer.decoder
        self._is_byte_level = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()

    @property
    def is_byte_level(self) -> bool:
        """True if tokens are byte sequences (byte-level BPE)."""
        return self._is_byte_level

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def token_ids(self) -> list[int]:
        """The IDs that have a token, in ascending order."""
        return sorted(self._tokenizer.get_vocab(with_added_tokens=True).values())

    def has_tokens_of(self, other: Tokenizer) -> bool:
        """Returns True if every ID has the same token in both tokenizers. Merges may differ."""
        mine, others = (t._tokenizer.get_vocab(with_added_tokens=True) for t in (self, other))
        same_added = self._added == other._added and self._special_tokens == other._special_tokens
        return same_added and self._is_byte_level == other._is_byte_level and mine == others

    @property
    def added_tokens(self) -> Mapping[int, str]:
        """Spellings of the tokens that were added to the model's vocabulary, special or not, by their IDs."""
        return self._added

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """IDs of the special tokens by their spellings."""
        return self._special_tokens

    def role_tokens(self) -> dict[str, int]:
        """Returns the IDs of the tokens that begin and end a text, by their names in `tokenizer_config.json`."""
        path = self._folder / "tokenizer_config.json"
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        found = {}
        for role in ("bos_token", "eos_token"):
            spelling = config.get(role)
            if isinstance(spelling, dict):
                spelling = spelling.get("content")
            if spelling in self._special_tokens:
                found[role] = self._special_tokens[spelling]
        return found

    @cached_property
    def _most_characters(self) -> float:
        """Characters of the longest token; infinite if tokens may stand for more text than their spelling."""
        shortens = self._tokenizer.normalizer is not None or any(
            token.lstrip or token.rstrip for token in self._tokenizer.get_added_tokens_decoder().values()
        )
        if shortens or not self._is_byte_level:
            return math.inf
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)))

    def check_fits(self, text: str, max_tokens: int, param: str) -> None:
        """Raises ContextLengthError if `text` has more than `max_tokens` tokens even if all were the longest.

        This takes no time, while a long text takes seconds to encode.
        """
        least = math.ceil(len(text) / self._most_characters)
        if least > max_tokens:
            raise ContextLengthError(
                f"{param} has at least {least} tokens; the model's context has {max_tokens}",
                param=param,
                num_prompt_tokens=least,
                max_model_len=max_tokens,
            )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token IDs of `text`, with the model's affixes of a prompt if `add_special_tokens`.

        Spellings of special tokens in `text` become these tokens either way. `text` must not contain lone surrogates.
        """
        if len(text) > LONG_TEXT_CHARACTERS:
            # Only batches are encoded without the interpreter's lock.
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            token_ids: list[int] = encoding.ids
            return token_ids
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token IDs of each of `texts`, without a prompt's affixes. Computes without Python's lock."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_words(self, text: str) -> list[list[int]]:
        """Returns the token IDs of each word of `text`; spellings of special tokens are plain text.

        A word is a unit of the pre-tokenizer, spaces and punctuation included: no token spans two words.
        """
        encoding = self._literal.encode(text, add_special_tokens=False)
        pairs = zip(encoding.word_ids, encoding.ids, strict=True)
        return [[token_id for _, token_id in word] for _, word in itertools.groupby(pairs, key=itemgetter(0))]

    @cached_property
    def _literal(self) -> _Tokenizer:
        """A copy of the tokenizer that encodes spellings of special tokens as text."""
        copy = _Tokenizer.from_buffer(self._definition)
        copy.encode_special_tokens = True
        return copy

    def encode_partly_literal(
        self, text: str, stand_ins: Mapping[str, str], *, add_special_tokens: bool = True
    ) -> list[int]:
        """Encodes like `encode`, but keeps some spellings of special tokens as text.

        The first character of each of them is replaced by a key of `stand_ins`, whose value is that character.
        """
        token_ids = self._disguised.encode(text, stand_ins)
        if not add_special_tokens:
            return token_ids
        before, after = self._surroundings()
        return before + token_ids + after

    @cached_property
    def _disguised(self) -> _DisguisedTokenizer:
        return _DisguisedTokenizer(self._tokenizer)

    def _surroundings(self) -> tuple[list[int], list[int]]:
        """Returns the tokens that the tokenizer puts before a prompt and after it."""
        bare, whole = (self.encode("a", add_special_tokens=adds) for adds in (False, True))
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return whole[:start], whole[start + len(bare) :]
        return [], []

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of `token_ids`; bytes that are not UTF-8 become U+FFFD."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def tokens(self, token_ids: Sequence[int]) -> list[str | None]:
        """Returns each of `token_ids` as the vocabulary spells it; None for unknown IDs."""
        return [self._tokenizer.id_to_token(token_id) for token_id in token_ids]

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a token, which may end inside a character; b"" if there is no such token."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            return b"".join(_BYTES.get(character) or character.encode() for character in token)
        if _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return token.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()

    def is_byte_token(self, token_id: int) -> bool:
        """Returns True for SentencePiece's tokens of single bytes, such as <0x0A>."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._added or self._is_byte_level:
            return False
        return _BYTE_TOKEN.fullmatch(token) is not None

    def fingerprint(self) -> str:
        """Returns the hexadecimal SHA-256 of the vocabulary: (ID, token), merges and special IDs.

        It identifies the token IDs on the wire: a target only uses draft workers with the same fingerprint. The chat
        template is not part of it.
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


class _DisguisedTokenizer:
    """A copy of a tokenizer with unguessable spellings of its special tokens.

    So the original spellings in a text are encoded as text, with the tokens they would have if there were no special
    ones.
    """

    def __init__(self, original: _Tokenizer) -> None:
        self._disguise = secrets.token_hex(16)
        # The two share the model. There is no post-processor: it refers to special tokens by their former IDs.
        self._tokenizer = _Tokenizer(original.model)
        if original.normalizer is not None:
            self._tokenizer.normalizer = original.normalizer
        if original.pre_tokenizer is not None:
            self._tokenizer.pre_tokenizer = original.pre_tokenizer
        # Tokens that the model's own vocabulary does not spell get new numbers.
        self._original_id: dict[int, int] = {}
        special: list[str] = []
        for token_id, token in sorted(original.get_added_tokens_decoder().items()):
            added = token
            if token.special:
                special.append(token.content)
                added = AddedToken(
                    self._disguise + token.content,
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=False,
                )
            self._tokenizer.add_tokens([added])
            new_id = self._tokenizer.token_to_id(added.content)
            assert new_id is not None
            self._original_id[new_id] = token_id
        longest_first = sorted(special, key=len, reverse=True)
        self._special = re.compile("|".join(re.escape(token) for token in longest_first))

    def encode(self, text: str, stand_ins: Mapping[str, str]) -> list[int]:
        """Implements `Tokenizer.encode_partly_literal`."""
        disguised = self._special.sub(lambda match: self._disguise + match[0], text)
        literal = disguised.translate({ord(stand_in): first for stand_in, first in stand_ins.items()})
        # A batch, as only those are encoded without the interpreter's lock.
        (encoding,) = self._tokenizer.encode_batch_fast([literal], add_special_tokens=False)
        return [self._original_id.get(token_id, token_id) for token_id in encoding.ids]


def _byte_level_alphabet() -> dict[str, bytes]:
    """Returns the characters by which byte-level vocabularies represent bytes.

    Printable ones stand for themselves; the others follow the first 256 (Radford et al. 2019, `bytes_to_unicode`).
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = [*map(chr, printable), *(chr(256 + index) for index in range(len(others)))]
    return {character: bytes([byte]) for character, byte in zip(characters, [*printable, *others], strict=True)}


_BYTES = _byte_level_alphabet()
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


class IncrementalDetokenizer:
    """Turns a stream of token IDs into pieces of text whose concatenation is the text of all of them.

    A piece never ends inside a character: bytes of an unfinished one are held back until it is complete or the stream
    ends. Decoding restarts at the last place where a character ended, with the tokens of one piece before it for
    context (some tokenizers drop a space at the start of a text). If no character ends for some tokens, their bytes are
    not text, and all but the last few are released. So the cost of a token does not grow with the stream.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, shown: Collection[int] = ()) -> None:
        """`shown`: special tokens that are not skipped."""
        self._tokenizer = tokenizer
        self._hidden: frozenset[int] = frozenset()
        if skip_special_tokens:
            self._hidden = frozenset(tokenizer.special_tokens.values()) - frozenset(shown)
        self._context: list[int] = []  # tokens of the last complete piece
        self._context_text = ""
        self._pending: list[int] = []  # tokens since, perhaps within a character
        self._num_emitted = 0  # characters of the pending tokens' text that were already returned

    def push(self, token_ids: Sequence[int]) -> str:
        """Returns the text that `token_ids` complete; "" if they end inside a character."""
        self._pending.extend(token_id for token_id in token_ids if token_id not in self._hidden)
        text = self._text(self._pending)
        complete = text.rstrip(_REPLACEMENT)
        piece = complete[self._num_emitted :]
        self._num_emitted = max(self._num_emitted, len(complete))
        if complete and complete == text:
            self._settle(len(self._pending), text)
        elif len(self._pending) > _MAX_PENDING_TOKENS:
            end = self._start_of_last_character()
            settled = self._text(self._pending[:end])
            piece += settled[self._num_emitted :]
            self._settle(end, settled)
        return piece

    def flush(self) -> str:
        """Returns the rest, at the end of the stream; an unfinished character becomes U+FFFD."""
        piece = self._text(self._pending)[self._num_emitted :]
        self._context, self._pending, self._num_emitted = [], [], 0
        self._context_text = ""
        return piece

    def _text(self, token_ids: list[int]) -> str:
        """Returns the text of `token_ids` after the context."""
        return self._decode(self._context + token_ids)[len(self._context_text) :]

    def _settle(self, num_tokens: int, text: str) -> None:
        """Makes the first `num_tokens` pending tokens the context. They are `text`, which was returned completely."""
        self._context, self._pending = self._pending[:num_tokens], self._pending[num_tokens:]
        self._context_text = self._decode(self._context)
        self._num_emitted = max(0, self._num_emitted - len(text))

    def _start_of_last_character(self) -> int:
        """Returns the index of the last pending token before which a character certainly ended.

        Returns the number of pending tokens if there is none.
        """
        bytes_of = [self._tokenizer.token_bytes(token_id) for token_id in self._pending]
        for index in range(len(bytes_of) - 1, 0, -1):
            before = b"".join(bytes_of[max(0, index - _LONGEST_CHARACTER) : index])[1 - _LONGEST_CHARACTER :]
            # No character has more than three bytes after its first.
            is_over = len(before) == _LONGEST_CHARACTER - 1 and all(map(_is_continuation, before))
            if bytes_of[index] and (is_over or not _is_continuation(bytes_of[index][0])):
                return index
        return len(bytes_of)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def _is_continuation(byte: int) -> bool:
    """Returns whether `byte` continues a character in UTF-8."""
    return byte & 0xC0 == 0x80
