"""Tests of the coordinator in vLLM's scheduler: its two calls a step, and that no failure reaches the engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.config.speculation import SpeculationConfig
from cluster.coordination.base import LinkState
from cluster.coordination.coordinator import Coordinator
from cluster.engine.prompt_pace import PromptPart
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.vllm.core.scheduler_rounds import CoordinatedRounds, Links
from cluster.vllm.coupling import Coupling
from cluster.wire.messages import Proposal, SpeculateReply, Timing
from tests.cluster.coordination.scripted import LIMITS, VOCAB_SIZE, ScriptedLink, ScriptedPool
from tests.waiting import WAIT_S

PROMPT = [1, 2, 3]
K = 4


class ScriptedLinks:
    """In place of links in a thread."""

    def __init__(self) -> None:
        self.pool = ScriptedPool()
        self.num_resets = 0

    def reset(self) -> None:
        self.num_resets += 1


@dataclass
class Request:
    """Stand-in for vLLM's request, with the fields that the rounds read."""

    request_id: str
    extra_args: dict[str, Any] | None
    all_token_ids: list[int] = field(default_factory=lambda: list(PROMPT))
    num_prompt_tokens: int = len(PROMPT)
    max_tokens: int = 100
    cache_salt: str | None = None

    @property
    def sampling_params(self) -> SimpleNamespace:
        return SimpleNamespace(extra_args=self.extra_args)


@dataclass
class Committed:
    request: Request
    draft_token_ids: list[int]
    token_ids: list[int]
    finish_reason: int | None = None


@pytest.fixture
def links() -> ScriptedLinks:
    return ScriptedLinks()


@pytest.fixture
def link(links: ScriptedLinks) -> ScriptedLink:
    link = ScriptedLink("draft")
    links.pool.happens(link, LinkState.UP)
    return link


@pytest.fixture
def rounds(links: ScriptedLinks) -> CoordinatedRounds:
    speculation = SpeculationConfig(controller="fixed", num_speculative_tokens=K)
    return CoordinatedRounds(links, speculation, VOCAB_SIZE, LIMITS, clock=links.pool.clock)


def request(name: str = "a", k: int | None = None, *, coupled: bool = True) -> Request:
    coupling = Coupling(SamplingParams(temperature=0.7), NoiseKey(1, 2), len(PROMPT), k)
    return Request(name, coupling.to_extra_args() if coupled else None)


def test_a_coupling_comes_out_of_the_arguments_as_it_went_in() -> None:
    params = SamplingParams(temperature=0.7, top_k=3, logit_bias=((1, 2.0),))
    coupling = Coupling(params, NoiseKey(1, 2), 5, 3, b"conversation")
    assert Coupling.of(SimpleNamespace(extra_args=coupling.to_extra_args())) == coupling


def step(
    *committed: Committed, seconds: float = 0.02, prompts: tuple[PromptPart, ...] = (), left_prompts: bool = False
) -> SimpleNamespace:
    num_rows = sum(1 + len(one.draft_token_ids) for one in committed)
    return SimpleNamespace(
        rounds=committed, num_rows=num_rows, seconds=seconds, prompts=prompts, left_prompts=left_prompts
    )


def begin(
    rounds: CoordinatedRounds, decoding: list[Request], joining: list[Request]
) -> Mapping[str, Sequence[int]] | None:
    rounds.plan(decoding, joining)
    return rounds.collect(decoding)


def test_a_round(rounds: CoordinatedRounds, links: ScriptedLinks, link: ScriptedLink) -> None:
    asked = request()
    begin(rounds, [], [])
    rounds.scheduled([asked])
    (message,) = link.take_sent()
    (opening,) = message.opens.values()
    assert (opening.token_ids, opening.params.temperature, opening.num_owed) == (PROMPT, 0.7, K)
    reply = SpeculateReply(proposals={opening.wire_id: Proposal(opening.wire_id, 3, (4, 5, 6, 7))})
    links.pool.happens(link, reply)
    assert begin(rounds, [asked], []) == {"a": (4, 5, 6, 7)}
    asked.all_token_ids += [4, 5, 9]
    rounds.end(step(Committed(asked, [4, 5, 6, 7], [4, 5, 9])))
    (message,) = link.take_sent()
    (advance,) = message.advances.values()
    assert (advance.base, list(advance.token_ids), advance.num_owed) == (3, [4, 5, 9], K)
    rounds.close(asked)
    rounds.end(step())
    (message,) = link.take_sent()
    assert list(message.closes) == [opening.wire_id]


