from __future__ import annotations

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
