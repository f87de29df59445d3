"""Checks drafts against limits of the time per output token, by classes of sequences with the same limit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cluster.speculation.answer_time import seconds_per_token_p99
from cluster.speculation.tuning import MAX_CLASSES

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class OrderedDrafts(NamedTuple):
    """The drafts of all sequences in the order in which the search adds them."""

    taken: npt.NDArray[np.bool_]  # whether each alternative includes the draft, [alternatives, drafts]
    sequence_of: IntArray  # [drafts], as are the others
    levels: IntArray  # 1: follows the last committed token
    worth: FloatArray  # probability that the draft is committed


class OutputLimits:
    """The limits of a step's sequences, as p99 of an answer's mean seconds per output token after its first.

    Sequences with the same limit are a class. If there are more than `MAX_CLASSES` limits, the laxer ones count as the
    strictest among themselves. Sequences without a limit are the last class, which is always kept.
    Requests set limits, so one that no drafts could keep must not cost the others theirs: it is dropped.
    """

    def __init__(
        self, free: Sequence[float], others: Iterable[tuple[float, float, float]], answer_tokens: float
    ) -> None:
        """`free`: limits of the sequences whose drafts are chosen; infinite: none.

        `others`: limit, E[X] and E[X^2] of the tokens X of a round of each sequence whose drafts are decided.
        `answer_tokens`: tokens of an answer after its first.
        """
        others = [other for other in others if other[0] < np.inf]
        distinct = sorted({limit for limit in free if limit < np.inf} | {limit for limit, _, _ in others})
        self._limits = np.array([*distinct[:MAX_CLASSES], np.inf])
        self._answer_tokens = answer_tokens
        self.class_of = self._place(free)  # of each sequence in `free`
        members = [(limit, 1.0, 1.0) for limit in free] + others
        places = self._place([limit for limit, _, _ in members])
        self._sizes, self._tokens, self._squares = (
            np.bincount(places, weights, len(self._limits))
            for weights in ([1.0] * len(members), [tokens for _, tokens, _ in members], [sq for *_, sq in members])
        )

    def _place(self, limits: Sequence[float]) -> IntArray:
        places = np.searchsorted(self._limits, limits, side="right") - 1
        return np.where(np.isinf(limits), len(self._limits) - 1, places).astype(np.int64)

    @property
    def turns(self) -> list[int | None]:
        """The classes whose drafts the search adds before all others, one after the other; None: in order of worth."""
        return [None, *(place for place in np.unique(self.class_of)[:-1] if np.isfinite(self._limits[place]))]

    def drop_hopeless(self, worth: FloatArray, levels: IntArray, seconds: float) -> None:
        """Drops limits that would be missed even if steps with all drafts took `seconds`, as those without.

        `worth`: of all drafts at `levels` of each free sequence, [sequences, drafts].
        """
        self._limits[:-1] = np.where(self._longest_steps(worth, levels) < seconds, np.inf, self._limits[:-1])

    def caps(self, depths: Sequence[int], first: int | None) -> IntArray:
        """Returns alternatives of maximum depths by class, [alternatives, classes]: one of `depths` for all classes.

        With the class `first`: every pair of its own maximum and that of all others, of 0 and every second depth.
        """
        if first is None:
            return np.repeat(np.array(depths)[:, None], len(self._limits), axis=1)
        pairs = np.array([(own, rest) for own in (0, *depths[::-2]) for rest in (0, *depths[::-2])])
        caps = np.repeat(pairs[:, 1:], len(self._limits), axis=1)
        caps[:, first] = pairs[:, 0]
        return caps

    @property
    def are_set(self) -> bool:
        return len(self._limits) > 1

    def excess(self, seconds: FloatArray, variance: FloatArray, drafts: OrderedDrafts | None = None) -> FloatArray:
        """Returns the largest ratio of predicted p99 to limit over the classes, at least 1.

        `seconds`, `variance`: moments of the duration of a step with the drafts up to each one, [alternatives, drafts].
        """
        worst = np.ones(np.shape(seconds))
        for place, limit in enumerate(self._limits[:-1]):
            tokens, squares = self._tokens[place], self._squares[place]
            if drafts is not None:
                own = np.where(drafts.taken & (self.class_of[drafts.sequence_of] == place), drafts.worth, 0.0)
                # P(X > j) is the worth of the drafts at level j, so E[X^2] is the sum of (2j + 1) P(X > j).
                tokens = tokens + np.cumsum(own, axis=1)
                squares = squares + np.cumsum((2 * drafts.levels + 1) * own, axis=1)
            size = self._sizes[place]
            p99 = seconds_per_token_p99(tokens / size, squares / size, self._answer_tokens, seconds, variance)
            worst = np.maximum(worst, p99 / limit)
        return worst

    def longest_step(self, gained: FloatArray, levels: IntArray) -> float:
        """Returns the longest step that keeps all limits if all steps take as long; infinite without limits.

        `gained`: expected tokens of the drafts at `levels` of each free sequence, [sequences, drafts].
        """
        return float(np.min(self._longest_steps(gained, levels), initial=np.inf))

    def _longest_steps(self, gained: FloatArray, levels: IntArray) -> FloatArray:
        """Returns the longest step for each limit, [classes but the last]."""
        places, num_places = self.class_of, len(self._limits)
        tokens = self._tokens + np.bincount(places, gained.sum(axis=1), num_places)
        squares = self._squares + np.bincount(places, ((2 * levels + 1) * gained).sum(axis=1), num_places)
        p99 = seconds_per_token_p99(  # of steps of a second; the last class has no limit and may be empty
            (tokens[:-1] / self._sizes[:-1]), (squares[:-1] / self._sizes[:-1]), self._answer_tokens, 1.0, 0.0
        )
        return np.asarray(self._limits[:-1] / p99)