def test_steps_are_told_as_they_were(rounds: CoordinatedRounds, links: ScriptedLinks, link: ScriptedLink) -> None:
    asked, other = request(), request("b", k=0)
    begin(rounds, [], [asked])
    rounds.end(step(seconds=0.03, prompts=(PromptPart(64, 0),)))  # the first of two parts of a prompt
    rounds.end(step())  # nothing ran
    (message,) = link.take_sent()
    (opening,) = message.opens.values()
    timing = Timing(held_seconds=0.001, step_seconds=0.0005, batch=1)
    proposal = Proposal(opening.wire_id, 3, (4, 5, 6, 7))
    links.pool.happens(link, SpeculateReply(proposals={opening.wire_id: proposal}, timing=timing))
    begin(rounds, [asked, other], [])
    links.pool.now += 0.05
    rounds.end(step(Committed(asked, [4, 5, 6, 7], [4, 5, 9]), Committed(other, [], [8])))
    _, (prompt, verify) = rounds.timeline.steps.since(0)
    assert (prompt.seconds, prompt.num_sequences, prompt.num_rows, prompt.has_prompts) == (0.03, 0, 0, True)
    assert (verify.seconds, verify.num_sequences, verify.num_rows, verify.has_prompts) == (0.02, 2, 6, False)
    assert verify.ended_at == links.pool.now
    _, (answer,) = rounds.timeline.answers.since(0)
    assert (answer.held_seconds, answer.batch, answer.num_proposals, answer.draft) == (0.001, 1, 1, link.address)


def test_steps_of_prompts_alone_teach_what_prompts_are(rounds: CoordinatedRounds) -> None:
    asked = request()
    begin(rounds, [], [asked])
    rounds.end(step(prompts=(PromptPart(64, 0),), left_prompts=True))
    rounds.end(step(prompts=(PromptPart(16, 64),), left_prompts=True))
    begin(rounds, [asked], [])
    steps = rounds._coordinator.planner.steps
    assert steps.room_for_drafts(12) == (LIMITS.max_num_batched_tokens - 12) // 2


def test_requests_have_a_k_of_their_own_and_those_of_others_decode_plainly(
    rounds: CoordinatedRounds, link: ScriptedLink
) -> None:
    running = [request("a", k=0), request("b", coupled=False)]
    assert begin(rounds, running, []) == {"a": (), "b": ()}
    assert link.take_sent() == []


def test_a_coordinator_that_fails_ends_the_rounds_and_they_begin_anew(
    rounds: CoordinatedRounds, links: ScriptedLinks, link: ScriptedLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request()
    begin(rounds, [], [asked])

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("seeded")

    with monkeypatch.context() as patched:
        patched.setattr(Coordinator, "collect", fail)
        assert begin(rounds, [asked], []) is None
        for _ in range(3):  # it is not tried again at each step
            assert begin(rounds, [asked], []) is None
            rounds.end(step(Committed(asked, [], [4])))
    assert links.num_resets == 1
    failures = [r for r in rounds.readings() if r.name == "outrider_coordinator_failures"]
    assert [(r.labels["exception"], r.value) for r in failures] == [("ZeroDivisionError", 1)]
    rounds.close(asked)
    links.pool.now += 2.0
    again = ScriptedLink("draft again")
    links.pool.happens(again, LinkState.UP)
    begin(rounds, [request("c")], [])
    (message,) = again.take_sent()
    assert len(message.opens) == 1


def test_what_is_not_in_the_vocabulary_or_too_long_is_dropped(
    rounds: CoordinatedRounds, links: ScriptedLinks, link: ScriptedLink
) -> None:
    asked = request()
    begin(rounds, [], [asked])
    (message,) = link.take_sent()
    (opening,) = message.opens.values()
    wrong = (4, VOCAB_SIZE, *[5] * 200)
    links.pool.happens(link, SpeculateReply(proposals={opening.wire_id: Proposal(opening.wire_id, 3, wrong)}))
    (drafts,) = (begin(rounds, [asked], []) or {}).values()
    assert list(drafts) == [4]
    dropped = {r.labels["reason"]: r.value for r in rounds.readings() if r.name == "outrider_proposals_dropped"}
    assert dropped["vocabulary"] > 0
    assert dropped["excess"] > 0


def test_links_follow_a_file_of_addresses(tmp_path: Path) -> None:
    lists: SimpleQueue[Sequence[str]] = SimpleQueue()

    class Pool(ScriptedPool):
        async def run(self, endpoints: AsyncIterator[Sequence[str]]) -> None:
            async for lines in endpoints:
                lists.put(lines)

    addresses = tmp_path / "drafts"
    addresses.write_text("a:1\n")
    Links(Pool, [f"file:{addresses}"])  # type: ignore[arg-type]
    assert lists.get(timeout=WAIT_S) == ["a:1"]
    addresses.write_text("a:1\nb:2\n")
    assert lists.get(timeout=WAIT_S) == ["a:1", "b:2"]
