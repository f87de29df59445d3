"""Measures how well requests find the target that has their context: `python -m bench.affinity`.

Four simulated targets in virtual time, with real step loops and prefix caches, behind one router or two. Conversations
arrive at random (Poisson). All share a system prompt of 500 tokens; a first message has 1,000 tokens (lognormal), each
further one 120 to 160, an answer 80 to 120. The next turn comes after a time to think. The KV caches of all targets
together hold half, once or twice the conversations' contexts. Load is relative to the turns per second that the least
loaded target gets done when conversations wait for nothing.

Arms: round robin; the least loaded target; a hash of the conversation alone; an approximate prefix scorer, as llm-d's
(prefix 3, queue 2, KV 2, of a memory of what was sent); and the router's own choice. Figures are of turns after the
first, where there are any. *Hits*: tokens found in the prefix cache over those that an endless cache would have.
*Most*: requests of the target that got most, over the mean.
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from bench.in_process import SIMULATED
from bench.result import write_cells
from cluster.config.file import load_config
from cluster.engine.memory_plan import PlannedModel
from cluster.placement.rendezvous import rendezvous_rank
from cluster.planning.hardware import parse_gpus
from cluster.planning.steps import Roofline, curve_points
from cluster.simulator.cluster import Choose, InFlight, MeasuredSpan, SimulatedCluster
from cluster.simulator.drafts import VOCAB_SIZE
from cluster.simulator.traffic import Arrival, EndedRequest
from services.router.targets.affinity import CHOICES, RoutingKey
from services.router.targets.prefixes import CHUNK_TOKENS, CachedPrefixes

MODEL, GPUS = "8B", "L40S"
NUM_TARGETS = 4
BLOCK_TOKENS = 16
_ROWS = (1, 8, 16, 32, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096)
_POLL_SECONDS = 0.5  # between a router's looks at the other router's sequences
_LOAD = 0.7  # of `capacity`
_BLOCKS = 8000  # of each target, while the capacity is measured: a working set of about 1
_TURN_SECONDS = 3.0  # about what an answer takes
_OVERLOAD, _OVERLOAD_SECONDS = 20.0, 40.0  # conversations per second that no case gets done, and for how long
ARMS = ("round robin", "least loaded", "hash alone", "prefix scorer", "router")
MAX_SEQUENCES = 256  # of a target's step


@dataclass(frozen=True, slots=True)
class Workload:
    """Shape of the conversations, in tokens and seconds."""

    system_tokens: int = 500
    first_tokens: float = 1000.0  # median of a lognormal distribution
    first_spread: float = 0.5  # its sigma
    next_tokens: tuple[int, int] = (120, 160)
    answer_tokens: tuple[int, int] = (80, 120)
    turns: tuple[int, int] = (4, 8)
    think_seconds: float = 10.0  # mean, exponential

    @property
    def num_turns(self) -> float:
        """Mean number of turns."""
        return sum(self.turns) / 2

    @property
    def mean_context(self) -> float:
        """Mean tokens of a conversation's context, over its turns."""
        turn = sum(self.next_tokens) / 2 + sum(self.answer_tokens) / 2
        return self.system_tokens + self.first_tokens + turn * self.num_turns / 2


WORKLOADS = {
    "conversations": Workload(),
    "nothing shared": Workload(system_tokens=0, turns=(1, 1)),
    "one hot prefix": Workload(system_tokens=6000, first_tokens=200.0, turns=(1, 1)),
}


@dataclass(frozen=True, slots=True)
class Case:
    workload: str
    arm: str
    conversations_per_second: float
    blocks: int  # of each target
    routers: int = 1
    seconds: float = 150.0
    seed: int = 0


@dataclass(slots=True)
class Conversation:
    number: int
    num_turns: int


@dataclass(frozen=True, slots=True)
class Turn(Arrival):
    conversation: Conversation = field(kw_only=True)
    number: int = field(kw_only=True)
    num_earlier_tokens: int = field(kw_only=True)  # tokens of the turn before, with its answer


