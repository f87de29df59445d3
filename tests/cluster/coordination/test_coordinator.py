"""The coordinator against a pool whose links and clock are the test's."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

import pytest

from cluster.config import SpeculationConfig
from cluster.coordination.coordinator import Coordinator
from cluster.coordination.link import LinkEvent, LinkState
from cluster.coordination.sequence import Round, SpeculativeSequence
from cluster.speculation.drafts import Drafts
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.wire.messages import Advance, Open, Proposal, SpeculateReply, SpeculateRequest, Timing

VOCAB_SIZE = 1000
TIMEOUT_S = 0.050
PROMPT = [1, 2, 3]
K = 4


class ScriptedLink:
    """Keeps what is sent on it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sent: list[SpeculateRequest] = []

    def send(self, request: SpeculateRequest) -> None:
        self.sent.append(request)

    def take_sent(self) -> list[SpeculateRequest]:
        sent, self.sent = self.sent, []
        return sent


class ScriptedPool:
    """Stands for a DraftPool: what happens on the links, and when. Time passes only while someone waits."""

    def __init__(self) -> None:
        self.now = 100.0
        self._numbers = itertools.count()
        self._coming: list[tuple[float, int, LinkEvent]] = []

    def clock(self) -> float:
        return self.now

    def happens(self, link: ScriptedLink, event: LinkState | SpeculateReply, after: float = 0.0) -> None:
        happened = LinkEvent(link, event)
        heapq.heappush(self._coming, (self.now + after, next(self._numbers), happened))

    def poll(self, timeout: float = 0.0) -> list[LinkEvent]:
        until = self.now + timeout
        if self._coming and self._coming[0][0] <= until:
            self.now = max(self.now, self._coming[0][0])
        else:
            self.now = until
        events = []
        while self._coming and self._coming[0][0] <= self.now:
            events.append(heapq.heappop(self._coming)[2])
        return events


@pytest.fixture
def pool() -> ScriptedPool:
    return ScriptedPool()


@pytest.fixture
def coordinator(pool: ScriptedPool) -> Coordinator:
    config = SpeculationConfig(controller="fixed", draft_timeout_ms=TIMEOUT_S * 1000)
    return Coordinator(pool, config, VOCAB_SIZE, pool.clock)


@pytest.fixture
def new_link(pool: ScriptedPool) -> Callable[[str], ScriptedLink]:
    """A link that is up."""

    def make(name: str) -> ScriptedLink:
        link = ScriptedLink(name)
        pool.happens(link, LinkState.UP)
        return link

    return make


@pytest.fixture
def link(new_link: Callable[[str], ScriptedLink]) -> ScriptedLink:
    return new_link("first")


def new_sequence(k: int = K, prompt: list[int] = PROMPT) -> SpeculativeSequence:
    return SpeculativeSequence(list(prompt), len(prompt), SamplingParams(), NoiseKey(1, 2), k)


class Rounds:
    """One sequence, opened on `link`, and its engine and drafter."""

    def __init__(self, coordinator: Coordinator, pool: ScriptedPool, link: ScriptedLink) -> None:
        self.coordinator, self.pool, self.link = coordinator, pool, link
        self.sequence = new_sequence()
        coordinator.open(self.sequence)
        coordinator.flush()
        self.opening = link.take_sent()

    def proposes(self, base: int, *tokens: int, after: float = 0.0) -> None:
        reply = SpeculateReply(proposals={self.sequence.name: Proposal(self.sequence.name, base, tokens)})
        self.pool.happens(self.link, reply, after)

    def refuses(self) -> None:
        self.pool.happens(self.link, SpeculateReply(refused={self.sequence.name}))

    def loses(self) -> None:
        self.pool.happens(self.link, SpeculateReply(lost={self.sequence.name}))

    def drafts(self) -> list[int]:
        """What a step verifies."""
        self.coordinator.wait([self.sequence])
        return list(self.coordinator.drafts([self.sequence])[0].token_ids)

    def commits(self, *tokens: int) -> list[SpeculateRequest]:
        """The end of a step; returns what is sent."""
        self.sequence.token_ids.extend(tokens)
        self.coordinator.commit([Round(self.sequence)])
        self.coordinator.flush()
        return self.link.take_sent()

    def advance(self, base: int, *tokens: int) -> list[SpeculateRequest]:
        """One message that tells `tokens`."""
        name = self.sequence.name
        return [SpeculateRequest(advances={name: Advance(name, base, list(tokens), K)})]


