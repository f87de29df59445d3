"""Tests of a drafter in the target's process: tokens are the same in any thread, and after any failure."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from cluster.config.speculation import SpeculationConfig
from cluster.coordination.base import LinkState
from cluster.drafters.base import DraftSequence
from cluster.drafters.model import ModelDrafter
from cluster.drafters.read_tokens import ContextTokens
from cluster.engine.limits import StepLimits
from cluster.engine.runner import ModelRunner
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.targets.base import GenerationRequest
from cluster.targets.in_process import InProcessPool
from cluster.wire.messages import Advance, Open, SpeculateReply, SpeculateRequest
from tests.background_loop import BackgroundLoop
from tests.waiting import WAIT_S, wait_until

from .loopback import OTHER_SEED, TARGET_SEED, LoopbackTarget
from .requests import MIXED, acceptance, mixed_requests, new_request

SHARED, OWN = None, 1  # threads
NewRunner = Callable[..., ModelRunner]


class FragileDrafter(ModelDrafter):
    """Raises when it is told to."""

    num_threads = 0  # that it drafted with
    is_broken = False  # drafts nothing
    is_beyond_repair = False  # nor frees what it holds

    def draft(self, sequences: Sequence[DraftSequence]) -> list[DraftSequence]:
        if self.is_broken:
            raise RuntimeError("the drafter is broken")
        self.num_threads = torch.get_num_threads()
        return super().draft(sequences)

    def release(self, sequence: DraftSequence) -> None:
        if self.is_beyond_repair:
            raise RuntimeError("the drafter is beyond repair")
        super().release(sequence)


class Drafted:
    """A target with its drafter."""

    def __init__(
        self,
        loop: BackgroundLoop,
        target: ModelRunner,
        draft: ModelRunner,
        num_threads: int | None,
        context_tokens: ContextTokens = None,
        max_model_len: int = 256,
        **settings: object,
    ) -> None:
        if num_threads is SHARED:
            settings = {"max_run_ahead": 0} | settings
        limits = StepLimits(max_model_len, max_num_seqs=8, max_num_batched_tokens=64)
        self.drafter = FragileDrafter(draft, limits, context_tokens=context_tokens)
        self.pool = InProcessPool(
            self.drafter, "tiny", SpeculationConfig(**settings), num_threads, has_own_thread=num_threads is OWN
        )
        self.target = LoopbackTarget(loop, target, [], pool=self.pool, max_model_len=max_model_len, **settings)

    def assert_idle(self) -> None:
        self.target.assert_idle()
        wait_until(lambda: self.drafter.num_used_blocks == 0)


@pytest.fixture
def new_drafted(loop: BackgroundLoop, new_runner: NewRunner) -> Iterator[Callable[..., Drafted]]:
    """new_drafted(num_threads, draft_seed, **settings)."""
    made: list[Drafted] = []

    def start(num_threads: int | None, draft_seed: int = TARGET_SEED, **settings: object) -> Drafted:
        runners = [new_runner(8, 128, seed=seed) for seed in (TARGET_SEED, draft_seed)]
        made.append(Drafted(loop, *runners, num_threads, **settings))
        return made[-1]

    yield start
    for drafted in made:
        drafted.target.stop()


@pytest.fixture
def new_pool(new_runner: NewRunner) -> Callable[..., InProcessPool]:
    """A pool alone, which drafts in turn."""

    def make(**settings: object) -> InProcessPool:
        drafter = ModelDrafter(new_runner(8, 128, seed=TARGET_SEED), StepLimits(256, 8, 64))
        return InProcessPool(drafter, "tiny", SpeculationConfig(max_run_ahead=0, **settings))

    return make


def test_a_thread_of_its_own_computes_with_as_many_as_it_is_told(new_drafted: Callable[..., Drafted]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(OWN + 2)
    try:
        drafted = new_drafted(OWN)
        drafted.target.generate([new_request()])
        assert (drafted.drafter.num_threads, torch.get_num_threads()) == (OWN, OWN + 2)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("num_threads", [SHARED, OWN])
class TestSameTokens:
    @pytest.mark.parametrize("k", [1, 4, 8, None])
    def test_with_a_perfect_drafter(
        self,
        num_threads: int | None,
        k: int | None,
        new_drafted: Callable[..., Drafted],
        expected: dict[int, list[int]],
    ) -> None:
        drafted, requests = new_drafted(num_threads), mixed_requests(k)
        assert drafted.target.generate(requests) == list(expected.values())
        if k is not None:
            num_drafted, num_accepted = acceptance(drafted.target, requests)
            assert num_accepted >= 0.95 * num_drafted > 0
        drafted.assert_idle()

    def test_with_a_poor_drafter(
        self, num_threads: int | None, new_drafted: Callable[..., Drafted], expected: dict[int, list[int]]
    ) -> None:
        drafted, requests = new_drafted(num_threads, OTHER_SEED), mixed_requests(4)
        assert drafted.target.generate(requests) == list(expected.values())
        num_drafted, num_accepted = acceptance(drafted.target, requests)
        assert 0 <= num_accepted < num_drafted
        drafted.assert_idle()

    def test_with_trees(
        self, num_threads: int | None, new_drafted: Callable[..., Drafted], expected: dict[int, list[int]]
    ) -> None:
        drafted = new_drafted(num_threads, OTHER_SEED, tree_width=3)
        assert drafted.target.generate(mixed_requests(8)) == list(expected.values())
        drafted.assert_idle()

    @pytest.mark.parametrize("tree_width", [1, 3])
    def test_with_a_drafter_that_reads_few_tokens(
        self,
        num_threads: int | None,
        tree_width: int,
        new_drafted: Callable[..., Drafted],
        expected: dict[int, list[int]],
    ) -> None:
        drafted, requests = new_drafted(num_threads, context_tokens=32, tree_width=tree_width), mixed_requests(4)
        assert drafted.target.generate(requests) == list(expected.values())
        num_drafted, num_accepted = acceptance(drafted.target, requests)
        assert 0 < num_accepted < num_drafted
        drafted.assert_idle()

    def test_with_a_drafter_that_finds_how_much_to_read(
        self, num_threads: int | None, new_drafted: Callable[..., Drafted]
    ) -> None:
        """Some prompts are read whole, although all are longer than 256 tokens."""

        def requests(k: int) -> list[GenerationRequest]:
            return [new_request(MIXED[seed][0], 257 + seed, 24, seed=seed, k=k) for seed in range(len(MIXED))]

        drafted = new_drafted(num_threads, context_tokens="auto", max_model_len=320)
        plain = drafted.target.generate(requests(0))
        with_drafts = requests(4)
        assert drafted.target.generate(with_drafts) == plain
        num_drafted, num_accepted = acceptance(drafted.target, with_drafts)
        assert 0 < num_accepted <= num_drafted
        drafted.assert_idle()

    def test_when_every_proposal_is_late(
        self, num_threads: int | None, new_drafted: Callable[..., Drafted], expected: dict[int, list[int]]
    ) -> None:
        drafted = new_drafted(num_threads, draft_timeout_ms=1e-3)
        assert drafted.target.generate(mixed_requests(4)) == list(expected.values())
        drafted.assert_idle()

    def test_when_the_drafter_fails(
        self, num_threads: int | None, new_drafted: Callable[..., Drafted], caplog: pytest.LogCaptureFixture
    ) -> None:
        """In the middle of an answer, which goes on plainly, and later with drafts."""
        request = new_request(SamplingParams(), num_prompt=9, max_tokens=240, seed=3)
        (expected,) = new_drafted(num_threads).target.generate([request])
        drafted = new_drafted(num_threads)
        again = new_request(SamplingParams(), num_prompt=9, max_tokens=240, seed=3)
        drafted.target.target.submit(again)
        wait_until(lambda: acceptance(drafted.target, [again])[1] > 0)
        drafted.drafter.is_broken = True
        wait_until(lambda: drafted.pool.num_links_up == 0 or drafted.target.is_finished(again))
        drafted.drafter.is_broken = False
        wait_until(lambda: drafted.target.is_finished(again))
        assert drafted.target.token_ids(again) == expected
        assert "the drafter is broken" in caplog.text

        def drafts() -> bool:
            """Returns whether a new request gets accepted drafts. They come back after a pause."""
            request = new_request(SamplingParams(), num_prompt=9, max_tokens=40, seed=3)
            assert drafted.target.generate([request]) == [expected[:40]]
            return acceptance(drafted.target, [request])[1] > 0

        wait_until(drafts)
        drafted.assert_idle()

    def test_when_the_drafter_is_beyond_repair(
        self, num_threads: int | None, new_drafted: Callable[..., Drafted], expected: dict[int, list[int]]
    ) -> None:
        drafted = new_drafted(num_threads)
        drafted.drafter.is_broken = drafted.drafter.is_beyond_repair = True
        assert drafted.target.generate(mixed_requests(4)) == list(expected.values())
        assert drafted.target.readings()["outrider_draft_links_up"] == 0
        assert drafted.target.generate([new_request(max_tokens=5)])


class TestInTurn:
    def opened(self, pool: InProcessPool, k: int = 4, window: int = 0) -> None:
        """Takes the link's UP, and asks it for the first proposal of a sequence."""
        (happened,) = pool.poll()
        assert happened.event is LinkState.UP
        opening = Open(1, [5, 6, 7], 3, SamplingParams(temperature=0.0), NoiseKey(1, 2), k, window)
        happened.link.send(SpeculateRequest(opens={1: opening}))

    def test_a_poll_drafts_what_is_waited_for_and_no_more(self, new_pool: Callable[..., InProcessPool]) -> None:
        pool = new_pool()
        self.opened(pool)
        assert pool.poll() == []  # nobody waits
        (happened,) = pool.poll(timeout=WAIT_S)
        assert isinstance(happened.event, SpeculateReply)
        assert len(happened.event.proposals[1].token_ids) == 4
        values = {reading.name: reading.value for reading in pool.readings() if not reading.labels}
        assert values["outrider_draft_steps"] == 4
        assert pool.drafting_seconds > 0.0

    def test_it_has_no_thread(self, new_pool: Callable[..., InProcessPool]) -> None:
        pool = new_pool()
        self.opened(pool)
        assert "draft-worker" not in {thread.name for thread in threading.enumerate()}

    def test_a_turn_is_all_of_what_is_owed(self, new_pool: Callable[..., InProcessPool]) -> None:
        """A turn drafts all proposals that are owed.

        With one drafting step a turn, a proposal that no step waits for would never be complete, as each turn comes one
        token later.
        """
        pool = new_pool()
        pool.lend_turn()
        self.opened(pool, k=4)
        pool.lend_turn()
        (happened,) = pool.poll()
        assert isinstance(happened.event, SpeculateReply)
        assert len(happened.event.proposals[1].token_ids) == 4
        pool.lend_turn()
        assert pool.poll() == []

    def test_whoever_waits_for_nothing_waits_no_longer_than_allowed(
        self, new_pool: Callable[..., InProcessPool]
    ) -> None:
        pool = new_pool()
        pool.poll()
        started_at = time.perf_counter()
        assert pool.poll(timeout=0.02) == []
        assert time.perf_counter() - started_at >= 0.02

    def test_what_is_closed_is_freed_at_once(self, new_pool: Callable[..., InProcessPool]) -> None:
        pool = new_pool()
        self.opened(pool)
        (happened,) = pool.poll(timeout=WAIT_S)

        def num_used_blocks() -> float:
            return next(r.value for r in pool.readings() if r.name == "outrider_draft_kv_blocks_used")

        assert num_used_blocks() > 0
        happened.link.send(SpeculateRequest(advances={1: Advance(1, 3, [8], 4)}, closes={1}))
        assert num_used_blocks() == 0