class Conversations:
    """Traffic of conversations that begin at random and go on with the answers that they get."""

    def __init__(
        self, workload: Workload, rate: float, until: float, seed: int, ended: Callable[[EndedRequest], None]
    ) -> None:
        """`ended` is called with each answer."""
        self.answers: list[EndedRequest] = []
        self._ended = ended
        self._workload, self._rate, self._until = workload, rate, until
        self._rng = random.Random(seed)
        self._system = self._tokens(random.Random(99), workload.system_tokens)

    def arrivals(self) -> Iterator[Turn]:
        now, number, mix = 0.0, 0, self._workload
        while (now := now + self._rng.expovariate(self._rate)) < self._until:
            rng = random.Random(self._rng.getrandbits(32))
            first = max(1, round(rng.lognormvariate(float(np.log(mix.first_tokens)), mix.first_spread)))
            context = [*self._system, *self._tokens(rng, first)]
            yield self._turn(Conversation(number, rng.randint(*mix.turns)), 0, now, context, 0)
            number += 1

    def after(self, answer: EndedRequest) -> Turn | None:
        self.answers.append(answer)
        self._ended(answer)
        turn = answer.arrival
        assert isinstance(turn, Turn)
        talk, number = turn.conversation, turn.number + 1
        if number >= talk.num_turns:
            return None
        rng = random.Random(f"{talk.number} {number}")
        pause = rng.expovariate(1.0 / self._workload.think_seconds)
        before = [*turn.token_ids, *answer.token_ids]
        message = self._tokens(rng, rng.randint(*self._workload.next_tokens))
        return self._turn(talk, number, answer.ended_at + pause, [*before, *message], len(before))

    def _turn(self, talk: Conversation, number: int, at: float, context: list[int], num_earlier: int) -> Turn:
        num_tokens = random.Random(f"{talk.number} {number} answer").randint(*self._workload.answer_tokens)
        return Turn(
            at, len(context), num_tokens, context, conversation=talk, number=number, num_earlier_tokens=num_earlier
        )

    @staticmethod
    def _tokens(rng: random.Random, number: int) -> list[int]:
        return rng.choices(range(VOCAB_SIZE), k=number)


@dataclass(slots=True)
class View:
    """A target as one router sees it."""

    address: str
    prefixes: CachedPrefixes
    num_own: int = 0
    num_others: int = 0  # at the last poll
    queued_tokens: int = 0
    computing: dict[int, Sequence[int]] = field(default_factory=dict)  # chunks of own turns without a token, by `id`

    @property
    def load(self) -> int:
        return self.num_own + self.num_others


class Router:
    """One router's views of the targets, and its way to choose."""

    def __init__(self, arm: str, blocks: int, mean_context: float) -> None:
        chunks = blocks * BLOCK_TOKENS // CHUNK_TOKENS
        self._kv_share = mean_context / (blocks * BLOCK_TOKENS)  # of a sequence
        self.views = [View(f"10.0.0.{index}:7000", CachedPrefixes(chunks)) for index in range(NUM_TARGETS)]
        self._arm = arm
        self._num_chosen = 0
        self._uncached: dict[int, int] = {}  # tokens to compute of each turn in flight, by its `id`
        self._rng = random.Random(5)

    def choose(self, turn: Turn, in_flight: Sequence[InFlight]) -> int:
        """Returns the index of the target that gets `turn`, and counts it there."""
        self._num_chosen += 1
        views, uncached = self.views, self._uncached
        for view, requests in zip(views, in_flight, strict=True):
            waiting = {id(other) for other in requests.without_token.values()}
            view.queued_tokens = sum(uncached.get(number, 0) for number in waiting)
            for number in view.computing.keys() - waiting:
                view.prefixes.add(view.computing.pop(number))
        name = str(turn.conversation.number)
        key = RoutingKey.of(turn.token_ids, opening="", name=name, root="")
        index = self._index_for(key)
        view = views[index]
        view.num_own += 1
        uncached[id(turn)] = key.num_uncached(view)
        view.computing[id(turn)] = key.hashes
        return index

    def _index_for(self, key: RoutingKey) -> int:
        views = self.views
        match self._arm:
            case "round robin":
                return self._num_chosen % len(views)
            case "least loaded":
                least = min(view.load for view in views)
                return self._rng.choice([index for index, view in enumerate(views) if view.load == least])
            case "hash alone":
                return max(range(len(views)), key=lambda index: rendezvous_rank(key.conversation, views[index].address))
            case "prefix scorer":
                return self._by_score(key)
            case "router":
                chosen = CHOICES["affinity"](key, views)
                assert chosen is not None
                return views.index(chosen)
        raise ValueError(f"no arm is called {self._arm!r}")

    def _by_score(self, key: RoutingKey) -> int:
        """Returns the best by 3 x matched share + 2 x (1 - waiting, scaled) + 2 x (1 - KV in use)."""
        waiting = [max(view.load - MAX_SEQUENCES, 0) for view in self.views]
        spread = max(waiting) - min(waiting)
        scores = []
        for view, number in zip(self.views, waiting, strict=True):
            matched = view.prefixes.num_tokens(key.hashes) / max(key.num_tokens, 1)
            queue = 1.0 if not spread else (max(waiting) - number) / spread
            scores.append(3 * matched + 2 * queue + 2 * (1.0 - min(view.load * self._kv_share, 1.0)))
        best = max(scores)
        return self._rng.choice([index for index, score in enumerate(scores) if score == best])

    def ended(self, turn: Arrival, index: int) -> None:
        view = self.views[index]
        view.num_own -= 1
        del self._uncached[id(turn)]
        if id(turn) in view.computing:
            view.prefixes.add(view.computing.pop(id(turn)))


