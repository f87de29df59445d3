"""Finds how many tokens at the end of a prompt the draft should read, from outcomes and step times.

For each range of prompt lengths (a power of 2 to the next) the choices are `context_choices`: few tokens, four times as
many, and so on, and all. A sequence's choice is the one with the highest

    E / (T / n + prompt seconds / rounds + tokens read * seconds per token and step * steps per round)

E is the expected number of tokens per round with the acceptance of the choice, T the time of a round, n the number of
sequences of the worker. So a read token must be worth the time that it takes from other sequences.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from cluster.drafters.read_tokens import NUM_SINKS, context_choices
from cluster.speculation.speed import expected_tokens
from cluster.telemetry.metrics import Reading

_FIRST_SEQUENCES = 4  # sequences of a range of lengths that get each choice before the choices are compared
_TRIAL_PERIOD = 16  # one sequence in this many gets another choice than the best
_PRIOR_TESTS = 256.0  # weight of the assumption that all choices have the same acceptance, in tests
_PRIOR_ROUNDS = 64.0  # rounds per sequence before one has ended
_KEEP_TESTS = 1.0 - 1 / 4096  # decay of tests and accepted drafts, per test of their choice
_KEEP_SEQUENCES = 1.0 - 1 / 128  # decay of rounds, drafts and steps, per ended sequence
_KEEP_STEPS = 1.0 - 1 / 2048  # decay of the moments of the fit, per step
_RIDGE = 1e-4  # makes the fit choose small slopes if the steps do not tell rows from tokens


@dataclass(eq=False, slots=True)
class ContextUse:
    """The choice of a sequence, and what followed from it."""

    num_bits: int  # range of the prompt's length
    context_tokens: int | None
    is_chosen: bool = True  # whether the drafter reads one of the choices
    num_rounds: int = 0  # rounds with drafts
    num_drafts: int = 0  # drafts that these rounds asked for
    num_steps: int = 0  # steps of the drafter with the sequence

    def was_admitted(self, num_tokens: int, num_skipped: int) -> None:
        """Records what the drafter reads: all tokens if these were cached, or fewer than chosen without room."""
        if num_skipped <= 0:
            self.context_tokens = None
        elif self.context_tokens is None or num_tokens - num_skipped < self.context_tokens:
            self.is_chosen = False


class ContextTuning:
    """Chooses `DraftSequence.context_tokens`. Belongs to the draft worker's thread, except for `readings`."""

    def __init__(self, max_model_len: int, prompt_seconds: Callable[[int], float]) -> None:
        """`prompt_seconds`: the drafter's estimate of the time to compute a prompt of this many tokens."""
        self._max_model_len = max_model_len
        self._prompt_seconds = prompt_seconds
        self._ranges: dict[int, _Range] = defaultdict(_Range)
        self._read_cost = _ReadCost()

    def readings(self) -> Iterator[Reading]:
        """Any thread."""
        what = "Tokens at the end of a prompt that the draft reads, by the largest prompt; 0: all tokens."
        for num_bits, known in sorted(self._ranges.copy().items()):
            labels = {"prompt_tokens": str(2**num_bits - 1)}
            yield Reading("outrider_draft_context_tokens", what, known.best or 0, labels=labels)

    def choose(self, num_tokens: int, round_seconds: float) -> ContextUse:
        """Returns the choice for a sequence of `num_tokens` tokens.

        `round_seconds`: time of a round over the number of the worker's sequences; 0 if unknown.
        """
        num_bits = num_tokens.bit_length()
        choices = [n for n in context_choices(num_tokens) if n is None or NUM_SINKS + n < self._max_model_len]
        if num_tokens >= self._max_model_len and len(choices) > 1:
            choices.remove(None)
        known = self._ranges[num_bits]
        known.best = max(choices, key=lambda choice: self._value(known, choice, num_tokens, round_seconds))
        least = min(choices, key=known.num_chosen)
        known.num_choices += 1
        is_trial = known.num_chosen(least) < _FIRST_SEQUENCES or known.num_choices % _TRIAL_PERIOD == 0
        choice = least if is_trial else known.best
        known.of[choice].num_chosen += 1
        return ContextUse(num_bits, choice)

    def observe_outcome(self, use: ContextUse | None, num_drafts: int, num_tests: int, num_accepted: int) -> None:
        """Learns from a round that asked for `num_drafts` drafts: of `num_tests`, the target chose `num_accepted`."""
        assert use is not None
        use.num_rounds += 1
        use.num_drafts += num_drafts
        if use.is_chosen:
            self._ranges[use.num_bits].of[use.context_tokens].observe(num_tests, num_accepted)

    def observe_end(self, use: ContextUse | None) -> None:
        assert use is not None
        self._ranges[use.num_bits].observe_end(use)

    def observe_step(self, num_rows: int, num_tokens_read: int, seconds: float) -> None:
        """Learns from a step without prompts, whose sequences have read `num_tokens_read` tokens."""
        self._read_cost.observe(num_rows, num_tokens_read, seconds)

    def _value(self, known: _Range, choice: int | None, num_tokens: int, round_seconds: float) -> float:
        num_read = num_tokens if choice is None else NUM_SINKS + choice
        rounds = max(1.0, known.num_rounds / known.num_sequences)
        seconds = round_seconds + self._prompt_seconds(num_read) / rounds
        if known.num_steps:
            seconds += num_read * self._read_cost.seconds_per_token * known.num_steps / known.num_rounds
        return expected_tokens(known.acceptance(choice), known.num_drafts / known.num_rounds) / max(seconds, 1e-9)


