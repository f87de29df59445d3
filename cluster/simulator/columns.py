"""The state of every sequence that runs, in arrays with a row each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from cluster.coordination.sequence import SpeculativeSequence
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams

NEVER = np.inf

BoolArray = npt.NDArray[np.bool_]

_PARAMS = SamplingParams()
_NOISE_KEY = NoiseKey.derive(0, 0)


class Columns:
    """Rows of all targets. Lengths and bases are numbers of committed tokens; times are seconds, `NEVER` for none.

    A drafter's tree is a chain here: it has `drafted` tokens past those that it `known`s, of which the first `right`
    will be the target's choices (`right` is drawn further than was drafted). A proposal is a copy of the beginning of
    one: `base`, `length`, `right`.
    """

    def __init__(self, num_rows: int) -> None:
        def numbers(value: int = 0) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
            return np.full(num_rows, value, np.int64)

        def times(value: float = NEVER) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
            return np.full(num_rows, value)

        def flags() -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
            return np.zeros(num_rows, np.bool_)

        self.target = numbers()
        self.request = numbers()
        self.handles: list[SpeculativeSequence | None] = [None] * num_rows
        # Of the engine.
        self.length = numbers()
        self.max_len = numbers()
        self.computed = numbers()  # tokens whose KV is there, while it is prefilling
        self.blocks = numbers()
        self.is_prefilling = flags()
        self.num_rounds = numbers()
        # Of the coordinator.
        self.link = numbers(-1)
        self.depth = numbers()
        self.expected = times(1.0)  # tokens of a round
        self.levels = numbers()  # of the proposal that was asked for
        self.awaited_since = times()
        self.is_late = flags()
        self.has_answered = flags()
        self.is_waited_for = flags()  # by the step that is next
        self.refusals = numbers()
        self.may_open_at = times(0.0)
        self.coming_at = times()  # a proposal, at the target
        self.coming_base, self.coming_length, self.coming_right = numbers(), numbers(), numbers()
        self.held_base, self.held_length, self.held_right = numbers(-1), numbers(), numbers()  # -1: none is
        # Of the draft worker.
        self.epoch = numbers()  # one more with every opening and closing
        self.told_at = times()  # what the next six say arrives
        self.told_length = numbers()
        self.told_depth = numbers()
        self.is_opening = flags()
        self.known = numbers()
        self.wanted = numbers()  # drafts, in a proposal
        self.window = numbers()
        self.drafted = numbers()
        self.right = numbers()
        self.owes = flags()
        self.is_open = flags()
        self.is_computed = flags()  # its prompt, by the drafter
        self.prompt_left = numbers()
        self.sent_at = times(0.0)
        self.turnaround = times()  # from a proposal to what was committed after it, on the average

    def admit(self, row: int, request: int, prompt_tokens: int, answer_tokens: int) -> None:
        """A new sequence is at `row`."""
        self.request[row], self.length[row] = request, prompt_tokens
        self.max_len[row] = prompt_tokens + answer_tokens
        self.num_rounds[row] = self.blocks[row] = 0
        self.link[row] = -1
        self.depth[row], self.expected[row] = 0, 1.0
        self.is_late[row] = self.has_answered[row] = False
        self.refusals[row], self.may_open_at[row] = 0, 0.0
        self.handles[row] = SpeculativeSequence(
            Tokens(self, row), prompt_tokens, _PARAMS, _NOISE_KEY, None, prompt_tokens + answer_tokens
        )
        self.forget(row)

    def forget(self, row: int) -> None:
        """Nobody drafts for `row` any more, if anybody did."""
        self.link[row] = -1
        self.awaited_since[row] = self.coming_at[row] = self.told_at[row] = NEVER
        self.is_late[row] = self.is_waited_for[row] = self.is_open[row] = self.owes[row] = False
        self.held_base[row] = -1
        self.epoch[row] += 1

    def handle(self, row: int) -> SpeculativeSequence:
        """What the code that looks at one sequence after another is given."""
        handle = self.handles[row]
        assert handle is not None
        return handle


class Tokens(Sequence[int]):
    """The committed tokens of a row: as many as there are, and all of them noughts. A draft that is right is nought."""

    def __init__(self, columns: Columns, row: int) -> None:
        self.row = row
        self._columns = columns

    def __len__(self) -> int:
        return int(self._columns.length[self.row])

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return [0] * len(range(*index.indices(len(self)))) if isinstance(index, slice) else 0


def row_of(sequence: SpeculativeSequence) -> int:
    """Of a sequence that `Columns` made."""
    tokens = sequence.token_ids
    assert isinstance(tokens, Tokens)
    return tokens.row
