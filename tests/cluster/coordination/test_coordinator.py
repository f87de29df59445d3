"""The coordinator against a pool whose links and clock are the test's: its rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from cluster.config.speculation import SpeculationConfig
from cluster.coordination.base import LinkState
from cluster.coordination.coordinator import Coordinator
from cluster.coordination.sequence import Round
from cluster.speculation.drafts import Drafts
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.speculation.tuning import INITIAL_RATE
from cluster.wire.messages import Open, Proposal, SpeculateReply, SpeculateRequest, Timing

from .scripted import LIMITS, PROMPT, TIMEOUT_S, VOCAB_SIZE, K, Rounds, ScriptedLink, ScriptedPool, new_sequence


class TestRounds:
    def test_opens_with_everything_the_drafter_needs(self, rounds: Rounds) -> None:
        wire_id = rounds.sequence.wire_id
        expected = Open(wire_id, PROMPT, 3, SamplingParams(), NoiseKey(1, 2), K, window=2 * 16 + 2, takes_parts=True)
        assert rounds.opening == [SpeculateRequest(opens={wire_id: expected})]

    def test_waits_for_the_proposal_and_verifies_it(self, rounds: Rounds, pool: ScriptedPool) -> None:
        rounds.proposes(3, 4, 5, 6, 7, after=0.01)
        assert rounds.drafts() == [4, 5, 6, 7]
        assert pool.now == pytest.approx(100.01)

    def test_a_turn_is_lent_in_each_step_but_the_first(self, rounds: Rounds, pool: ScriptedPool) -> None:
        """Which nobody's first token waits for."""
        assert pool.num_turns_lent == 0
        rounds.proposes(3, 7, 8)
        rounds.drafts()
        assert pool.num_turns_lent == 1

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
        coordinator.begin((), [other])
        both = (rounds.sequence, other)
        pool.happens(rounds.link, SpeculateReply(proposals={s.wire_id: Proposal(s.wire_id, 3, []) for s in both}))
        coordinator.begin(both)
        coordinator.end([Round(sequence) for sequence in both])
        pool.happens(
            rounds.link, SpeculateReply(proposals={other.wire_id: Proposal(other.wire_id, 3, [7])}), after=0.01
        )
        drafts = coordinator.begin([rounds.sequence, other])
        assert pool.now == pytest.approx(100.0 + TIMEOUT_S)
        assert (rounds.sequence.is_late, other.is_late) == (True, False)
        assert drafts[other] == Drafts([7])

    def test_events_that_do_not_matter_do_not_prolong_the_wait(self, rounds: Rounds, pool: ScriptedPool) -> None:
        for index in range(20):
            pool.happens(rounds.link, SpeculateReply(proposals={99: Proposal(99, 3, [])}), after=0.004 * index)
        assert rounds.drafts() == []
        assert pool.now <= 100.0 + TIMEOUT_S + 0.004


