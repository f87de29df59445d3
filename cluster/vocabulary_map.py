"""Maps the target's token IDs to those of a draft model with another vocabulary."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

from cluster.byte_encoder import ByteEncoder
from cluster.tokenization import Tokenizer

_NEAR_SHARE = 0.9  # minimum share of the target's tokens in the draft of a nearly equal pair

_Meaning = tuple[bytes, bool, bool]  # bytes of a token, whether it is special, whether it is a byte token


class VocabularyMap:
    """Maps the target's token IDs to the tokens of a draft model, by meaning.

    The meaning of a token is its bytes, whether it is special, and whether it is a byte token of SentencePiece. Models
    only use byte tokens for characters without a token. Merges do not matter: token IDs are mapped, not text.
    An ID without a token is padding and has no meaning.

    The loader gives the rows of the draft model's embedding and head a new order, `rows`, so that its tokens have new
    IDs. IDs below `num_ids` are the target's, except for those in `lacking`: the drafter reads and proposes them, and
    draws with their noise. The draft does not have the target's tokens in `lacking`, and never proposes these IDs.
    They, and the IDs from `num_ids` to `num_inputs`, are other tokens of the draft, which are only read: `spell`
    replaces a token that the draft lacks with draft tokens that together have the same bytes.
    """

    def __init__(self, target: Tokenizer, draft: Tokenizer, num_rows: int) -> None:
        """`num_rows`: rows of the draft model's embedding, which may be more or fewer than its tokenizer's tokens."""
        self.target, self.draft, self.num_rows = target, draft, num_rows
        self._target_ids = target.token_ids
        pairs = _pairs(target, draft, num_rows)
        self.pairs: Mapping[int, int] = pairs  # the draft's ID of each target token that it has, by the target's ID
        self.num_common = len(pairs)  # tokens of the target that the draft has
        self.num_same = sum(row == token_id for token_id, row in pairs.items())  # tokens with the same ID in the draft
        self.num_ids = 1 + max(pairs, default=-1)
        self.lacking = tuple(token_id for token_id in range(self.num_ids) if token_id not in pairs)
        self._lacking = frozenset(self.lacking)
        rows = _rows(pairs, self.num_ids, num_rows)
        self._new_ids = {row: new_id for new_id, row in reversed([*enumerate(rows)])} | {
            row: token_id for token_id, row in pairs.items()
        }
        self.num_inputs = len(rows)
        self.rows: tuple[int, ...] | None = None if rows == [*range(num_rows)] else tuple(rows)
        "The draft's row of each new ID; None: the rows keep their order."
        self._encoder = ByteEncoder(draft, self._new_ids)
        self._spellings: dict[int, tuple[int, ...]] = {}

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the target's tokenizer."""
        return self.target.fingerprint()

    @property
    def num_target_tokens(self) -> int:
        return len(self._target_ids)

    @property
    def is_foreign(self) -> bool:
        """True if few tokens are common and both are byte-level, so that the draft needs a translation."""
        is_near = self.num_common >= _NEAR_SHARE * self.num_target_tokens
        return not is_near and self.target.is_byte_level and self.draft.is_byte_level

    @property
    def keeps_ids(self) -> bool:
        """True if every token of the target has the same ID in the draft."""
        return self.num_same == self.num_target_tokens

    def has_all(self, token_ids: Collection[int]) -> bool:
        """Returns True if each of the target's `token_ids` is one token of the draft."""
        return max(token_ids, default=0) < self.num_ids and self._lacking.isdisjoint(token_ids)

    def has(self, token_id: int) -> bool:
        return token_id < self.num_ids and token_id not in self._lacking

    def spell(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Returns the target's `token_ids` as new IDs; the same object if the draft has all of them.

        Omits tokens that the draft cannot spell, such as padding.
        """
        if self.has_all(token_ids):
            return token_ids
        return [new_id for token_id in token_ids for new_id in self._spelling(token_id)]

    def _spelling(self, token_id: int) -> tuple[int, ...]:
        if self.has(token_id):
            return (token_id,)
        if token_id > self._target_ids[-1]:
            return ()
        if token_id not in self._spellings:
            draft_ids = self._encoder.encode(self.target.token_bytes(token_id))
            self._spellings[token_id] = tuple(self._new_ids[draft_id] for draft_id in draft_ids)
        return self._spellings[token_id]


def _pairs(target: Tokenizer, draft: Tokenizer, num_rows: int) -> dict[int, int]:
    """Returns the draft's ID of each target token that the draft has, by the target's ID. No draft ID occurs twice."""
    if target.has_tokens_of(draft):
        return {token_id: token_id for token_id in target.token_ids if token_id < num_rows}
    meanings = dict(_meanings(target))
    of_draft = {token_id: meaning for token_id, meaning in _meanings(draft) if token_id < num_rows}
    pairs = {token_id: token_id for token_id, meaning in meanings.items() if of_draft.get(token_id) == meaning}
    unpaired: dict[_Meaning, list[int]] = defaultdict(list)
    for draft_id in sorted(of_draft.keys() - pairs.keys(), reverse=True):
        unpaired[of_draft[draft_id]].append(draft_id)

    def pair(token_id: int, meaning: _Meaning) -> None:
        if token_id not in pairs and unpaired.get(meaning):
            pairs[token_id] = unpaired[meaning].pop()

    for token_id, meaning in meanings.items():
        pair(token_id, meaning)
    # A byte of a character is a byte token in SentencePiece, but an ordinary token in a byte-level vocabulary.
    for token_id, (spelling, is_special, is_byte) in meanings.items():
        pair(token_id, (spelling, is_special, not is_byte))
    # An added token may be special in one model only. The tokens that begin and end a text may have other names.
    for token_id in target.added_tokens:
        spelling, is_special, is_byte = meanings[token_id]
        pair(token_id, (spelling, not is_special, is_byte))
    roles = draft.role_tokens()
    for role, token_id in target.role_tokens().items():
        if role in roles and roles[role] in of_draft:
            pair(token_id, of_draft[roles[role]])
    return pairs


def _meanings(tokenizer: Tokenizer) -> Iterator[tuple[int, _Meaning]]:
    special = frozenset(tokenizer.special_tokens.values())
    for token_id in tokenizer.token_ids:
        yield token_id, (tokenizer.token_bytes(token_id), token_id in special, tokenizer.is_byte_token(token_id))


def _rows(pairs: Mapping[int, int], num_ids: int, num_rows: int) -> list[int]:
    """Returns the draft's row of each new ID: first those of the target's IDs, then the draft's other rows.

    Keeps rows in place where possible. IDs of missing tokens get arbitrary rows.
    """
    rows = [pairs.get(token_id) for token_id in range(num_ids)]
    others = set(range(num_rows)) - set(pairs.values())
    for row in sorted(others):
        if row < num_ids and rows[row] is None:
            rows[row] = row
            others.remove(row)
    rest = iter(sorted(others))
    return [next(rest, 0) if row is None else row for row in rows] + list(rest)