@pytest.fixture
def rounds(coordinator: Coordinator, pool: ScriptedPool, link: ScriptedLink) -> Rounds:
    return Rounds(coordinator, pool, link)


class TestRounds:
    def test_opens_with_everything_the_drafter_needs(self, rounds: Rounds) -> None:
        name = rounds.sequence.name
        expected = Open(name, PROMPT, 3, SamplingParams(), NoiseKey(1, 2), K, window=2 * 16 + 2)
        assert rounds.opening == [SpeculateRequest(opens={name: expected})]

    def test_waits_for_the_proposal_and_verifies_it(self, rounds: Rounds, pool: ScriptedPool) -> None:
        rounds.proposes(3, 4, 5, 6, 7, after=0.01)
        assert rounds.drafts() == [4, 5, 6, 7]
        assert pool.now == pytest.approx(100.01)

    def test_tells_what_was_committed_since_the_drafter_was_last_heard(self, rounds: Rounds) -> None:
        rounds.proposes(3, 4, 5, 6, 7)
        assert rounds.drafts() == [4, 5, 6, 7]
        assert rounds.commits(4, 5, 9) == rounds.advance(3, 4, 5, 9)
        rounds.proposes(6, 10, 11, 12, 13)
        assert rounds.drafts() == [10, 11, 12, 13]
        assert rounds.commits(10) == rounds.advance(6, 10)
        assert rounds.coordinator.stats.num_stale_proposals == 0

    def test_an_advance_is_cumulative_until_it_is_answered(self, rounds: Rounds) -> None:
        rounds.proposes(3, 4, 5, 6, 7)
        assert rounds.drafts() == [4, 5, 6, 7]
        assert rounds.commits(8) == rounds.advance(3, 8)
        assert rounds.drafts() == []
        assert rounds.commits(9) == rounds.advance(3, 8, 9)
        rounds.proposes(4, 9, 10, 11, 12)  # the answer to the first
        assert rounds.drafts() == [10, 11, 12]
        assert rounds.commits(10) == rounds.advance(4, 9, 10)

    def test_tokens_committed_before_the_first_proposal_are_told(self, rounds: Rounds) -> None:
        """The target's prefill chose a token while the drafter was still at the prompt."""
        assert rounds.commits(4) == rounds.advance(3, 4)
        rounds.proposes(3, 4, 5, 6, 7)
        rounds.proposes(4, 5, 6, 7, 8, after=0.01)
        assert rounds.drafts() == [5, 6, 7, 8]

    def test_a_proposal_that_fits_is_used_again_as_far_as_it_was_not_verified(self, rounds: Rounds) -> None:
        """A busy step verified fewer drafts than there were."""
        rounds.proposes(3, 4, 5, 6, 7)
        assert rounds.drafts() == [4, 5, 6, 7]
        rounds.commits(4, 5)
        assert rounds.drafts() == [6, 7]

    def test_what_was_committed_is_copied_into_the_message(self, rounds: Rounds) -> None:
        sent = rounds.commits(4)
        rounds.sequence.token_ids.append(5)
        assert sent == rounds.advance(3, 4)
        (opening,) = rounds.opening[0].opens.values()
        assert opening.token_ids == PROMPT


