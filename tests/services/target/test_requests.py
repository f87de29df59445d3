"""Requests on the wire have the bounds of the HTTP API.

The fields are those of the message, so a new one is covered by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from cluster.constraints import MAX_BAD_WORD_CHARACTERS, MAX_BAD_WORDS, MAX_STOP_TOKENS
from cluster.errors import InvalidRequestError
from cluster.speculation.params import SamplingParams
from cluster.wire.codec import encode_sampling
from protos.speculation.v1 import target_pb2
from services.target.requests import to_engine
from tests.services.target.test_servicer import HandDrivenTarget

TARGET = HandDrivenTarget()
NUM_ENTRIES = 1_000_001  # of a list: more than any request of the HTTP API has
# Fields of the HTTP API that refusals name.
NAMES = {
    "prompt_token_ids": "max_tokens",
    "sampling.logit_bias_token_ids": "logit_bias",
    "sampling.logit_bias_values": "logit_bias",
}
EXTREMES = {
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**31, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**63, 2**64 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: (-1e308, 1e308, float("inf"), float("nan")),
}


def request() -> target_pb2.GenerateRequest:
    return target_pb2.GenerateRequest(prompt_token_ids=[1, 2], max_tokens=5, sampling=encode_sampling(SamplingParams()))


def fields_of(message: Message, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldDescriptor]]:
    """Yields the path and the descriptor of each field of `message` and of the messages in it."""
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None and not field.is_repeated:
            yield from fields_of(getattr(message, field.name), (*path, field.name))
        else:
            yield (*path, field.name), field


FIELDS = [(".".join(path), path, field) for path, field in fields_of(request())]
LISTS = [(name, path) for name, path, field in FIELDS if field.is_repeated]
NUMBERS = [
    (name, path, value)
    for name, path, field in FIELDS
    if not field.is_repeated
    for value in EXTREMES.get(field.cpp_type, ())
]


def holder(message: Message, path: tuple[str, ...]) -> Message:
    for name in path[:-1]:
        message = getattr(message, name)
    return message


@pytest.mark.parametrize(("name", "path"), LISTS, ids=[name for name, _ in LISTS])
def test_a_list_has_a_limit(name: str, path: tuple[str, ...]) -> None:
    sent = request()
    entries = getattr(holder(sent, path), path[-1])
    is_of_messages = hasattr(entries, "add")
    entries.extend([target_pb2.TokenIds(token_ids=[1]) if is_of_messages else 1] * NUM_ENTRIES)
    with pytest.raises(InvalidRequestError, match=NAMES.get(name, path[-1])):
        to_engine(sent, "id", TARGET, 8)


@pytest.mark.parametrize(("name", "path", "value"), NUMBERS, ids=[f"{name}={value}" for name, _, value in NUMBERS])
def test_an_extreme_is_taken_or_refused(name: str, path: tuple[str, ...], value: float) -> None:
    sent = request()
    setattr(holder(sent, path), path[-1], value)
    try:
        taken = to_engine(sent, "id", TARGET, 8)
    except InvalidRequestError:
        return
    assert taken.constraints.min_tokens < 2**31


def test_a_bad_word_has_a_limit() -> None:
    sent = request()
    sent.constraints.bad_words.add(token_ids=[1] * (4 * MAX_BAD_WORD_CHARACTERS + 2))
    with pytest.raises(InvalidRequestError, match="bad_words"):
        to_engine(sent, "id", TARGET, 8)


def test_what_a_router_adds_is_taken() -> None:
    """A router encodes each bad word in two ways, and adds the token that ends a turn."""
    sent = request()
    sent.stop_token_ids.extend(range(MAX_STOP_TOKENS + 1))
    for _ in range(2 * MAX_BAD_WORDS):
        sent.constraints.bad_words.add(token_ids=[1] * (4 * MAX_BAD_WORD_CHARACTERS + 1))
    taken = to_engine(sent, "id", TARGET, 8)
    assert (len(taken.stop_token_ids), len(taken.constraints.bad_words)) == (MAX_STOP_TOKENS + 1, 2 * MAX_BAD_WORDS)
