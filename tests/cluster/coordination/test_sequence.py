"""Tests of a drafted sequence's state transitions, and of the part of a proposal that is still valid when it comes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.coordination.link import DraftLink
from cluster.coordination.sequence import ActiveLink, SpeculativeSequence
from cluster.coordination.stats import CoordinatorStats
from cluster.speculation.acceptance_model import PositionRates, SequenceAcceptance
from cluster.speculation.costs import LinkCosts
from cluster.speculation.drafts import Drafts
from cluster.speculation.tree import Shape
from cluster.wire.messages import Advance, Proposal

from .scripted import K, new_sequence

WIRE_ID = 7
WINDOW = 6
NOW = 5.0


@pytest.fixture
def link() -> ActiveLink:
    return ActiveLink(DraftLink("first", "fingerprint", lambda _: None), LinkCosts(64))


@pytest.fixture
def stats() -> CoordinatorStats:
    return CoordinatorStats()


@pytest.fixture
def sequence(link: ActiveLink) -> SpeculativeSequence:
    """Three tokens, open, and asked for its first proposal."""
    sequence = new_sequence()
    sequence.joined(SequenceAcceptance(PositionRates(16)), WINDOW)
    sequence.opened(link, WIRE_ID)
    sequence.asked(K, None, NOW)
    return sequence


def commits(sequence: SpeculativeSequence, *token_ids: int) -> None:
    """As the engine does, in its own list."""
    assert isinstance(sequence.token_ids, list)
    sequence.token_ids.extend(token_ids)


def fields(sequence: SpeculativeSequence) -> dict[str, Any]:
    return {
        "link": sequence.link is not None,
        "awaited": sequence.is_awaited,
        "since": sequence.awaited_since,
        "late": sequence.is_late,
        "refusals": sequence.num_refusals,
        "may open": sequence.may_open_at,
    }


FRESH = {"link": False, "awaited": False, "since": None, "late": False, "refusals": 0, "may open": 0.0}
ASKED = FRESH | {"link": True, "awaited": True, "since": NOW}


class TestTransitions:
    @pytest.mark.parametrize(
        ("steps", "expected"),
        [
            ((), ASKED),
            (("gave_up",), ASKED | {"awaited": False, "late": True}),
            (("asked later",), ASKED | {"since": NOW + 1}),
            (("gave_up", "asked later"), ASKED | {"awaited": False, "late": True}),  # late until it is heard of
            (("asked for none",), ASKED | {"awaited": False, "since": None}),
            (("gave_up", "asked for none"), ASKED | {"awaited": False, "since": None}),
            (("answered",), ASKED | {"awaited": False, "since": None}),
            (("gave_up", "answered"), ASKED | {"awaited": False, "since": None}),
            (("answered", "asked later"), ASKED | {"since": NOW + 1}),
            (("detached",), FRESH),
            (("gave_up", "detached"), FRESH),
            (("detached", "detached"), FRESH),
            (("turned_away",), FRESH | {"refusals": 1, "may open": 60.0}),
            (("turned_away", "opened again"), FRESH | {"link": True, "refusals": 1, "may open": 60.0}),
            (
                ("turned_away", "opened again", "asked later"),  # nobody waits for one that was refused
                FRESH | {"link": True, "refusals": 1, "may open": 60.0},
            ),
            (("turned_away", "opened again", "answered", "asked later"), ASKED | {"since": NOW + 1, "may open": 60.0}),
            (("turned_away", "opened again", "turned_away"), FRESH | {"refusals": 2, "may open": 60.0}),
            (("kept_waiting",), ASKED | {"may open": 60.0}),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
    )
    def test_lead_from_asked_to(
        self,
        steps: tuple[str, ...],
        expected: dict[str, Any],
        sequence: SpeculativeSequence,
        link: ActiveLink,
        stats: CoordinatorStats,
    ) -> None:
        for step in steps:
            match step:
                case "gave_up":
                    sequence.gave_up()
                case "asked later":
                    sequence.asked(K, None, NOW + 1)
                case "asked for none":
                    sequence.asked(0, None, NOW + 1)
                case "answered":
                    sequence.answered(Proposal(sequence.wire_id, 3, [8]), NOW, stats)
                case "detached":
                    sequence.detached()
                case "turned_away":
                    sequence.detached()
                    sequence.turned_away(60.0)
                case "opened again":
                    sequence.opened(link, WIRE_ID + 1)
                case "kept_waiting":
                    sequence.kept_waiting(60.0)
        assert fields(sequence) == expected

    def test_a_fresh_one_is_nowhere(self) -> None:
        assert fields(new_sequence()) == FRESH

    def test_opening_tells_all_that_is_committed(self, link: ActiveLink) -> None:
        sequence = new_sequence()
        commits(sequence, 4, 5)
        sequence.opened(link, WIRE_ID)
        assert (sequence.link, sequence.wire_id, sequence.num_acknowledged) == (link, WIRE_ID, 5)
        assert link.sequences == {WIRE_ID: sequence}

    def test_detaching_leaves_nothing_of_the_link(
        self, sequence: SpeculativeSequence, link: ActiveLink, stats: CoordinatorStats
    ) -> None:
        other = new_sequence()
        other.opened(link, WIRE_ID + 1)
        sequence.answered(Proposal(WIRE_ID, 3, [8, 9]), NOW, stats)
        sequence.detached()
        assert link.sequences == {WIRE_ID + 1: other}
        assert sequence.drafts(K) == Drafts()

    @pytest.mark.parametrize(
        ("num_drafts", "shape", "num_levels"), [(4, None, 4), (4, (-1, 0, -1, 0), 2), (3, (-1, -1, -1), 1)]
    )
    def test_levels_are_those_of_what_was_asked_for(
        self, num_drafts: int, shape: Shape | None, num_levels: int, sequence: SpeculativeSequence
    ) -> None:
        sequence.asked(num_drafts, shape, NOW)
        assert sequence.num_levels == num_levels


class TestAdvances:
    def test_tell_every_token_that_the_drafter_may_not_know(
        self, sequence: SpeculativeSequence, link: ActiveLink, stats: CoordinatorStats
    ) -> None:
        commits(sequence, 4)
        sequence.advance(K, None, NOW)
        assert link.request.advances == {WIRE_ID: Advance(WIRE_ID, 3, [4], K)}
        commits(sequence, 5)
        sequence.advance(2, (-1, -1), NOW)
        assert link.request.advances == {WIRE_ID: Advance(WIRE_ID, 3, [4, 5], 2, (-1, -1))}
        sequence.answered(Proposal(WIRE_ID, 4, [5]), NOW, stats)
        sequence.advance(K, None, NOW)
        assert link.request.advances == {WIRE_ID: Advance(WIRE_ID, 4, [5], K)}

    def test_that_ask_for_nothing_are_not_sent(self, sequence: SpeculativeSequence, link: ActiveLink) -> None:
        commits(sequence, 4)
        sequence.advance(0, None, NOW)
        assert not link.request
        assert not sequence.is_awaited


class TestProposals:
    @pytest.mark.parametrize(
        ("committed", "base", "proposed", "left", "num_stale"),
        [
            ([], 3, [4, 5, 6], [4, 5, 6], 0),
            ([4], 3, [4, 5, 6], [5, 6], 0),
            ([4, 5], 3, [4, 5, 6], [6], 0),
            ([4, 5, 6], 3, [4, 5, 6], [], 0),
            ([4, 5, 6, 7], 3, [4, 5, 6], [], 1),  # gone past it
            ([9], 3, [4, 5, 6], [], 1),  # chose otherwise
            ([4, 9], 3, [4, 5, 6], [], 1),
            ([4, 5], 4, [5, 6], [6], 0),
            ([4, 5], 5, [6], [6], 0),
            ([4, 5], 6, [7], [], 1),  # of tokens that are not committed
            ([4, 5], 2, [3, 4, 5, 6], [], 1),  # of fewer than it is known to have been told
            ([4], 4, [], [], 0),
        ],
    )
    def test_leave_what_follows_the_committed_tokens(
        self,
        committed: list[int],
        base: int,
        proposed: list[int],
        left: list[int],
        num_stale: int,
        sequence: SpeculativeSequence,
        stats: CoordinatorStats,
    ) -> None:
        commits(sequence, *committed)
        sequence.answered(Proposal(WIRE_ID, base, proposed), NOW, stats)
        assert list(sequence.drafts(K).token_ids) == left
        assert stats.num_stale_proposals == num_stale
        assert sequence.is_awaited == (base != len(sequence.token_ids))

    @pytest.mark.parametrize(
        ("committed", "tree", "main_path"),
        [([4], [5, 6], [5]), ([7], [8], [8]), ([4, 6], [], []), ([8], [], [])],
    )
    @pytest.mark.parametrize("is_tree_wanted", [True, False])
    def test_that_are_trees_leave_the_branch_that_was_taken(
        self,
        committed: list[int],
        tree: list[int],
        main_path: list[int],
        is_tree_wanted: bool,
        sequence: SpeculativeSequence,
        stats: CoordinatorStats,
    ) -> None:
        """Two branches, 4 with the children 5 and 6, and 7 with the child 8."""
        sequence.asked(K, (-1, -1, 0) if is_tree_wanted else None, NOW)
        commits(sequence, *committed)
        sequence.answered(Proposal(WIRE_ID, 3, [4, 7, 5, 6, 8], [-1, -1, 0, 0, 1]), NOW, stats)
        assert list(sequence.drafts(K).token_ids) == (tree if is_tree_wanted else main_path)

    def test_that_come_in_parts_are_awaited_until_they_are_whole(
        self, sequence: SpeculativeSequence, stats: CoordinatorStats
    ) -> None:
        sequence.answered(Proposal(WIRE_ID, 3, [4, 14], [-1, -1], is_whole=False), NOW, stats)
        assert sequence.is_awaited
        assert sequence.drafts(K) == Drafts([4])
        sequence.answered(Proposal(WIRE_ID, 3, [5, 6], [0, 2], start=2), NOW, stats)
        assert not sequence.is_awaited
        assert sequence.drafts(K) == Drafts([4, 5, 6])
        sequence.answered(Proposal(WIRE_ID, 3, [7, 15], [3, 1], start=4), NOW, stats)
        assert sequence.num_ready == min(K, 4)

    def test_whose_next_part_is_missing_stay_as_they_were(
        self, sequence: SpeculativeSequence, stats: CoordinatorStats
    ) -> None:
        sequence.answered(Proposal(WIRE_ID, 3, [4]), NOW, stats)
        for base, start in ((3, 2), (4, 1)):
            sequence.answered(Proposal(WIRE_ID, base, [9], start=start), NOW, stats)
        assert sequence.drafts(K) == Drafts([4])
        assert stats.num_stale_proposals == 0

    def test_that_ran_ahead_of_an_outcome_are_not_awaited_after_it(
        self, sequence: SpeculativeSequence, stats: CoordinatorStats
    ) -> None:
        sequence.answered(Proposal(WIRE_ID, 3, [4, 5, 6, 7]), NOW, stats)
        commits(sequence, 4, 5)
        sequence.advance(2, None, NOW)
        assert not sequence.is_awaited
        assert sequence.drafts(2) == Drafts([6, 7])
        commits(sequence, 99)
        sequence.advance(2, None, NOW)
        assert sequence.is_awaited
        assert sequence.drafts(K) == Drafts()

    def test_serve_several_rounds_as_long_as_they_come_true(
        self, sequence: SpeculativeSequence, stats: CoordinatorStats
    ) -> None:
        sequence.answered(Proposal(WIRE_ID, 3, [4, 5, 6]), NOW, stats)
        assert sequence.drafts(0) == Drafts()
        assert sequence.drafts(2) == Drafts([4, 5])
        commits(sequence, 4)
        assert sequence.drafts(K) == Drafts([5, 6])
        commits(sequence, 9)
        assert sequence.drafts(K) == Drafts()
        assert sequence.proposal is None

    def test_are_cut_to_the_window_that_was_granted(
        self, sequence: SpeculativeSequence, stats: CoordinatorStats
    ) -> None:
        sequence.answered(Proposal(WIRE_ID, 3, list(range(4, 4 + WINDOW + 2))), NOW, stats)
        assert list(sequence.drafts(100).token_ids) == list(range(4, 4 + WINDOW))
        assert stats.num_excess_token_ids == 2

    def test_say_what_the_drafter_has_been_told(self, sequence: SpeculativeSequence, stats: CoordinatorStats) -> None:
        commits(sequence, 4, 5, 9)
        sequence.answered(Proposal(WIRE_ID, 5, [6]), NOW, stats)  # is of no use, but says this
        assert sequence.num_acknowledged == 5
        sequence.answered(Proposal(WIRE_ID, 4, [5, 9]), NOW, stats)  # older
        assert sequence.num_acknowledged == 5


class TestLateOnes:
    def test_that_trail_behind_get_a_new_budget_for_the_rest(
        self, sequence: SpeculativeSequence, stats: CoordinatorStats
    ) -> None:
        sequence.gave_up()
        commits(sequence, 9)
        sequence.asked(K, None, NOW + 1)
        sequence.answered(Proposal(WIRE_ID, 3, [4, 5]), NOW + 2, stats)  # the answer to what was asked first
        assert (sequence.is_awaited, sequence.awaited_since) == (True, NOW + 2)

    def test_that_are_not_late_keep_theirs(self, sequence: SpeculativeSequence, stats: CoordinatorStats) -> None:
        commits(sequence, 9)
        sequence.asked(K, None, NOW + 1)
        sequence.answered(Proposal(WIRE_ID, 3, [4, 5]), NOW + 2, stats)
        assert (sequence.is_awaited, sequence.awaited_since) == (True, NOW + 1)

    def test_that_say_nothing_new_stay_late(self, sequence: SpeculativeSequence, stats: CoordinatorStats) -> None:
        sequence.gave_up()
        sequence.answered(Proposal(WIRE_ID, 2, [3, 4]), NOW + 2, stats)
        assert sequence.is_late


@pytest.mark.parametrize(
    ("depth", "max_len", "useful"), [(4, 100, 4), (4, 8, 4), (4, 7, 3), (4, 4, 0), (4, 3, 0), (0, 100, 0)]
)
def test_drafts_are_useful_as_far_as_the_bonus_token_leaves_room(depth: int, max_len: int, useful: int) -> None:
    sequence = replace(new_sequence(), max_len=max_len)  # of three tokens
    sequence.planned(depth, None)
    assert sequence.useful_depth == useful
