"""Log-probabilities of a step's requests, requested during the commit and computed together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cluster.logprobs import TokenLogprobs
from cluster.targets.token_generator import Scheduled


class Scoring:
    """Collects requests for a step's log-probabilities. `finish` fills in the results of `add` and `add_prompt`."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._token_ids: list[int] = []
        self._owed: list[tuple[int, TokenLogprobs]] = []  # with the position of their first row

    def add(self, rows: Sequence[int], token_ids: Sequence[int], width: int | None) -> TokenLogprobs | None:
        """Requests log-probabilities of `token_ids` in `rows` and of the `width` likeliest tokens.

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
        """Requests those of the prompt tokens that `scheduled` scores, each once. Its logits begin at `first_row`.

        Returns None if it scores none.
        """
        sequence, num_scored = scheduled.sequence, scheduled.num_scored
        if not num_scored:
            return None
        # After a preemption the step may recompute tokens that were already reported.
        assert sequence.first_unscored is not None
        start = max(sequence.first_unscored, sequence.num_computed_tokens + 1)
        sequence.first_unscored = end = start + num_scored
        rows = range(first_row, first_row + num_scored)
        return self.add(rows, sequence.token_ids[start:end], sequence.request.num_prompt_logprobs)

    def finish(self, score: Callable[[Sequence[int], Sequence[int], int], TokenLogprobs]) -> None:
        """Computes all requested log-probabilities with one call of `score`.

        Its arguments are the rows, their tokens, and a number of likeliest tokens.
        """
        if not self._owed:
            return
        scores = score(self._rows, self._token_ids, max(owed.width for _, owed in self._owed))
        ends = [start for start, _ in self._owed[1:]] + [len(self._rows)]
        for (start, owed), end in zip(self._owed, ends, strict=True):
            owed.extend(scores.part(start, end, owed.width))
