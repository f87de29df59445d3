"""Tests of speculation statistics in the answers of clients that ask, and on the metrics page in vLLM's names."""

from __future__ import annotations

import pytest

from services.router.output.speculation_stats import SpeculationStats
from tests.services.router.test_completions import metric

# The scripted target says of every step that it verified four drafts and accepted three.
STATS_OF_FIVE_STEPS = {
    "mean_acceptance_length": 4.0,
    "draft_acceptance_rate": 0.75,
    "acceptance_histogram": [0, 0, 0, 5],
    "num_drafts": 5,
    "num_draft_tokens": 20,
    "num_accepted_tokens": 15,
}


def test_a_completion_has_them_when_asked(router):
    body = router.complete(prompt=[70, 71], max_tokens=5, return_speculation_stats=True).json()
    assert body["choices"][0]["speculation"] == STATS_OF_FIVE_STEPS
    assert "speculation" not in router.complete(prompt=[70], max_tokens=5).json()["choices"][0]


def test_a_chat_has_them_when_asked(router):
    messages = [{"role": "user", "content": "the fox"}]
    body = router.chat(messages=messages, max_tokens=5, return_speculation_stats=True).json()
    assert body["choices"][0]["speculation"] == STATS_OF_FIVE_STEPS


def test_every_choice_has_its_own(router):
    body = router.complete(prompt=[70, 71], n=2, max_tokens=5, return_speculation_stats=True).json()
    assert [choice["speculation"] for choice in body["choices"]] == [STATS_OF_FIVE_STEPS] * 2


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_has_them_at_its_end(router, chat):
    if chat:
        messages = [{"role": "user", "content": "the fox"}]
        events = router.stream_chat(messages=messages, max_tokens=5, return_speculation_stats=True)
    else:
        events = router.stream(prompt=[70, 71], max_tokens=5, return_speculation_stats=True)
    choices = [event["choices"][0] for event in events[:-1]]
    assert [choice.get("speculation") for choice in choices if choice["finish_reason"]] == [STATS_OF_FIVE_STEPS]
    assert not any("speculation" in choice for choice in choices if not choice["finish_reason"])


VLLMS_OF_FIVE_STEPS = {
    "mean_acceptance_length": 4.0,
    "draft_acceptance_rate": 0.75,
    "acceptance_histogram": [0, 0, 0, 5, 0],
    "num_spec_steps": 5,
    "num_draft_tokens": 20,
    "num_accepted_draft_tokens": 15,
    "num_spec_tokens": 4,
}


@pytest.mark.parametrize("chat", [False, True])
def test_vllms_field_is_in_answers_of_one_choice(router, chat):
    fields = {"messages": [{"role": "user", "content": "the fox"}]} if chat else {"prompt": [70, 71]}
    ask, stream = (router.chat, router.stream_chat) if chat else (router.complete, router.stream)
    assert ask(max_tokens=5, **fields).json()["metrics"] == {"speculative_decoding": VLLMS_OF_FIVE_STEPS}
    *chunks, usage, _ = stream(max_tokens=5, stream_options={"include_usage": True}, **fields)
    assert usage["metrics"] == {"speculative_decoding": VLLMS_OF_FIVE_STEPS}
    assert not any("metrics" in chunk for chunk in chunks)
    assert "metrics" not in ask(max_tokens=5, n=2, **fields).json()


def test_without_drafts_there_are_no_rates():
    stats = SpeculationStats()
    assert stats.to_json()["mean_acceptance_length"] is None
    assert stats.to_json()["draft_acceptance_rate"] is None
    assert stats.to_json()["acceptance_histogram"] == []


def test_accepted_tokens_are_counted_by_position(router):
    router.complete(prompt=[70, 71], max_tokens=5)
    page = router.client.get("/metrics").text.splitlines()
    of_positions = [line for line in page if line.startswith("vllm:spec_decode_num_accepted_tokens_per_pos_total")]
    assert len(of_positions) == 3
    for position in range(3):
        (line,) = [line for line in of_positions if f'position="{position}"' in line]
        assert float(line.rpartition(" ")[2]) == 5
    assert metric(router, "vllm:inter_token_latency_seconds_count") == 4
