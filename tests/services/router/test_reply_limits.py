"""Limits of replies, by what the calls asked for, and of descriptions."""

from __future__ import annotations

import math

import pytest

from cluster.logprobs import TokenLogprobs
from cluster.wire.parsing import parse
from cluster.wire.replies import CallReply, RoundCounts
from protos.speculation.v1 import target_pb2, types_pb2
from services.router.output.logprobs import LogprobsFormat
from services.router.targets.reply_limits import ReplyLimits, check_description

REQUEST = target_pb2.GenerateRequest(
    prompt_token_ids=range(7), max_tokens=6, num_generated_tokens=2, num_logprobs=1, num_prompt_logprobs=0
)


@pytest.mark.parametrize(
    "reply",
    [
        CallReply([1, 2, 3, 4], rounds=[RoundCounts(4, 3)], logprobs=TokenLogprobs(1, [1], [-1.0], [5], [-1.0])),
        CallReply([99], num_cached_tokens=2**32 - 1),
        CallReply(prompt_logprobs=TokenLogprobs(0, [1] * 6, [-0.5] * 6)),
    ],
)
def test_replies_that_were_asked_for_are_taken(reply):
    ReplyLimits(REQUEST, 100).check(reply)


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (CallReply([1] * 5), "more tokens"),
        (CallReply([100]), "outside of the vocabulary"),
        (CallReply([1], rounds=[RoundCounts(4, 5)]), "4 drafts, 5 accepted"),
        (CallReply([1], rounds=[RoundCounts(2**32 - 1, 0)]), "4294967295 drafts"),
        (
            CallReply([1], logprobs=TokenLogprobs(50, [1], [-1.0], [0] * 50, [0.0] * 50)),
            "50 alternatives",
        ),
        (CallReply([1], logprobs=TokenLogprobs(0, [1], [-1.0])), "0 alternatives"),
        (CallReply(prompt_logprobs=TokenLogprobs(0, [1] * 8, [-0.5] * 8)), "of its prompt"),
    ],
)
def test_others_are_unusable(reply, problem):
    with pytest.raises(ValueError, match=problem):
        ReplyLimits(REQUEST, 100).check(reply)


def test_the_tokens_of_all_replies_count():
    limits = ReplyLimits(REQUEST, None)
    for _ in range(4):
        limits.check(CallReply([2**31]))
    with pytest.raises(ValueError, match="more tokens"):
        limits.check(CallReply([1]))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model": types_pb2.ModelDescription(vocab_size=10)}, "its context 0"),
        ({"model": types_pb2.ModelDescription(max_model_len=10)}, "0 tokens"),
        ({"traits": {str(number): "" for number in range(65)}}, "65 traits"),
        ({"eos_token_ids": range(2000)}, "2000 end tokens"),
    ],
)
def test_descriptions_of_no_worker_are_unusable(changes, problem):
    usable = {"model": types_pb2.ModelDescription(vocab_size=10, max_model_len=10)}
    check_description(target_pb2.TargetDescription(**usable))
    with pytest.raises(ValueError, match=problem):
        check_description(target_pb2.TargetDescription(**(usable | changes)))


def test_bytes_that_are_no_message_are_a_value_error():
    assert parse(target_pb2.GenerateReplies, b"") == target_pb2.GenerateReplies()
    with pytest.raises(ValueError, match="no GenerateReplies"):
        parse(target_pb2.GenerateReplies, b"\xff")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_log_probabilities_that_json_does_not_have_become_the_least(tokenizer, value):
    written = LogprobsFormat(tokenizer).chat([70], TokenLogprobs(0, [1], [value]))
    assert written["content"][0]["logprob"] == -9999.0
