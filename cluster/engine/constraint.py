"""Constraints on the next tokens of a sequence and its drafts, as bit masks that the sampler applies to logits."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile

import numpy as np
import numpy.typing as npt
import torch

from cluster.constraints import UNCONSTRAINED, Constraints
from cluster.errors import InvalidRequestError
from cluster.grammars.matcher import CompiledGrammar, Matcher
from cluster.speculation.drafts import Drafts

_CANNOT_FOLLOW = "the grammar cannot be followed any further: "


class TokenConstraint:
    """The constraints of one sequence, and the state of its grammar after the committed tokens.

    A mask is a row of bits, 32 tokens to an int32, the lowest bit first. A set bit allows its token.
    """

    def __init__(
        self,
        constraints: Constraints,
        matcher: Matcher | None,
        vocab_size: int,
        end_token_ids: Iterable[int],
    ) -> None:
        self.error: InvalidRequestError | None = None  # the reason why the sequence cannot continue
        self.seconds = 0.0  # processor time of the calls, less what `grammar_turns` has let pass for it
        self._min_tokens = constraints.min_tokens
        self._bad_words = constraints.bad_words
        self._matcher = matcher
        self._ends = sorted(end_token_ids)
        self._generated: list[int] = []
        self._num_words = -(-vocab_size // 32)
        self._is_static = bool(constraints.allowed_token_ids)
        self._static = _bits(constraints.allowed_token_ids, vocab_size)
        self._is_limited = bool(constraints.bad_words or constraints.min_tokens)  # limits depend on generated tokens

    @classmethod
    def of(
        cls,
        constraints: Constraints,
        grammar: CompiledGrammar | None,
        vocab_size: int,
        end_token_ids: Iterable[int],
        generated: Sequence[int],
    ) -> TokenConstraint | None:
        """Returns the constraint after the tokens `generated`, which it commits; None for `UNCONSTRAINED`."""
        if constraints == UNCONSTRAINED:
            return None
        matcher = None if grammar is None else grammar.new_matcher()
        constraint = cls(constraints, matcher, vocab_size, end_token_ids)
        for token in generated:
            constraint.commit(token)
        return constraint

    @property
    def num_generated(self) -> int:
        """Number of committed tokens."""
        return len(self._generated)

    @property
    def is_complete(self) -> bool:
        """True if the grammar has ended, so that no token can follow."""
        return self._matcher is not None and self._matcher.is_terminated()

    @property
    def is_active(self) -> bool:
        """True if some next token may be forbidden."""
        if self._is_static or self._bad_words or self._matcher is not None:
            return True
        return len(self._generated) < self._min_tokens

    def cut(self, drafts: Drafts) -> Drafts:
        """Returns `drafts` without forbidden tokens and their descendants."""
        if not drafts or not self.is_active:
            return drafts
        allowed: set[int] = set()
        self._walk(drafts, allowed.add)
        return drafts if len(allowed) == len(drafts) else drafts.among(allowed)

    def drafts(self, proposed: Drafts, most: int) -> Drafts:
        """Returns the allowed drafts of `proposed`, followed by tokens that the grammar makes likely.

        Adds tokens only up to `most` drafts in total, and none to a tree.
        """
        if self._matcher is None or proposed.parents is not None:
            return self.cut(proposed)
        with self._timed():
            token_ids = list(takewhile(self._push, proposed.token_ids))
            if len(token_ids) < most and not self._matcher.is_terminated():
                token_ids += takewhile(self._push, self._matcher.likely_token_ids(most - len(token_ids)))
            self._pop(len(token_ids))
        return Drafts(token_ids)

    def masks(self, drafts: Drafts) -> torch.Tensor | None:
        """Returns masks for the token after the last committed token and after each of `drafts`.

        The masks are int32 [1 + len(drafts), ceil(vocab_size / 32)]. All `drafts` must be allowed. Returns None if no
        token is forbidden. Sets `error` if the grammar exceeds its limits.
        """
        if not self.is_active:
            return None
        with self._timed():
            masks = torch.full((1 + len(drafts), self._num_words), -1, dtype=torch.int32)
            self._fill(masks, 0)
            self._walk(drafts, lambda node: self._fill(masks, node + 1))
            self._check()
        return masks

    def commit(self, token: int) -> bool:
        """Commits `token`. If it is forbidden, sets `error` and returns False for it and for all later tokens."""
        with self._timed():
            self._check()
            if self.error is None and not self._push(token):
                limit = None if self._matcher is None else self._matcher.refused_because
                reason = "the constraints of the request allow no next token"
                self.error = InvalidRequestError(reason if limit is None else _CANNOT_FOLLOW + limit)
        return self.error is None

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started_at = time.thread_time()
        yield
        self.seconds += time.thread_time() - started_at

    def _check(self) -> None:
        """Sets `error` if the grammar has exceeded its limits."""
        if self._matcher is not None and self._matcher.error is not None:
            self.error = InvalidRequestError(_CANNOT_FOLLOW + self._matcher.error)

    def _walk(self, drafts: Drafts, visit: Callable[[int], object]) -> None:
        """Calls `visit` with each allowed draft. During the call the draft and its ancestors count as committed."""
        if drafts.parents is None:
            self._walk_chain(drafts.token_ids, visit)
            return
        children: defaultdict[int, list[int]] = defaultdict(list)
        for node, parent in enumerate(drafts.parents):
            children[parent].append(node)

        def descend(parent: int) -> None:
            for node in children[parent]:
                if self._push(drafts.token_ids[node]):
                    visit(node)
                    descend(node)
                    self._pop(1)

        descend(-1)

    def _walk_chain(self, token_ids: Sequence[int], visit: Callable[[int], object]) -> None:
        num_pushed = 0
        while num_pushed < len(token_ids) and self._push(token_ids[num_pushed]):
            visit(num_pushed)
            num_pushed += 1
        self._pop(num_pushed)

    def _push(self, token: int) -> bool:
        """Appends `token` and returns True; returns False if it is forbidden."""
        if self._is_static and not self._static[token >> 5] >> (token & 31) & 1:
            return False
        if self._is_limited and token in self._forbidden():
            return False
        if self._matcher is not None and (self._matcher.is_terminated() or not self._matcher.accept_token(token)):
            return False
        self._generated.append(token)
        return True

    def _pop(self, num_tokens: int) -> None:
        if num_tokens:
            del self._generated[-num_tokens:]
            if self._matcher is not None:
                self._matcher.rollback(num_tokens)

    def _fill(self, masks: torch.Tensor, row: int) -> None:
        if self._matcher is not None and not self._matcher.is_terminated():
            self._matcher.fill_next_token_bitmask(masks, row)
        if not (self._is_static or self._is_limited):
            return
        bits: npt.NDArray[np.uint32] = masks[row].numpy().view(np.uint32)
        if self._is_static:
            bits &= self._static
        for token in self._forbidden():
            bits[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)

    def _forbidden(self) -> list[int]:
        """Returns the tokens that are forbidden because of the tokens generated so far."""
        forbidden = list(self._ends) if len(self._generated) < self._min_tokens else []
        for word in self._bad_words:
            length = len(word) - 1
            if length == 0 or tuple(self._generated[-length:]) == word[:-1]:
                forbidden.append(word[-1])
        return forbidden


def _bits(token_ids: Iterable[int], vocab_size: int) -> npt.NDArray[np.uint32]:
    """Returns a mask in which the bits of `token_ids` are set."""
    allowed = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    allowed[list(token_ids)] = 1
    return np.packbits(allowed, bitorder="little").view(np.uint32)