class Routers:
    """Routers that get requests in turn, and poll the targets twice a second."""

    def __init__(self, case: Case) -> None:
        self._routers = [
            Router(case.arm, case.blocks, WORKLOADS[case.workload].mean_context) for _ in range(case.routers)
        ]
        self._sent: dict[int, tuple[Router, int]] = {}
        self._polled_at = 0.0
        self._rng = random.Random(case.seed)

    def choose(self, arrival: Arrival, in_flight: Sequence[InFlight]) -> int:
        assert isinstance(arrival, Turn)
        if arrival.seconds >= self._polled_at + _POLL_SECONDS:
            self._polled_at = arrival.seconds
            for router in self._routers:
                for view, requests in zip(router.views, in_flight, strict=True):
                    view.num_others = requests.number - view.num_own
        router = self._rng.choice(self._routers)
        index = router.choose(arrival, in_flight)
        self._sent[id(arrival)] = router, index
        return index

    def ended(self, answer: EndedRequest) -> None:
        router, index = self._sent.pop(id(answer.arrival))
        router.ended(answer.arrival, index)


@dataclass(frozen=True, slots=True)
class Cell:
    """Figures of one case. Times are of turns after the first, of all turns if there are no others, in seconds."""

    case: Case
    scenario: Scenario
    turns_per_second: float
    first_token_p50: float
    first_token_p99: float
    hits: float  # tokens found over those of an endless cache
    most_over_mean: float  # requests of the target that got most, over the mean
    refused: int


def _cluster(case: Case, traffic: Conversations, choose: Choose) -> SimulatedCluster:
    roofline = Roofline(PlannedModel.parse(MODEL), parse_gpus(GPUS))
    curve = [list(point) for point in curve_points(roofline, 16, WORKLOADS["conversations"].mean_context, _ROWS)]
    settings = {
        "simulation.target_step_ms": curve,
        "target.replicas": NUM_TARGETS,
        "target.max_num_seqs": MAX_SEQUENCES,
        "target.max_num_batched_tokens": 2048,
        "speculation.num_speculative_tokens": 0,
        "draft.replicas": 0,
        "router.max_waiting_requests": 4096,
    }
    config = load_config(None, [*SIMULATED, *(f"{key}={value}" for key, value in settings.items())])
    span = MeasuredSpan(case.seconds / 2, case.seconds, is_cut=True)
    return SimulatedCluster(config, traffic, case.blocks, span, choose=choose)


def run(case: Case) -> tuple[Conversations, SimulatedCluster]:
    routers, mix = Routers(case), WORKLOADS[case.workload]
    traffic = Conversations(mix, case.conversations_per_second, case.seconds, case.seed, routers.ended)
    cluster = _cluster(case, traffic, routers.choose)
    cluster.run()
    return traffic, cluster


@functools.cache
def capacity(workload: str, blocks: int) -> float:
    """Returns the turns per second that the least loaded targets get done when more conversations begin."""
    traffic, _ = run(Case(workload, "least loaded", _OVERLOAD, blocks, seconds=_OVERLOAD_SECONDS))
    return sum(answer.ended_at >= _OVERLOAD_SECONDS / 2 for answer in traffic.answers) / (_OVERLOAD_SECONDS / 2)


