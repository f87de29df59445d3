"""Sends all systems the same requests, alternating, and compares their answers."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from cluster.errors import ConfigurationError, UnavailableError
from services.prove.client import RequestBurst, ask_all
from services.prove.limit import TimeLimit
from services.prove.systems import MODEL, STOCK, Experiment, System

Cell = tuple[int, str, int]
"""A repeat, a system and its number of streams."""


@dataclass(frozen=True, slots=True)
class Result:
    """Answers and counters of one system at one number of streams in one repeat."""

    repeat: int
    system: str
    num_streams: int
    burst: RequestBurst
    num_drafted: float | None = None  # draft tokens that were verified; None: the system has no drafts
    num_accepted: float | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.burst.tokens_per_second

    @property
    def num_rounds(self) -> float:
        """Number of rounds of all sequences, without the steps of prompts.

        Each round commits its accepted drafts and one more token.
        """
        tokens = sum(answer.num_tokens - 1 for answer in self.burst.answers)
        return tokens - (self.num_accepted or 0.0)

    @property
    def mean_k(self) -> float | None:
        """Mean draft tokens per round, including rounds without drafts; None if unknown."""
        if self.num_drafted is None or self.num_rounds <= 0:
            return None
        return self.num_drafted / self.num_rounds

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens committed per round, including rounds without drafts; None if unknown."""
        if self.num_accepted is None or self.num_rounds <= 0:
            return None
        return 1 + self.num_accepted / self.num_rounds


@dataclass(slots=True)
class Results:
    """All results so far."""

    experiment: Experiment
    systems: Sequence[str]
    results: list[Result] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)  # by system: why it was not, or no longer, measured

    def of(self, system: str, num_streams: int) -> list[Result]:
        return [one for one in self.results if (one.system, one.num_streams) == (system, num_streams)]

    @property
    def missing(self) -> list[Cell]:
        found = {(one.repeat, one.system, one.num_streams) for one in self.results}
        return [
            cell
            for repeat in range(self.experiment.repeats)
            for num_streams in self.experiment.streams
            for system in self.systems
            if (cell := (repeat, system, num_streams)) not in found
        ]

    def differences(self) -> dict[str, Differences]:
        """Compares the answers of each system, except `STOCK`, with the first answer to the same prompt.

        The answer to a prompt and its seed should depend neither on the placement nor on the number of streams.
        """
        expected: dict[int, tuple[int, ...]] = {}
        found: dict[str, Differences] = {}
        for one in self.results:
            if one.system == STOCK:
                continue
            own = found.setdefault(one.system, Differences())
            for index, answer in enumerate(one.burst.answers):
                own.add(expected.setdefault(index, answer.token_ids), answer.token_ids)
        return found


@dataclass(slots=True)
class Differences:
    """Answers and tokens of one system that are not the expected ones."""

    num_answers: int = 0
    num_tokens: int = 0
    num_different_answers: int = 0
    num_different_tokens: int = 0

    def add(self, expected: Sequence[int], own: Sequence[int]) -> None:
        self.num_answers += 1
        self.num_tokens += len(own)
        different = sum(a != b for a, b in zip(expected, own, strict=False)) + abs(len(expected) - len(own))
        self.num_different_tokens += different
        self.num_different_answers += different > 0


def measure(
    systems: Sequence[System],
    results: Results,
    limit: TimeLimit,
    *,
    together: bool,
    did_one: Callable[[], object] = lambda: None,
) -> None:
    """Measures each system at each number of streams in every repeat.

    Every second repeat has the reverse order. `together`: whether all systems run from beginning to end and answer in
    turn; otherwise each is started for its turn and stopped after it. A system that fails is left out from then on.
    Calls `did_one` after each measurement. Raises Stopped if `limit` is reached; `results` then has the results so far.
    All processes have ended afterwards.
    """
    try:
        if together:
            for system in systems:
                _start(system, results, limit)
        for repeat in range(results.experiment.repeats):
            for system, streams in _turns(systems, results.experiment.streams, repeat, together=together):
                if not together:
                    _start(system, results, limit)
                for num_streams in streams:
                    limit.check()
                    _try(system, results, partial(_run, system, results, repeat, num_streams))
                    did_one()
                if not together:
                    _stop(system, limit)
    finally:
        for system in systems:
            _stop(system, limit)


def _turns(
    systems: Sequence[System], streams: Sequence[int], repeat: int, *, together: bool
) -> Iterator[tuple[System, Sequence[int]]]:
    """Yields the systems in the order of a repeat, with their numbers of streams.

    Every second repeat has the reverse order, so that a drift of the machine's speed affects all systems alike.
    """
    order = systems if repeat % 2 == 0 else systems[::-1]
    if together:
        yield from ((system, (num_streams,)) for num_streams in streams for system in order)
    else:
        yield from ((system, streams) for system in order)


def _try(system: System, results: Results, act: Callable[[], object]) -> None:
    """Calls `act` unless `system` has failed before; records the reason if it fails now."""
    if system.name in results.problems:
        return
    try:
        act()
    except (ConfigurationError, UnavailableError) as error:
        results.problems[system.name] = str(error)


def _start(system: System, results: Results, limit: TimeLimit) -> None:
    with limit.shielded():
        _try(system, results, system.start)
    limit.check()
    _try(system, results, system.wait_ready)
    _try(system, results, partial(_warm, system, results.experiment))


def _stop(system: System, limit: TimeLimit) -> None:
    with limit.shielded():
        system.stop(limit.is_reached)


def _warm(system: System, experiment: Experiment) -> None:
    """Sends prompts that are not measured, at each number of streams.

    So kernels are compiled, and the controller has its first measurements.
    """
    for num_streams in experiment.streams:
        first = max(experiment.streams) * experiment.answers
        _ask(system, experiment, range(first, first + num_streams), num_streams)


def _run(system: System, results: Results, repeat: int, num_streams: int) -> None:
    experiment = results.experiment
    before = system.counters()
    burst = _ask(system, experiment, range(num_streams * experiment.answers), num_streams)
    after = system.counters()
    result = Result(repeat, system.name, num_streams, burst)
    if before is not None and after is not None:
        drafted, accepted = after.drafted - before.drafted, after.accepted - before.accepted
        result = replace(result, num_drafted=drafted, num_accepted=accepted)
    results.results.append(result)


def _ask(system: System, experiment: Experiment, indexes: Sequence[int], num_streams: int) -> RequestBurst:
    """Sends the prompts with these indexes; the index is also the seed of the request."""
    shared: Mapping[str, object] = {
        "model": MODEL,
        "temperature": experiment.temperature,
        "max_tokens": experiment.max_tokens,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    bodies = [
        # A new salt per request, so that no repeat finds earlier prompts in a prefix cache.
        {**shared, "prompt": list(_prompt(experiment, index)), "seed": index, "cache_salt": secrets.token_hex(8)}
        for index in indexes
    ]
    return ask_all(
        system.url, bodies, num_streams=num_streams, is_streamed=experiment.is_streamed, context=system.context
    )


def _prompt(experiment: Experiment, index: int) -> Sequence[int]:
    return experiment.prompts[index % len(experiment.prompts)]
