"""Tests of the plugin's rounds: the messages about requests, and the drafts to verify. They run without vLLM."""

from __future__ import annotations

import pytest

from cluster.config.speculation import SpeculationConfig
from cluster.coordination.base import LinkState
from cluster.coordination.coordinator import Coordinator
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.vllm.coupling import Coupling
from cluster.vllm.v2.drafting import RemoteDrafting, Stepped
from cluster.wire.messages import Advance, Proposal, SpeculateReply
from tests.cluster.coordination.scripted import LIMITS, VOCAB_SIZE, ScriptedLink, ScriptedPool

K = 3
PROMPT = [1, 2, 3]


class Drafting:
    """A RemoteDrafting with one link, which is up."""

    def __init__(self) -> None:
        self.pool, self.link = ScriptedPool(), ScriptedLink("first")
        config = SpeculationConfig(controller="fixed", num_speculative_tokens=K, max_speculative_tokens=K)
        self.drafting = RemoteDrafting(Coordinator(self.pool, config, VOCAB_SIZE, LIMITS, self.pool.clock))
        self.pool.happens(self.link, LinkState.UP)
        self.drafting.after_step([])

    def add(self, request_id: str, k: int | None = None, generated: list[int] | None = None) -> None:
        coupling = Coupling(SamplingParams(top_k=7), NoiseKey(1, 2), len(PROMPT), k)
        self.drafting.add(request_id, [*PROMPT, *(generated or [])], len(PROMPT), 100, coupling)

    def proposes(self, wire_id: int, base: int, *tokens: int) -> None:
        self.pool.happens(self.link, SpeculateReply(proposals={wire_id: Proposal(wire_id, base, tokens)}))

    def after(self, request_id: str, *tokens: int, num_verified: int = 0) -> list[int]:
        """A step of one request."""
        return list(self.drafting.after_step([Stepped(request_id, tokens, num_verified)]).get(request_id, ()))

    def counted(self) -> tuple[float, float, float]:
        """Rounds, draft tokens, accepted ones."""
        values = {reading.name: reading.value for reading in self.drafting.readings()}
        rounds, drafted, accepted = (f"vllm:spec_decode_num_{n}" for n in ("drafts", "draft_tokens", "accepted_tokens"))
        return values[rounds], values[drafted], values[accepted]


@pytest.fixture
def drafting() -> Drafting:
    return Drafting()


def test_prompts_are_opened_before_their_first_step(drafting: Drafting) -> None:
    drafting.add("a", generated=[9])
    drafting.drafting.opened()
    (message,) = drafting.link.take_sent()
    (opening,) = message.opens.values()
    assert (opening.token_ids, opening.num_prompt_tokens) == ([*PROMPT, 9], len(PROMPT))
    assert (opening.params.top_k, opening.noise_key, opening.num_speculative_tokens) == (7, NoiseKey(1, 2), K)


def test_nothing_is_drafted_while_the_prompt_is_computed(drafting: Drafting) -> None:
    drafting.add("a")
    drafting.drafting.opened()
    drafting.proposes(1, 3, 4, 5, 6)
    assert drafting.after("a") == []
    assert drafting.after("a", 4) == [5, 6]


def test_rounds(drafting: Drafting) -> None:
    drafting.add("a")
    drafting.drafting.opened()
    drafting.link.take_sent()
    drafting.proposes(1, 4, 5, 6, 7)
    assert drafting.after("a", 4) == [5, 6, 7]
    assert drafting.link.take_sent()[0].advances == {1: Advance(1, 3, [4], K)}
    drafting.proposes(1, 6, 10, 11, 12)
    assert drafting.after("a", 5, 9, num_verified=3) == [10, 11, 12]
    assert drafting.counted() == (1, 3, 1)


def test_only_drafts_that_were_in_the_step_are_counted(drafting: Drafting) -> None:
    """vLLM may leave some out; and what fills a step up may come true."""
    drafting.add("a")
    drafting.drafting.opened()
    drafting.proposes(1, 4, 5, 6, 7)
    drafting.after("a", 4)
    drafting.after("a", 5, 6, num_verified=1)
    assert drafting.counted() == (1, 1, 1)
    drafting.after("a", 7, 7, 7, 7, num_verified=3)  # the 7 that was left of the proposal, and filling
    assert drafting.counted() == (2, 2, 2)


def test_a_request_without_drafts_is_told_to_nobody(drafting: Drafting) -> None:
    drafting.add("a", k=0)
    drafting.drafting.opened()
    assert drafting.after("a", 4) == []
    assert drafting.link.take_sent() == []


def test_the_last_one_is_closed_at_once_others_with_the_next_step(drafting: Drafting) -> None:
    drafting.add("a")
    drafting.add("b")
    drafting.drafting.opened()
    drafting.link.take_sent()
    drafting.drafting.remove("a")
    assert drafting.link.take_sent() == []
    drafting.drafting.after_step([])
    assert drafting.link.take_sent()[0].closes == {1}
    drafting.drafting.remove("b")
    assert drafting.link.take_sent()[0].closes == {2}
    drafting.drafting.remove("b")


def test_requests_that_it_was_never_told_of_have_no_drafts(drafting: Drafting) -> None:
    assert drafting.after("vLLM's own", 4) == []