def measure(case: Case, scenario: Scenario) -> Cell:
    traffic, cluster = run(case)
    figures = cluster.figures()
    later = [answer for answer in traffic.answers if answer.arrival.seconds >= case.seconds / 2 and _number(answer)]
    counted = later or [answer for answer in traffic.answers if answer.arrival.seconds >= case.seconds / 2]
    waits = np.array([answer.first_token_at - answer.arrival.seconds for answer in counted])
    requests = np.bincount([answer.target for answer in counted], minlength=NUM_TARGETS)
    found = sum(answer.num_cached_tokens for answer in later)
    return Cell(
        case,
        scenario,
        turns_per_second=figures.requests_per_second,
        first_token_p50=float(np.percentile(waits, 50)),
        first_token_p99=float(np.percentile(waits, 99)),
        hits=found / max(sum(_earlier_tokens(answer) for answer in later), 1),
        most_over_mean=float(requests.max() / requests.mean()),
        refused=figures.num_refused,
    )


def _number(answer: EndedRequest) -> int:
    assert isinstance(answer.arrival, Turn)
    return answer.arrival.number


def _earlier_tokens(answer: EndedRequest) -> int:
    """Returns the tokens of whole blocks that the turn before left in an endless cache."""
    assert isinstance(answer.arrival, Turn)
    return (answer.arrival.num_earlier_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Scenario:
    """A load for all arms."""

    workload: str
    load: float
    working_set: float = 1.0
    routers: int = 1

    def case(self, arm: str, seconds: float, seed: int) -> Case:
        mix = WORKLOADS["conversations"]
        per_target = capacity("conversations", _BLOCKS) / NUM_TARGETS
        lasts = mix.num_turns * (mix.think_seconds + _TURN_SECONDS)
        contexts = _LOAD * per_target / mix.num_turns * lasts * mix.mean_context
        blocks = round(contexts / BLOCK_TOKENS / self.working_set)
        rate = self.load * capacity(self.workload, _BLOCKS) / WORKLOADS[self.workload].num_turns
        return Case(self.workload, arm, rate, blocks, self.routers, seconds, seed)


SCENARIOS = (
    *(Scenario("conversations", _LOAD, working_set) for working_set in (1.0, 0.5, 2.0)),
    *(Scenario("conversations", load) for load in (0.3, 0.9, 1.1)),
    Scenario("conversations", _LOAD, routers=2),
    Scenario("nothing shared", _LOAD),
    Scenario("one hot prefix", _LOAD),
)


def measure_all(scenario: Scenario, arm: str, seconds: float, repeats: int) -> list[Cell]:
    return [measure(scenario.case(arm, seconds, seed), scenario) for seed in range(repeats)]


def _row(cells: Sequence[Cell]) -> str:
    first, middle = cells[0], statistics.median
    scenario = first.scenario
    hits = f"{middle(cell.hits for cell in cells):.2f}" if first.hits else "–"
    return (
        f"| {scenario.workload} | {scenario.load:g} | {scenario.working_set:g} | {scenario.routers} | {first.case.arm} "
        f"| {middle(cell.turns_per_second for cell in cells):.1f} "
        f"| {1e3 * middle(cell.first_token_p50 for cell in cells):.0f} "
        f"| {1e3 * middle(cell.first_token_p99 for cell in cells):.0f} | {hits} "
        f"| {middle(cell.most_over_mean for cell in cells):.2f} | {sum(cell.refused for cell in cells)} |"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.affinity", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--arms", type=lambda text: text.split(","), default=[*ARMS])
    parser.add_argument("--seconds", type=float, default=100.0, help="of virtual time; the second half counts")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("bench/results/affinity.json"))
    arguments = parser.parse_args(argv)
    print("| workload | load | working set | routers | arm | turns/s | p50 ms | p99 ms | hits | most | refused |")
    print(f"|{' --- |' * 11}")
    made = [(scenario, arm) for scenario in SCENARIOS for arm in arguments.arms]
    cells: list[Cell] = []
    with ProcessPoolExecutor(arguments.parallel) as pool:
        scenarios, arms = zip(*made, strict=True)
        seconds, repeats = ([value] * len(made) for value in (arguments.seconds, arguments.repeats))
        for found in pool.map(measure_all, scenarios, arms, seconds, repeats):
            cells += found
            print(_row(found), flush=True)
    write_cells(arguments.out, "bench.affinity", argv, [asdict(cell) for cell in cells])
    return 0


if __name__ == "__main__":
    sys.exit(main())
