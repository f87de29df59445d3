"""Parts of vLLM's scheduler and sampler that are ours, without an engine."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.lora import LoRAConfig
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from cluster.engine.prompt_pace import PromptPace, PromptPart
from cluster.speculation.acceptance import count_accepted
from cluster.vllm.core.scheduler import CommittedRound, RoundScheduler, _with_held_back
from cluster.vllm.runner.sampling import accepted


def requests(names: str) -> list[SimpleNamespace]:
    return [SimpleNamespace(request_id=name) for name in names]


def test_requests_that_were_held_back_keep_their_places() -> None:
    running = requests("abcdef")
    new = requests("gh")
    scheduled = [running[0], running[3], running[4], *new]  # `f` was preempted, the others are held back
    merged = _with_held_back(running, {"b", "c"}, scheduled)
    assert "".join(request.request_id for request in merged) == "abcdegh"


def test_adapters_of_requests_that_are_held_back_keep_their_slots() -> None:
    """Else others would be admitted in their place, and the next step would have more than vLLM has slots for."""

    def request(name: str, adapter: int | None) -> SimpleNamespace:
        return SimpleNamespace(
            request_id=name, lora_request=None if adapter is None else SimpleNamespace(lora_int_id=adapter)
        )

    running = [request("a", 1), request("b", 2), request("c", None), request("d", 2), request("e", 3)]
    scheduler: Any = SimpleNamespace(vllm_config=SimpleNamespace(lora_config=LoRAConfig(max_loras=3)))

    def num_slots(*held_back: str) -> int:
        limited = RoundScheduler._without_slots_of(scheduler, set(held_back), running)
        assert limited is not None
        return limited.max_loras

    assert num_slots("a") == 2
    assert num_slots("b") == 3  # another with the same is scheduled
    assert num_slots("b", "d", "e") == 1
    assert num_slots("a", "b", "c", "d", "e") == 0
    assert num_slots("c") == scheduler.vllm_config.lora_config.max_loras == 3
    scheduler.vllm_config.lora_config = None
    assert RoundScheduler._without_slots_of(scheduler, {"a"}, running) is None


@pytest.mark.parametrize(
    ("are_prompts", "num_waiting", "num_scheduled", "is_left"),
    [
        ([], 0, 64, False),
        ([False, True], 0, 20, True),  # a part of a prompt that runs
        ([False, False], 1, 64, True),
        ([False, False], 1, 63, False),  # for blocks, or the rest of it was in the prefix cache
        ([False, False, False], 1, 64, False),  # for a slot
    ],
)
def test_prompts_that_a_step_has_no_room_for_are_told(
    are_prompts: list[bool], num_waiting: int, num_scheduled: int, is_left: bool
) -> None:
    scheduler: Any = SimpleNamespace(
        running=[SimpleNamespace(is_prefill_chunk=is_prompt) for is_prompt in are_prompts],
        waiting=[SimpleNamespace()] * num_waiting,
        max_num_running_reqs=3,
        max_num_scheduled_tokens=64,
    )
    assert RoundScheduler._left_prompts(scheduler, num_scheduled) is is_left


def test_accepted_is_the_rule_of_acceptance() -> None:
    rng = random.Random(5)
    for _ in range(200):
        num_drafts = [rng.randrange(0, 6) for _ in range(rng.randrange(1, 7))]
        drafts = [[rng.randrange(3) for _ in range(number)] for number in num_drafts]
        choices = [[rng.randrange(3) for _ in range(number + 1)] for number in num_drafts]
        metadata = SpecDecodeMetadata.make_dummy(drafts, torch.device("cpu"))
        ends = metadata.cu_num_sampled_tokens.tolist()
        starts = [end - number - 1 for end, number in zip(ends, num_drafts, strict=True)]
        rows = [start + i for start, number in zip(starts, num_drafts, strict=True) for i in range(number)]
        metadata.target_logits_indices = torch.tensor(rows, dtype=torch.int32)
        output = accepted(torch.tensor([choice for own in choices for choice in own]), metadata)
        assert output.dtype == torch.int32
        for row, own_drafts, own_choices in zip(output.tolist(), drafts, choices, strict=True):
            committed = own_choices[: count_accepted(own_drafts, own_choices) + 1]
            assert row == committed + [-1] * (len(row) - len(committed))


def test_accepted_drafts_are_counted_up_to_where_the_request_ended() -> None:
    def num_accepted(drafts: list[int], tokens: list[int]) -> int:
        return CommittedRound(SimpleNamespace(), drafts, tokens, None).num_accepted  # type: ignore[arg-type]

    assert num_accepted([4, 5, 6], [4, 5, 9]) == 2
    assert num_accepted([4, 5, 6], [4, 5]) == 2  # the second of them ended it
    assert num_accepted([], [7]) == 0


def test_prompts_keep_to_the_time_that_the_limits_leave() -> None:
    def request(*, is_prompt: bool, num_tokens: int) -> SimpleNamespace:
        return SimpleNamespace(
            request_id=str(num_tokens),
            is_prefill_chunk=is_prompt,
            spec_token_ids=[],
            num_tokens=num_tokens,
            num_computed_tokens=0,
        )

    scheduler: Any = SimpleNamespace(
        running=[request(is_prompt=False, num_tokens=9), request(is_prompt=True, num_tokens=800)],
        waiting=[],
        max_num_running_reqs=8,
        max_num_scheduled_tokens=1000,
        max_drafts=0,
        may_lack_blocks=False,
        scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
        pace=PromptPace(0.050, 1000),
        rounds=SimpleNamespace(spare_seconds=math.inf),
    )
    scheduler.pace.observe(500, [PromptPart(500, 0)], 0.050)
    most = []
    for spare in (math.inf, 0.020):
        scheduler.rounds.spare_seconds = spare
        with RoundScheduler._prompts_in_turn(scheduler, set()):
            most.append(scheduler.scheduler_config.long_prefill_token_threshold)
    assert 0 < most[1] < 0.6 * most[0]