class TestStaleProposals:
    @pytest.mark.parametrize(
        ("committed", "proposed", "drafts", "num_stale"),
        [
            ([4], [4, 5, 6, 7], [5, 6, 7], 0),
            ([4, 5, 6], [4, 5, 6, 7], [7], 0),
            ([4, 5, 6, 7], [4, 5, 6, 7], [], 0),
            ([9], [4, 5, 6, 7], [], 1),
            ([4, 9], [4, 5, 6, 7], [], 1),
            ([4, 5, 6, 7, 8], [4, 5, 6, 7], [], 1),  # the target is past it
            ([4], [], [], 1),
        ],
    )
    def test_one_that_was_overtaken_is_used_as_far_as_it_fits(
        self, committed: list[int], proposed: list[int], drafts: list[int], num_stale: int, rounds: Rounds
    ) -> None:
        rounds.commits(*committed)
        rounds.proposes(3, *proposed)
        assert rounds.drafts() == drafts
        assert rounds.coordinator.stats.num_stale_proposals == num_stale

    def test_one_that_was_verified_is_not_stale(self, rounds: Rounds) -> None:
        """The drafter is late with the next: there is nothing to verify, and nothing was dropped."""
        rounds.proposes(3, 4, 5, 6, 7)
        assert rounds.drafts() == [4, 5, 6, 7]
        rounds.commits(4, 9)
        assert rounds.drafts() == []
        assert rounds.coordinator.stats.num_stale_proposals == 0

    def test_one_older_than_the_last_is_dropped(self, rounds: Rounds) -> None:
        rounds.commits(4)
        rounds.proposes(4, 5, 6, 7, 8)
        rounds.proposes(3, 4, 5, 6, 7)
        assert rounds.drafts() == [5, 6, 7, 8]
        assert rounds.coordinator.stats.num_stale_proposals == 1

    def test_one_beyond_what_is_committed_is_dropped(self, rounds: Rounds) -> None:
        rounds.proposes(5, 6, 7)
        assert rounds.drafts() == []
        assert rounds.coordinator.stats.num_stale_proposals == 1

    @pytest.mark.parametrize(
        ("proposed", "drafts", "num_invalid"),
        [([4, 999, 5], [4, 999, 5], 0), ([4, 1000, 5, 6], [4], 3), ([2**32 - 1], [], 1)],
    )
    def test_drafts_end_before_a_token_outside_the_vocabulary(
        self, proposed: list[int], drafts: list[int], num_invalid: int, rounds: Rounds
    ) -> None:
        rounds.proposes(3, *proposed)
        assert rounds.drafts() == drafts
        assert rounds.coordinator.stats.num_invalid_token_ids == num_invalid

    def test_no_more_drafts_than_k(self, rounds: Rounds) -> None:
        rounds.proposes(3, 4, 5, 6, 7, 8, 9)
        assert rounds.drafts() == [4, 5, 6, 7]

    def test_drafts_beyond_the_window_are_dropped(self, rounds: Rounds) -> None:
        window = 2 * K + 2
        rounds.proposes(3, *range(4, 4 + window + 3))
        rounds.drafts()
        assert rounds.coordinator.stats.num_excess_token_ids == 3
        assert rounds.sequence.proposal is not None
        assert len(rounds.sequence.proposal.token_ids) == window

    def test_a_proposal_for_a_closed_or_unknown_sequence_is_ignored(self, rounds: Rounds, pool: ScriptedPool) -> None:
        rounds.proposes(3, 4, 5, 6, 7)
        pool.happens(rounds.link, SpeculateReply(proposals={99: Proposal(99, 3, [4])}, lost={98}, refused={97}))
        rounds.coordinator.close(rounds.sequence)
        assert rounds.drafts() == []
        stats = rounds.coordinator.stats
        assert (stats.num_stale_proposals, stats.num_lost, stats.num_refused) == (0, 0, 0)