class TestTreesThatRunAhead:
    """Drafts 4 → (5 → 7 → 8, 6 → 9): a round verifies the main path of the remaining tree."""

    TOKENS, PARENTS = (4, 5, 6, 7, 8, 9), (-1, 0, 0, 1, 3, 2)

    def verified(self, rounds: Rounds, *tokens: int, parents: tuple[int, ...] = PARENTS) -> Drafts:
        wire_id = rounds.sequence.wire_id
        reply = SpeculateReply(proposals={wire_id: Proposal(wire_id, 3, [*(tokens or self.TOKENS)], [*parents])})
        rounds.pool.happens(rounds.link, reply)
        return rounds.coordinator.begin([rounds.sequence])[rounds.sequence]

    def test_is_verified_up_to_k_levels(self, rounds: Rounds) -> None:
        assert self.verified(rounds) == Drafts([4, 5, 7, 8])

    @pytest.mark.parametrize(
        ("committed", "drafts"),
        [
            ([4], Drafts([5, 7, 8])),
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

    def test_a_node_outside_the_vocabulary_goes_with_what_follows_it(self, rounds: Rounds) -> None:
        assert self.verified(rounds, 4, VOCAB_SIZE, 6, 7, 8, 9, parents=(-1, 0, 0, 1, 2, 4)) == Drafts([4])
        assert rounds.coordinator.stats.num_invalid_token_ids == 2


def test_a_proposal_not_worth_its_wait_is_used_by_the_step_after(pool: ScriptedPool, link: ScriptedLink) -> None:
    """As far as it still fits: the sequence decodes plainly meanwhile, with those that have no drafts."""
    config = SpeculationConfig(controller="goodput", draft_timeout_ms=TIMEOUT_S * 1000, num_speculative_tokens=K)
    coordinator = Coordinator(pool, config, VOCAB_SIZE, LIMITS, pool.clock)
    coordinator.observe_step_times([(4, 0.020)])
    few, many = new_sequence(), [new_sequence(k=0) for _ in range(3)]
    coordinator.begin((), [few, *many])
    wire_id = few.wire_id
    reply = SpeculateReply(proposals={wire_id: Proposal(wire_id, 3, [4, 5, 6, 7])}, timing=Timing(0.020, 0.004, 1))
    pool.happens(link, reply)
    drafts = coordinator.begin([few, *many])
    assert [list(drafts[sequence].token_ids) for sequence in (few, *many)] == [[4, 5, 6, 7], [], [], []]
    few.token_ids.extend([4, 9])  # type: ignore[attr-defined]
    coordinator.end([Round(few, Drafts([4, 5, 6, 7]), [4, 9])])
    pool.happens(link, SpeculateReply(proposals={wire_id: Proposal(wire_id, 5, [10, 11, 12, 13])}), after=0.016)
    asked_at = pool.now
    drafts = coordinator.begin([few, *many])
    assert pool.now == asked_at
    assert drafts.keys() == {few, *many}  # nobody is held back
    assert not drafts[few]
    few.token_ids.append(10)  # type: ignore[attr-defined]
    pool.now += 0.020
    coordinator.end([Round(few, Drafts(), [10])])
    drafts = coordinator.begin([few, *many])
    assert drafts.keys() == {few, *many}
    assert list(drafts[few].token_ids) == [11, 12, 13]
    assert coordinator.stats.num_late_rounds == 0


class TestVersions:
    def test_a_new_one_begins_with_the_rates_of_the_old_one_and_is_measured_by_itself(
        self, coordinator: Coordinator, pool: ScriptedPool, link: ScriptedLink
    ) -> None:
        other = ScriptedLink("other")
        pool.happens(other, LinkState.UP)
        coordinator.begin(())
        old = coordinator.planner.rates("draft", 1.0)
        for _ in range(50):
            for num_accepted in (0, 1, 0, 2, 0, 1, 0, 3):  # a half at each position
                old.observe(3, num_accepted)
        for version in ("second", "third"):
            pool.happens(link, LinkState.DOWN)
            link.model = version
            pool.happens(link, LinkState.UP)
            coordinator.begin(())
            new = coordinator.planner.rates(version, 1.0)
            assert new.rates == pytest.approx(old.rates, abs=0.1)
        assert coordinator.planner.rates("unrelated", 1.0).rates[0] == INITIAL_RATE
        before = list(old.rates)
        for _ in range(30):
            new.observe(3, 0)
        assert new.rates[0] < 0.3
        assert old.rates == before


class TestMessages:
    def test_with_k_0_nothing_is_ever_opened(self, coordinator: Coordinator, link: ScriptedLink) -> None:
        sequence = new_sequence(k=0)
        assert coordinator.begin([sequence]) == {sequence: Drafts()}
        coordinator.end([Round(sequence)])
        coordinator.close(sequence)
        coordinator.begin(())
        assert link.sent == []

    def test_a_step_sends_at_most_one_message_a_link(
        self, coordinator: Coordinator, new_link: Callable[[str], ScriptedLink]
    ) -> None:
        links = [new_link("first"), new_link("second")]
        sequences = [new_sequence() for _ in range(6)]
        coordinator.begin((), sequences[:4])
        assert [len(link.take_sent()) for link in links] == [1, 1]
        for sequence in sequences[1:4]:
            sequence.token_ids.append(4)
        coordinator.close(sequences[0])
        coordinator.end([Round(sequence) for sequence in sequences[1:4]], joining=sequences[4:])
        coordinator.begin((), sequences[4:])
        sent = [link.take_sent() for link in links]
        assert [len(messages) for messages in sent] == [1, 1]
        everything = SpeculateRequest()
        for (message,) in sent:
            assert message
            everything.merge(message)
        assert (len(everything.opens), len(everything.advances), len(everything.closes)) == (2, 3, 1)
        coordinator.begin(())
        assert [link.sent for link in links] == [[], []]  # nothing new, nothing sent

    def test_a_close_is_sent_in_place_of_what_was_to_be_told(self, rounds: Rounds) -> None:
        """It ended in the step that committed for it."""
        rounds.sequence.token_ids.append(4)
        rounds.coordinator.close(rounds.sequence)
        rounds.coordinator.end([Round(rounds.sequence)])
        assert rounds.link.take_sent() == [SpeculateRequest(closes={rounds.sequence.wire_id})]

    def test_no_two_openings_share_a_number(self, coordinator: Coordinator, link: ScriptedLink) -> None:
        wire_ids: list[int] = []
        for _ in range(3):
            sequences = [new_sequence() for _ in range(4)]
            coordinator.begin((), sequences)
            wire_ids.extend(wire_id for request in link.take_sent() for wire_id in request.opens)
            for sequence in sequences:
                coordinator.close(sequence)
        assert len(set(wire_ids)) == len(wire_ids) == 12


def test_others_do_not_wait_for_a_drafter_that_computes_a_prompt(
    coordinator: Coordinator, pool: ScriptedPool, rounds: Rounds
) -> None:
    rounds.proposes(3, 4, 5, 6, 7)
    assert rounds.drafts() == [4, 5, 6, 7]
    newcomer = new_sequence()
    coordinator.begin((), [newcomer])
    wire_id, started_at = newcomer.wire_id, pool.now
    drafts = coordinator.begin([rounds.sequence, newcomer])
    assert pool.now == started_at
    assert [list(drafts[sequence].token_ids) for sequence in (rounds.sequence, newcomer)] == [[4, 5, 6, 7], []]
    pool.happens(rounds.link, SpeculateReply(proposals={wire_id: Proposal(wire_id, 3, [7, 8])}))
    assert coordinator.begin([rounds.sequence, newcomer])[newcomer] == Drafts([7, 8])
    assert coordinator.stats.num_late_rounds == 0


def test_a_step_may_be_planned_before_the_one_before_it_has_ended(rounds: Rounds) -> None:
    """As in an engine that schedules a step while another runs."""
    coordinator, sequence = rounds.coordinator, rounds.sequence
    rounds.proposes(3, 4, 5, 6, 7)
    drafts = coordinator.begin([sequence])[sequence]
    coordinator.plan([sequence])
    assert coordinator.reserve([sequence]) == {sequence: K}
    cast(list[int], sequence.token_ids).extend([4, 9])
    coordinator.end([Round(sequence, drafts, [4, 9])])
    assert rounds.link.take_sent() == rounds.advance(3, 4, 9)
    rounds.proposes(5, 10, 11, 12, 13)
    assert list(coordinator.collect([sequence])[sequence].token_ids) == [10, 11, 12, 13]


def test_a_request_that_sets_its_drafts_gets_all_its_rows(rounds: Rounds) -> None:
    for num_rows in range(1, 9):
        rounds.coordinator.planner.steps.curve.observe(num_rows, float(num_rows))  # time is proportional to rows
    rounds.proposes(3, 4, 5, 6, 7)
    rounds.coordinator.plan([rounds.sequence])
    assert rounds.coordinator.reserve([rounds.sequence]) == {rounds.sequence: K}


def test_no_rows_are_planned_for_drafts_that_cannot_come(rounds: Rounds) -> None:
    rounds.coordinator.plan([rounds.sequence])
    assert rounds.coordinator.reserve([rounds.sequence]) == {
        rounds.sequence: 0
    }  # its drafter still computes the prompt
    rounds.proposes(3, 4, 5, 6, 7)
    rounds.drafts()
    rounds.pool.happens(rounds.link, LinkState.DOWN)
    rounds.coordinator.plan([rounds.sequence])
    assert rounds.coordinator.reserve([rounds.sequence]) == {rounds.sequence: 0}


def test_what_a_grammar_adds_says_nothing_about_the_drafter() -> None:
    def survival(verified: list[int], chosen: list[int]) -> list[float]:
        pool, link = ScriptedPool(), ScriptedLink("first")
        pool.happens(link, LinkState.UP)
        rounds = Rounds(
            Coordinator(pool, SpeculationConfig(controller="fixed"), VOCAB_SIZE, LIMITS, pool.clock), pool, link
        )
        for _ in range(20):
            rounds.proposes(len(rounds.sequence.token_ids), 7, 8, 9, 10)
            rounds.drafts()
            rounds.sequence.token_ids.extend(chosen)
            rounds.coordinator.end([Round(rounds.sequence, Drafts(verified), chosen)])
        rounds.drafts()
        assert rounds.sequence.acceptance is not None
        return rounds.sequence.acceptance.survival()

    # The grammar forbids 8 and goes on with 21 and 22.
    assert survival([7, 21, 22], [7, 21, 22, 23]) == survival([7], [7, 21])
    assert survival([7], [7, 21]) != survival([7, 8], [7, 21])