@dataclass(slots=True)
class _Choice:
    """Outcomes of the sequences with one choice."""

    num_chosen: int = 0
    num_tests: float = 0.0
    num_accepted: float = 0.0

    def observe(self, num_tests: int, num_accepted: int) -> None:
        keep = _KEEP_TESTS**num_tests
        self.num_tests = keep * self.num_tests + num_tests
        self.num_accepted = keep * self.num_accepted + num_accepted


@dataclass(slots=True)
class _Range:
    """Sequences whose prompts have about the same length."""

    of: defaultdict[int | None, _Choice] = field(default_factory=lambda: defaultdict(_Choice))
    best: int | None = None
    num_choices: int = 0
    num_sequences: float = 1.0  # ended sequences
    num_rounds: float = _PRIOR_ROUNDS  # of these, as are the next two
    num_drafts: float = _PRIOR_ROUNDS
    num_steps: float = 0.0

    def num_chosen(self, choice: int | None) -> int:
        return self.of[choice].num_chosen

    def acceptance(self, choice: int | None) -> float:
        """Returns the acceptance of `choice`; that of all choices while it is hardly known."""
        tests = sum([each.num_tests for each in self.of.values()])
        accepted = sum([each.num_accepted for each in self.of.values()])
        shared = (accepted + 1.0) / (tests + 2.0)
        own = self.of[choice]
        return (own.num_accepted + _PRIOR_TESTS * shared) / (own.num_tests + _PRIOR_TESTS)

    def observe_end(self, use: ContextUse) -> None:
        if not use.num_rounds:
            return
        self.num_sequences = _KEEP_SEQUENCES * self.num_sequences + 1.0
        self.num_rounds = _KEEP_SEQUENCES * self.num_rounds + use.num_rounds
        self.num_drafts = _KEEP_SEQUENCES * self.num_drafts + use.num_drafts
        self.num_steps = _KEEP_SEQUENCES * self.num_steps + use.num_steps


class _ReadCost:
    """Seconds that a token read adds to a step: a fit of the times of steps to their rows and their tokens read."""

    def __init__(self) -> None:
        self._moments, self._products = np.zeros((3, 3)), np.zeros(3)

    def observe(self, num_rows: int, num_tokens_read: int, seconds: float) -> None:
        # Errors count relative to the time of the step.
        inputs = np.array((1.0, num_rows, num_tokens_read)) / max(seconds, 1e-6)
        self._moments = _KEEP_STEPS * self._moments + np.outer(inputs, inputs)
        self._products = _KEEP_STEPS * self._products + inputs

    @property
    def seconds_per_token(self) -> float:
        if not self._products.all():
            return 0.0
        scale = 1.0 / np.sqrt(np.diag(self._moments))
        scaled = self._moments * np.outer(scale, scale) + _RIDGE * np.eye(3)
        return max(0.0, float((scale * np.linalg.solve(scaled, scale * self._products))[2]))