class TestLateProposals:
    def test_a_step_waits_no_longer_than_the_timeout(self, rounds: Rounds, pool: ScriptedPool) -> None:
        assert rounds.drafts() == []
        assert pool.now == pytest.approx(100.0 + TIMEOUT_S)
        assert rounds.coordinator.stats.num_late_rounds == 1

    def test_time_the_target_spent_counts(self, rounds: Rounds, pool: ScriptedPool) -> None:
        pool.now += TIMEOUT_S / 2
        assert rounds.drafts() == []
        assert pool.now == pytest.approx(100.0 + TIMEOUT_S)

    def test_a_late_sequence_decodes_plainly_without_waiting_until_it_is_heard_of(
        self, rounds: Rounds, pool: ScriptedPool
    ) -> None:
        assert rounds.drafts() == []
        late_since = pool.now
        for token in (4, 5, 6):
            assert rounds.commits(token)  # the drafter is told all the same
            assert rounds.drafts() == []
        assert pool.now == late_since
        assert rounds.coordinator.stats.num_late_rounds == 1
        rounds.proposes(6, 7, 8, 9, 10)
        assert rounds.drafts() == [7, 8, 9, 10]
        rounds.commits(7)
        rounds.proposes(7, 8, 9, 10, 11, after=0.04)
        assert rounds.drafts() == [8, 9, 10, 11]  # it is waited for again

    def test_a_drafter_that_trails_behind_gets_a_new_budget(self, rounds: Rounds, pool: ScriptedPool) -> None:
        assert rounds.drafts() == []
        rounds.commits(9)
        rounds.proposes(3, 4, 5, 6, 7)  # what it made of the opening, and of no use
        rounds.proposes(4, 10, 11, 12, 13, after=0.04)
        assert rounds.drafts() == [10, 11, 12, 13]
        assert pool.now == pytest.approx(100.0 + TIMEOUT_S + 0.04)

    def test_one_late_sequence_does_not_hold_up_the_others_longer_than_its_budget(
        self, coordinator: Coordinator, pool: ScriptedPool, rounds: Rounds
    ) -> None:
        other = new_sequence()
        coordinator.open(other)
        coordinator.flush()
        pool.happens(rounds.link, SpeculateReply(proposals={other.name: Proposal(other.name, 3, [7])}), after=0.01)
        coordinator.wait([rounds.sequence, other])
        assert pool.now == pytest.approx(100.0 + TIMEOUT_S)
        assert (rounds.sequence.is_late, other.is_late) == (True, False)
        assert coordinator.drafts([other])[0] == Drafts([7])

    def test_events_that_do_not_matter_do_not_prolong_the_wait(self, rounds: Rounds, pool: ScriptedPool) -> None:
        for index in range(20):
            pool.happens(rounds.link, SpeculateReply(proposals={99: Proposal(99, 3, [])}), after=0.004 * index)
        assert rounds.drafts() == []
        assert pool.now <= 100.0 + TIMEOUT_S + 0.004


class TestPreemption:
    """The engine takes a sequence's blocks for a while: it is not waited for, and then opened again."""

    def test_it_stays_open_and_opening_it_again_changes_nothing(self, rounds: Rounds) -> None:
        rounds.coordinator.open(rounds.sequence)
        rounds.coordinator.flush()
        assert rounds.link.sent == []

    def test_what_was_proposed_meanwhile_is_verified_afterwards(self, rounds: Rounds, pool: ScriptedPool) -> None:
        rounds.proposes(3, 4, 5, 6, 7)
        assert rounds.drafts() == [4, 5, 6, 7]
        rounds.commits(9)
        rounds.proposes(4, 10, 11, 12, 13, after=0.01)
        pool.now += 60.0
        rounds.coordinator.flush()  # of other sequences' steps
        rounds.coordinator.open(rounds.sequence)
        assert rounds.drafts() == [10, 11, 12, 13]
        assert rounds.coordinator.stats.num_late_rounds == 0

    def test_its_link_may_go_down_meanwhile(
        self, rounds: Rounds, pool: ScriptedPool, new_link: Callable[[str], ScriptedLink]
    ) -> None:
        second = new_link("second")
        pool.happens(rounds.link, LinkState.DOWN)
        rounds.coordinator.flush()
        rounds.coordinator.open(rounds.sequence)
        rounds.coordinator.flush()
        assert [len(request.opens) for request in second.take_sent()] == [1]

    def test_what_never_came_is_not_waited_for_once_more(self, rounds: Rounds, pool: ScriptedPool) -> None:
        rounds.commits(9)
        pool.now += 60.0
        rounds.coordinator.open(rounds.sequence)
        assert rounds.drafts() == []
        assert pool.now == pytest.approx(160.0)

    def test_it_can_be_closed_meanwhile(self, rounds: Rounds) -> None:
        rounds.coordinator.close(rounds.sequence)
        rounds.coordinator.flush()
        assert rounds.link.take_sent() == [SpeculateRequest(closes={rounds.sequence.name})]