def test_in_turn_it_computes_with_as_many_threads_as_it_is_told(new_runner: NewRunner) -> None:
    computed_with: list[int] = []

    class Drafter(ModelDrafter):
        def draft(self, sequences: Sequence[DraftSequence]) -> list[DraftSequence]:
            computed_with.append(torch.get_num_threads())
            return super().draft(sequences)

    before = torch.get_num_threads()
    drafter = Drafter(new_runner(8, 128, seed=TARGET_SEED), StepLimits(256, 8, 64))
    pool = InProcessPool(drafter, "tiny", SpeculationConfig(max_run_ahead=0), num_threads=before + 1)
    TestInTurn().opened(pool)
    pool.poll(timeout=WAIT_S)
    assert computed_with == [before + 1] * 4
    assert torch.get_num_threads() == before


def test_a_thread_of_its_own_leaves_the_others_theirs(new_runner: NewRunner) -> None:
    before = torch.get_num_threads()
    later: list[int] = []
    torch.set_num_threads(before + 1)
    try:
        drafter = ModelDrafter(new_runner(8, 128, seed=TARGET_SEED), StepLimits(256, 8, 64))
        pool = InProcessPool(drafter, "tiny", SpeculationConfig(), num_threads=before, has_own_thread=True)
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        pool.stop()
        assert torch.get_num_threads() == before + 1
        assert later == [before + 1]
    finally:
        torch.set_num_threads(before)
