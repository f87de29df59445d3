from __future__ import annotations

from dataclasses import replace

from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.wire.messages import Advance, Open, Proposal, SpeculateReply, SpeculateRequest


def opening(name: int) -> Open:
    return Open(name, [1, 2], 2, SamplingParams(), NoiseKey(0, 0), 4, 10)


def advance(name: int, *tokens: int) -> Advance:
    return Advance(name, 2, tokens, 4)


class TestMerge:
    def test_a_later_advance_stands_for_both(self) -> None:
        request = SpeculateRequest(advances={1: advance(1, 7), 2: advance(2, 5)})
        request.merge(SpeculateRequest(advances={1: advance(1, 7, 8)}))
        assert request == SpeculateRequest(advances={1: advance(1, 7, 8), 2: advance(2, 5)})

    def test_an_opening_waits_with_its_advance(self) -> None:
        request = SpeculateRequest(opens={1: opening(1)})
        request.merge(SpeculateRequest(opens={2: opening(2)}, advances={1: advance(1, 7)}))
        assert request == SpeculateRequest(opens={1: opening(1), 2: opening(2)}, advances={1: advance(1, 7)})

    def test_a_close_takes_away_what_waits_for_its_sequence(self) -> None:
        request = SpeculateRequest(opens={1: opening(1), 2: opening(2)}, advances={1: advance(1, 7)}, closes={9})
        request.merge(SpeculateRequest(closes={1}))
        assert request == SpeculateRequest(opens={2: opening(2)}, closes={1, 9})

    def test_a_later_proposal_replaces_the_earlier(self) -> None:
        reply = SpeculateReply(proposals={1: Proposal(1, 2, [7]), 2: Proposal(2, 2, [8])}, lost={3}, refused={5})
        reply.merge(SpeculateReply(proposals={1: Proposal(1, 4, [9])}, lost={4}, refused={6}))
        assert reply == SpeculateReply(
            proposals={1: Proposal(1, 4, [9]), 2: Proposal(2, 2, [8])}, lost={3, 4}, refused={5, 6}
        )

    def test_only_an_empty_message_is_false(self) -> None:
        assert not SpeculateRequest()
        assert not SpeculateReply()
        assert SpeculateRequest(opens={1: opening(1)})
        assert SpeculateRequest(advances={1: advance(1)})
        assert SpeculateRequest(closes={1})
        assert SpeculateReply(proposals={1: Proposal(1, 0, [])})
        assert SpeculateReply(lost={1})
        assert SpeculateReply(refused={1})


class TestParts:
    def test_the_oldest_opening_goes_first_and_then_the_shortest(self) -> None:
        lengths = {1: 50, 2: 900, 3: 30, 4: 20, 5: 40}
        openings = {name: replace(opening(name), token_ids=[1] * length) for name, length in lengths.items()}
        request = SpeculateRequest(dict(openings), {3: advance(3, 7), 2: advance(2, 8), 9: advance(9, 5)}, {8})
        part = request.take_part(100)
        assert part == SpeculateRequest(
            {1: openings[1], 4: openings[4], 3: openings[3]}, {3: advance(3, 7), 9: advance(9, 5)}, {8}
        )
        request.merge(SpeculateRequest(advances={2: advance(2, 8, 9)}))
        assert request.take_part(100) == SpeculateRequest({2: openings[2]}, {2: advance(2, 8, 9)})
        assert request.take_part(100) == SpeculateRequest({5: openings[5]})
        assert not request

    def test_what_is_short_goes_as_it_is(self) -> None:
        whole = SpeculateRequest({1: opening(1), 2: opening(2)}, {1: advance(1, 7)}, {3})
        request = replace(whole, opens=dict(whole.opens), advances=dict(whole.advances), closes=set(whole.closes))
        assert request.take_part(100) == whole
        assert not request
        assert request.take_part(100) == SpeculateRequest()