class TestTrees:
    """Drafts 4 → (5 → 7 → 8, 6 → 9)."""

    TOKENS, PARENTS = (4, 5, 6, 7, 8, 9), (-1, 0, 0, 1, 3, 2)

    def verified(self, rounds: Rounds, *tokens: int, parents: tuple[int, ...] = PARENTS) -> Drafts:
        name = rounds.sequence.name
        reply = SpeculateReply(proposals={name: Proposal(name, 3, [*(tokens or self.TOKENS)], [*parents])})
        rounds.pool.happens(rounds.link, reply)
        rounds.coordinator.wait([rounds.sequence])
        return rounds.coordinator.drafts([rounds.sequence])[0]

    def test_is_verified_up_to_k_nodes(self, rounds: Rounds) -> None:
        assert self.verified(rounds) == Drafts([4, 5, 6, 7], [-1, 0, 0, 1])

    @pytest.mark.parametrize(
        ("committed", "drafts"),
        [
            ([4], Drafts([5, 6, 7, 8], [-1, -1, 0, 2])),
            ([4, 5], Drafts([7, 8])),
            ([4, 6], Drafts([9])),
            ([4, 6, 9], Drafts([])),
            ([5], Drafts()),
            ([4, 5, 9], Drafts()),
        ],
    )
    def test_one_that_was_overtaken_is_used_as_far_as_it_fits(
        self, committed: list[int], drafts: Drafts, rounds: Rounds
    ) -> None:
        rounds.commits(*committed)
        assert self.verified(rounds) == drafts

    def test_a_node_outside_the_vocabulary_goes_with_its_subtree(self, rounds: Rounds) -> None:
        assert self.verified(rounds, 4, VOCAB_SIZE, 6, 7, 8, 9, parents=(-1, 0, 0, 1, 2, 4)) == Drafts([4, 6])
        assert rounds.coordinator.stats.num_invalid_token_ids == 2


class TestLinks:
    def test_without_a_link_a_sequence_waits_for_nothing(self, coordinator: Coordinator, pool: ScriptedPool) -> None:
        sequence = new_sequence()
        coordinator.open(sequence)
        coordinator.flush()
        coordinator.wait([sequence])
        assert coordinator.drafts([sequence])[0] == Drafts()
        coordinator.commit([Round(sequence)])
        assert pool.now == 100.0

    def test_a_link_that_came_up_while_nothing_ran_takes_the_first_sequence_at_once(
        self, coordinator: Coordinator, link: ScriptedLink
    ) -> None:
        coordinator.open(new_sequence())
        coordinator.flush()
        assert len(link.take_sent()) == 1

    def test_sequences_go_where_the_fewest_are(
        self, coordinator: Coordinator, new_link: Callable[[str], ScriptedLink]
    ) -> None:
        first, second = new_link("first"), new_link("second")
        for _ in range(5):
            coordinator.open(new_sequence())
        coordinator.flush()
        assert sorted([len(first.sent[0].opens), len(second.sent[0].opens)]) == [2, 3]

    def test_when_a_link_goes_down_its_sequences_open_elsewhere_with_all_their_tokens(
        self, coordinator: Coordinator, pool: ScriptedPool, rounds: Rounds, new_link: Callable[[str], ScriptedLink]
    ) -> None:
        rounds.proposes(3, 4, 5, 6, 7)
        assert rounds.drafts() == [4, 5, 6, 7]
        rounds.commits(4, 5, 9)
        second = new_link("second")
        pool.happens(rounds.link, LinkState.DOWN, after=0.01)
        assert rounds.drafts() == []  # and decodes plainly, as soon as it is known
        assert pool.now == pytest.approx(100.01)
        assert rounds.commits(10) == []  # nothing on the link that is down
        ((opening,),) = [request.opens.values() for request in second.take_sent()]
        assert opening.token_ids == [*PROMPT, 4, 5, 9, 10]
        assert opening.num_prompt_tokens == 3
        rounds.link = second
        rounds.proposes(7, 11, 12, 13, 14)
        assert rounds.drafts() == [11, 12, 13, 14]
        assert coordinator.stats.num_late_rounds == 0

    def test_a_link_that_comes_back_gets_its_sequences_anew(
        self, pool: ScriptedPool, rounds: Rounds, coordinator: Coordinator
    ) -> None:
        old_name = rounds.sequence.name
        pool.happens(rounds.link, LinkState.DOWN)
        pool.happens(rounds.link, LinkState.UP)
        (request,) = rounds.commits(4)
        assert request.advances == {}
        (opening,) = request.opens.values()
        assert opening.token_ids == [*PROMPT, 4]
        assert opening.sequence != old_name

    def test_replies_of_a_link_that_is_down_are_ignored(self, pool: ScriptedPool, rounds: Rounds) -> None:
        pool.happens(rounds.link, LinkState.DOWN)
        rounds.proposes(3, 4, 5, 6, 7)
        assert rounds.drafts() == []

    def test_a_sequence_can_be_closed_while_it_has_no_link(
        self, coordinator: Coordinator, pool: ScriptedPool, rounds: Rounds, new_link: Callable[[str], ScriptedLink]
    ) -> None:
        pool.happens(rounds.link, LinkState.DOWN)
        assert rounds.drafts() == []
        coordinator.close(rounds.sequence)
        second = new_link("second")
        coordinator.flush()
        assert second.sent == []


