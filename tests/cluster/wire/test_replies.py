"""The columns of `GenerateReplies`: what is put in comes out, and what does not fit together is refused."""

from __future__ import annotations

import pytest

from cluster.errors import InternalError, InvalidRequestError, OverloadedError, UnavailableError
from cluster.wire.replies import CallReply, RoundCounts, decode_replies, encode_replies
from protos.speculation.v1 import target_pb2

STOP, LENGTH = target_pb2.FINISH_REASON_STOP, target_pb2.FINISH_REASON_LENGTH
ROUNDS = [RoundCounts(4, 3), RoundCounts(4, 0, 4)]


def on_the_wire(message: target_pb2.GenerateReplies) -> target_pb2.GenerateReplies:
    return target_pb2.GenerateReplies.FromString(message.SerializeToString())


@pytest.mark.parametrize(
    "replies",
    [
        {},
        {3: CallReply([1])},
        {3: CallReply([1, 2]), 2**63: CallReply([2**32 - 1]), 0: CallReply([7], LENGTH)},
        {3: CallReply([], STOP), 1: CallReply([5, 6], rounds=ROUNDS), 2: CallReply([9], LENGTH)},
        {3: CallReply([1]), 1: CallReply([5], num_cached_tokens=7)},
    ],
)
def test_a_round_trip(replies):
    decoded = decode_replies(on_the_wire(encode_replies(replies)))
    for reply in (*decoded.values(), *replies.values()):
        reply.rounds = list(reply.rounds)
    assert decoded == replies
    assert list(decoded) == list(replies)


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError("no", param="prompt"),
        InvalidRequestError("no"),
        OverloadedError("full"),
        UnavailableError("gone"),
        InternalError("broken"),
    ],
)
def test_an_error_keeps_its_kind_its_words_and_its_field(error):
    replies = decode_replies(on_the_wire(encode_replies({1: CallReply([8]), 2: CallReply([9], error=error)})))
    got = replies[2].error
    assert (type(got), got.message, got.param) == (type(error), error.message, error.param)
    assert replies[2].token_ids == [9]
    assert replies[1] == CallReply([8])


def test_merged_replies_keep_every_token_and_every_round():
    reply = CallReply([1, 2], rounds=(RoundCounts(4, 1),))
    reply.merge(CallReply([3]))
    reply.merge(CallReply([4, 5, 6], LENGTH, rounds=(RoundCounts(2, 2),)))
    assert reply == CallReply([1, 2, 3, 4, 5, 6], LENGTH, rounds=[RoundCounts(4, 1), RoundCounts(2, 2, 3)])


def test_where_rounds_begin_is_told_where_plain_decodes_are_between_them():
    replies = {1: CallReply([1, 2], rounds=[RoundCounts(4, 1)]), 2: CallReply([3])}
    assert not encode_replies(replies).round_starts
    two = [RoundCounts(4, 1), RoundCounts(4, 0, 2)]  # the second begins after the first one's two tokens
    assert not encode_replies({3: CallReply([1, 2, 3], rounds=two)}).round_starts
    replies[2].merge(CallReply([4, 5], rounds=[RoundCounts(2, 1)]))
    replies[2].merge(CallReply([6]))
    message = on_the_wire(encode_replies(replies))
    assert message.round_starts == [0, 1]
    decoded = decode_replies(message)
    assert decoded[1].rounds == [RoundCounts(4, 1, 0)]
    assert decoded[2].rounds == [RoundCounts(2, 1, 1)]


def test_what_is_not_there_takes_no_room():
    assert encode_replies({1: CallReply([7]), 2: CallReply([8])}).ByteSize() == 3 * (2 + 2)
    few = encode_replies({call: CallReply([300]) for call in range(100)})
    assert few.ByteSize() < 100 * (1 + 1 + 2) + 12


@pytest.mark.parametrize(
    "columns",
    [
        {"calls": [1], "num_tokens": [1, 1], "token_ids": [1, 2]},
        {"calls": [1], "num_tokens": [2], "token_ids": [1]},
        {"calls": [1], "num_tokens": [0], "finished": [1]},
        {"calls": [1], "num_tokens": [0], "finished": [2], "finish_reasons": [STOP]},
        {"calls": [1], "num_tokens": [0], "num_rounds": [1], "num_draft_tokens": [1]},
        {"calls": [1], "num_tokens": [0], "num_rounds": [2], "num_draft_tokens": [1], "num_accepted_tokens": [1]},
        {"calls": [1], "num_tokens": [1], "token_ids": [1], "num_rounds": [1], "num_draft_tokens": [1]}
        | {"num_accepted_tokens": [0], "round_starts": [0, 1]},
        {"errors": [target_pb2.CallError(call=4)]},
    ],
)
def test_columns_that_do_not_fit_together_are_refused(columns):
    with pytest.raises(ValueError, match=r"."):
        decode_replies(target_pb2.GenerateReplies(**columns))
