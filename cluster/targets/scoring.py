"""Log-probabilities of a step: the commit of each sequence requests them, and one call computes all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cluster.logprobs import TokenLogprobs
from cluster.targets.token_generator import Scheduled


class Scoring:
    """Collects requests for log-probabilities. `add` and `add_prompt` return results that `finish` fills in."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._token_ids: list[int] = []
        self._owed: list[tuple[int, TokenLogprobs]] = []  # results to fill in, each with the index of its first row

    def add(self, rows: Sequence[int], token_ids: Sequence[int], width: int | None) -> TokenLogprobs | None:
        """Requests log-probabilities of `token_ids`, one for each of `rows`, and of the `width` likeliest tokens.

        Returns None if `width` is None.
        """
        if width is None:
            return None
        owed = TokenLogprobs(width)
        self._owed.append((len(self._rows), owed))
        self._rows += rows
        self._token_ids += token_ids
        return owed

    def add_prompt(self, scheduled: Scheduled, first_row: int) -> TokenLogprobs | None:
        """Requests log-probabilities of the prompt tokens that `scheduled` scores. Requests no token twice.

        `first_row`: first row of the logits of `scheduled`. Returns None if `scheduled` scores no tokens.
        """
        sequence, num_scored = scheduled.sequence, scheduled.num_scored
        if not num_scored:
            return None
        # After a preemption the step may recompute tokens that were already reported.
        assert sequence.first_unscored is not None
        start = max(sequence.first_unscored, scheduled.start + 1)
        sequence.first_unscored = end = start + num_scored
        rows = range(first_row, first_row + num_scored)
        return self.add(rows, sequence.token_ids[start:end], sequence.request.num_prompt_logprobs)

    def finish(self, score: Callable[[Sequence[int], Sequence[int], int], TokenLogprobs]) -> None:
        """Computes all requested log-probabilities with one call of `score`.

        The arguments of `score` are rows, their tokens, and the number of likeliest tokens.
        """
        if not self._owed:
            return
        scores = score(self._rows, self._token_ids, max(owed.width for _, owed in self._owed))
        ends = [start for start, _ in self._owed[1:]] + [len(self._rows)]
        for (start, owed), end in zip(self._owed, ends, strict=True):
            owed.extend(scores.part(start, end, owed.width))