class TestRefusals:
    @pytest.mark.parametrize("kind", ["refuses", "loses"])
    def test_a_sequence_that_is_not_held_opens_again_after_a_pause(
        self, kind: str, rounds: Rounds, pool: ScriptedPool
    ) -> None:
        getattr(rounds, kind)()
        assert rounds.drafts() == []
        assert pool.now == 100.0  # nobody is waited for
        assert rounds.commits(4) == []
        pool.now += 0.9
        assert rounds.commits(5) == []
        pool.now += 0.2
        (request,) = rounds.commits(6)
        (opening,) = request.opens.values()
        assert opening.token_ids == [*PROMPT, 4, 5, 6]
        stats = rounds.coordinator.stats
        assert (stats.num_refused, stats.num_lost) == ((1, 0) if kind == "refuses" else (0, 1))

    def test_every_refusal_doubles_the_pause(self, rounds: Rounds, pool: ScriptedPool) -> None:
        pauses = []
        for _ in range(9):
            rounds.refuses()
            refused_at = pool.now
            while not rounds.commits(4):
                pool.now += 0.25
            pauses.append(round(pool.now - refused_at))
        assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]

    def test_what_is_said_of_an_earlier_opening_is_ignored(self, rounds: Rounds, pool: ScriptedPool) -> None:
        """An advance crossed with the refusal and was answered, late, with `lost`."""
        old_name = rounds.sequence.name
        rounds.refuses()
        rounds.drafts()
        pool.now += 1.1
        assert len(rounds.commits(4)) == 1
        pool.happens(rounds.link, SpeculateReply(lost={old_name}))
        pool.happens(rounds.link, SpeculateReply(proposals={old_name: Proposal(old_name, 3, [4, 5])}))
        rounds.proposes(4, 6, 7, 8, 9)
        assert rounds.drafts() == [6, 7, 8, 9]
        assert rounds.coordinator.stats.num_lost == 0

    def test_the_others_go_on(self, coordinator: Coordinator, pool: ScriptedPool, rounds: Rounds) -> None:
        other = new_sequence()
        coordinator.open(other)
        coordinator.flush()
        reply = SpeculateReply(proposals={other.name: Proposal(other.name, 3, [7])}, refused={rounds.sequence.name})
        pool.happens(rounds.link, reply)
        coordinator.wait([rounds.sequence, other])
        assert coordinator.drafts([other])[0] == Drafts([7])
        assert coordinator.drafts([rounds.sequence])[0] == Drafts()

    def test_nobody_waits_for_what_a_worker_says_that_refused_before(self, rounds: Rounds, pool: ScriptedPool) -> None:
        rounds.refuses()
        assert rounds.drafts() == []
        pool.now += 1.0
        (request,) = rounds.commits(4)
        assert list(request.opens) == [rounds.sequence.name]
        asked_at = pool.now
        assert rounds.drafts() == []
        assert pool.now == asked_at
        rounds.proposes(4, 5, 6, 7, 8)
        assert rounds.drafts() == [5, 6, 7, 8]


def test_the_few_that_are_drafted_for_do_not_hold_up_the_many(pool: ScriptedPool, link: ScriptedLink) -> None:
    """What comes too late for a step is of use to the one after, as far as it still fits."""
    config = SpeculationConfig(controller="goodput", draft_timeout_ms=TIMEOUT_S * 1000, num_speculative_tokens=K)
    coordinator = Coordinator(pool, config, VOCAB_SIZE, pool.clock)
    coordinator.observe_step(4, 0.060)
    few, many = new_sequence(), [new_sequence(k=0) for _ in range(3)]
    coordinator.open(few)
    coordinator.flush([few, *many])
    reply = SpeculateReply(proposals={few.name: Proposal(few.name, 3, [4, 5, 6, 7])}, timing=Timing(0.010, 0.002, 1))
    pool.happens(link, reply)
    coordinator.wait([few, *many])
    assert [list(drafts.token_ids) for drafts in coordinator.drafts([few, *many])] == [[4, 5, 6, 7], [], [], []]
    few.token_ids.extend([4, 9])  # type: ignore[attr-defined]
    coordinator.commit([Round(few, Drafts([4, 5, 6, 7]), [4, 9])])
    coordinator.flush([few, *many])
    pool.happens(link, SpeculateReply(proposals={few.name: Proposal(few.name, 5, [10, 11, 12, 13])}), after=0.010)
    asked_at = pool.now
    assert coordinator.wait([few, *many]) == ()
    assert pool.now == asked_at
    assert not coordinator.drafts([few])[0]
    few.token_ids.append(10)  # type: ignore[attr-defined]
    coordinator.commit([Round(few, Drafts(), [10])])
    pool.now += 0.060
    coordinator.flush([few, *many])
    assert coordinator.wait([few, *many]) == ()
    assert list(coordinator.drafts([few])[0].token_ids) == [11, 12, 13]
    assert coordinator.stats.num_late_rounds == 0


class TestMessages:
    def test_with_k_0_nothing_is_ever_opened(self, coordinator: Coordinator, link: ScriptedLink) -> None:
        sequence = new_sequence(k=0)
        coordinator.open(sequence)
        coordinator.flush()
        coordinator.wait([sequence])
        assert coordinator.drafts([sequence])[0] == Drafts()
        coordinator.commit([Round(sequence)])
        coordinator.close(sequence)
        coordinator.flush()
        assert link.sent == []

    def test_a_flush_sends_at_most_one_message_a_link(
        self, coordinator: Coordinator, new_link: Callable[[str], ScriptedLink]
    ) -> None:
        links = [new_link("first"), new_link("second")]
        sequences = [new_sequence() for _ in range(6)]
        for sequence in sequences[:4]:
            coordinator.open(sequence)
        coordinator.flush()
        assert [len(link.take_sent()) for link in links] == [1, 1]
        for sequence in sequences[1:4]:
            sequence.token_ids.append(4)
            coordinator.commit([Round(sequence)])
        coordinator.close(sequences[0])
        for sequence in sequences[4:]:
            coordinator.open(sequence)
        coordinator.flush()
        sent = [link.take_sent() for link in links]
        assert [len(messages) for messages in sent] == [1, 1]
        everything = SpeculateRequest()
        for (message,) in sent:
            assert message
            everything.merge(message)
        assert (len(everything.opens), len(everything.advances), len(everything.closes)) == (2, 3, 1)
        coordinator.flush()
        assert [link.sent for link in links] == [[], []]  # nothing new, nothing sent

    def test_a_close_is_sent_in_place_of_what_was_to_be_told(self, rounds: Rounds) -> None:
        name = rounds.sequence.name
        rounds.sequence.token_ids.append(4)
        rounds.coordinator.commit([Round(rounds.sequence)])
        rounds.coordinator.close(rounds.sequence)
        rounds.coordinator.flush()
        assert rounds.link.take_sent() == [SpeculateRequest(closes={name})]

    def test_no_two_openings_share_a_number(self, coordinator: Coordinator, link: ScriptedLink) -> None:
        names: list[int] = []
        for _ in range(3):
            sequences = [new_sequence() for _ in range(4)]
            for sequence in sequences:
                coordinator.open(sequence)
            coordinator.flush()
            names.extend(name for request in link.take_sent() for name in request.opens)
            for sequence in sequences:
                coordinator.close(sequence)
        assert len(set(names)) == len(names) == 12


def test_nothing_is_opened_beyond_a_workers_credit(
    coordinator: Coordinator, pool: ScriptedPool, link: ScriptedLink, rounds: Rounds
) -> None:
    name = rounds.sequence.name
    pool.happens(link, SpeculateReply(proposals={name: Proposal(name, 3, [7])}, credit=5))
    newcomer = new_sequence()
    coordinator.open(newcomer)
    coordinator.flush()
    assert link.take_sent() == []
    assert coordinator.stats.num_without_credit == 1
    coordinator.close(rounds.sequence)  # makes room, how much is not known
    pool.now += 1.0
    coordinator.flush()
    (request,) = link.take_sent()
    assert list(request.opens) == [newcomer.name]
