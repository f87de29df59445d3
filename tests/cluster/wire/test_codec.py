from __future__ import annotations

import random

import pytest

from cluster.speculation.drafts import is_chain
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.speculation.tree import MAX_NODES
from cluster.wire.codec import (
    decode_reply,
    decode_request,
    decode_sampling,
    encode_reply,
    encode_request,
    encode_sampling,
)
from cluster.wire.messages import Advance, Open, Proposal, SpeculateReply, SpeculateRequest, Timing
from protos.speculation.v1 import draft_pb2, types_pb2

LARGEST_NAME = 2**64 - 1
LARGEST_TOKEN_ID = 2**32 - 1


def random_params(choose: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=choose.random() * 2,
        top_k=choose.choice([0, 1, 50, 2**31]),
        top_p=choose.random(),
        min_p=choose.random(),
        repetition_penalty=0.5 + choose.random(),
        presence_penalty=choose.uniform(-2, 2),
        frequency_penalty=choose.uniform(-2, 2),
        logit_bias=tuple((choose.randrange(2**32), choose.uniform(-100, 100)) for _ in range(choose.randrange(3))),
    )


def random_tokens(choose: random.Random, least: int = 0) -> list[int]:
    return [choose.choice([0, 1, choose.randrange(2**32), LARGEST_TOKEN_ID]) for _ in range(choose.randint(least, 6))]


def random_names(choose: random.Random) -> list[int]:
    names = {choose.choice([1, choose.getrandbits(64), LARGEST_NAME]) for _ in range(choose.randrange(5))}
    return choose.sample(sorted(names), len(names))


def random_shape(choose: random.Random) -> tuple[int, ...] | None:
    return choose.choice([None, (-1, 0, 0, 1), tuple(choose.randrange(-1, node) for node in range(9))])


def random_open(choose: random.Random, name: int) -> Open:
    key = NoiseKey(choose.getrandbits(64), choose.getrandbits(64))
    tokens = random_tokens(choose, least=1)
    num_prompt_tokens, k, shape = choose.randint(1, len(tokens)), choose.randrange(17), random_shape(choose)
    return Open(name, tokens, num_prompt_tokens, random_params(choose), key, k, 34, shape)


def random_request(choose: random.Random) -> SpeculateRequest:
    return SpeculateRequest(
        opens={name: random_open(choose, name) for name in random_names(choose)},
        advances={
            name: Advance(
                name, choose.randrange(2**32), random_tokens(choose), choose.randrange(17), random_shape(choose)
            )
            for name in random_names(choose)
        },
        closes=set(random_names(choose)),
    )


def random_proposal(choose: random.Random, name: int) -> Proposal:
    tokens = random_tokens(choose)
    start = choose.choice([0, 0, 3, 2**20])
    tree = [choose.randrange(-1, node) for node in range(start, start + len(tokens))]
    parents = None if choose.random() < 0.5 or is_chain(tree, start) else tree
    return Proposal(name, choose.randrange(2**32), tokens, parents, start, choose.random() < 0.5)


def random_reply(choose: random.Random) -> SpeculateReply:
    return SpeculateReply(
        proposals={name: random_proposal(choose, name) for name in random_names(choose)},
        lost=set(random_names(choose)),
        refused=set(random_names(choose)),
    )


@pytest.mark.parametrize("seed", range(3))
def test_messages_come_back_as_they_were(seed: int) -> None:
    choose = random.Random(seed)
    for _ in range(200):
        request, reply = random_request(choose), random_reply(choose)
        wire = draft_pb2.SpeculateRequest.FromString(encode_request(request).SerializeToString())
        assert decode_request(wire) == request
        assert list(decode_request(wire).advances) == list(request.advances)  # the order too
        wire_reply = draft_pb2.SpeculateReply.FromString(encode_reply(reply).SerializeToString())
        assert decode_reply(wire_reply) == reply


def test_sampling_parameters_come_back_to_the_bit() -> None:
    choose = random.Random(0)
    for params in [SamplingParams(), *(random_params(choose) for _ in range(50))]:
        wire = types_pb2.SamplingParams.FromString(encode_sampling(params).SerializeToString())
        assert decode_sampling(wire) == params


def test_nothing_is_no_bytes() -> None:
    assert encode_request(SpeculateRequest()).SerializeToString() == b""
    assert encode_reply(SpeculateReply()).SerializeToString() == b""
    assert decode_request(draft_pb2.SpeculateRequest()) == SpeculateRequest()
    assert decode_reply(draft_pb2.SpeculateReply()) == SpeculateReply()


def test_a_round_of_one_sequence_is_a_few_tens_of_bytes() -> None:
    request = SpeculateRequest(advances={70_000: Advance(70_000, 1000, [4095] * 6, 5)})
    reply = SpeculateReply(proposals={70_000: Proposal(70_000, 1006, [4095] * 5)})
    assert encode_request(request).ByteSize() + encode_reply(reply).ByteSize() <= 80


def test_a_chain_costs_no_byte_more_than_its_tokens() -> None:
    chains = SpeculateReply(proposals={1: Proposal(1, 9, [4095] * 5), 2: Proposal(2, 9, [4095])})
    assert not encode_reply(chains).proposals.parents
    beside_a_tree = SpeculateReply(proposals={1: Proposal(1, 9, [5, 6, 7], [-1, -1, 1]), 2: Proposal(2, 9, [8, 9])})
    assert list(encode_reply(beside_a_tree).proposals.parents) == [0, 0, 2, 0, 1]
    assert decode_reply(encode_reply(beside_a_tree)) == beside_a_tree


def test_a_shape_is_sent_once_and_not_at_all_for_chains() -> None:
    chains = SpeculateRequest(advances={name: Advance(name, 9, [5], 4) for name in (1, 2)})
    message = encode_request(chains)
    assert not message.shapes
    assert not message.advance.shapes
    shape = (-1, -1, 0)
    trees = SpeculateRequest(
        opens={7: Open(7, [1], 1, SamplingParams(), NoiseKey(1, 2), 4, 10, shape)},
        advances={1: Advance(1, 9, [5], 4, shape), 2: Advance(2, 9, [5], 4), 3: Advance(3, 9, [5], 4, (-1, -1))},
    )
    message = encode_request(trees)
    assert [list(entry.parents) for entry in message.shapes] == [[0, 0, 1], [0, 0]]
    assert (message.open[0].shape, list(message.advance.shapes)) == (1, [1, 0, 2])
    assert decode_request(message) == trees


@pytest.mark.parametrize(
    ("shapes", "numbers"), [([[0]], [2]), ([], [1]), ([[1]], [1]), ([[0, 3]], [1]), ([[0]], [1, 1])]
)
def test_a_shape_that_is_none_is_refused(shapes: list[list[int]], numbers: list[int]) -> None:
    message = draft_pb2.SpeculateRequest(
        advance=draft_pb2.Advance(sequences=[1], bases=[3], lengths=[0], num_speculative_tokens=[4], shapes=numbers),
        shapes=[draft_pb2.Shape(parents=parents) for parents in shapes],
    )
    with pytest.raises(ValueError, match=r"zip|precedes|does not have"):
        decode_request(message)


def test_shapes_that_nobody_asks_for_are_refused() -> None:
    opening = draft_pb2.Open(sequence=1, token_ids=[5], num_prompt_tokens=1, shape=1)
    opening.sampling.CopyFrom(encode_sampling(SamplingParams()))
    largest = draft_pb2.SpeculateRequest(open=[opening], shapes=[draft_pb2.Shape(parents=[0] * MAX_NODES)])
    assert decode_request(largest).opens[1].shape == (-1,) * MAX_NODES
    with pytest.raises(ValueError, match="65 nodes"):
        decode_request(draft_pb2.SpeculateRequest(open=[opening], shapes=[draft_pb2.Shape(parents=[0] * 65)]))
    with pytest.raises(ValueError, match="2 shapes, more"):
        decode_request(draft_pb2.SpeculateRequest(open=[opening], shapes=[draft_pb2.Shape()] * 2))


def test_a_prompt_longer_than_its_sequence_is_refused() -> None:
    opening = draft_pb2.Open(sequence=1, token_ids=[5], num_prompt_tokens=2**32 - 1)
    opening.sampling.CopyFrom(encode_sampling(SamplingParams()))
    with pytest.raises(ValueError, match="longer than its sequence"):
        decode_request(draft_pb2.SpeculateRequest(open=[opening]))


@pytest.mark.parametrize("parents", [[1, 1], [0, 2], [0], [0, 1, 2]])
def test_parents_that_make_no_tree_are_refused(parents: list[int]) -> None:
    columns = draft_pb2.Proposals(sequences=[1], bases=[3], lengths=[2], token_ids=[7, 8], parents=parents)
    with pytest.raises(ValueError, match=r"precedes|add up"):
        decode_reply(draft_pb2.SpeculateReply(proposals=columns))


@pytest.mark.parametrize(
    "columns",
    [
        {"sequences": [1, 2], "bases": [3], "lengths": [1, 0], "token_ids": [7]},
        {"sequences": [1], "bases": [3, 4], "lengths": [1], "token_ids": [7]},
        {"sequences": [1], "bases": [3], "lengths": [1, 0], "token_ids": [7]},
        {"sequences": [1, 2], "bases": [3, 4], "lengths": [1], "token_ids": [7]},
        {"sequences": [1], "bases": [3], "lengths": [2], "token_ids": [7]},
        {"sequences": [1], "bases": [3], "lengths": [1], "token_ids": [7, 8]},
        {"sequences": [], "bases": [], "lengths": [], "token_ids": [7]},
        {"sequences": [], "bases": [], "lengths": [1], "token_ids": [7]},
    ],
)
def test_columns_that_do_not_fit_together_are_refused(columns: dict[str, list[int]]) -> None:
    with pytest.raises(ValueError, match=r"zip|add up"):
        decode_reply(draft_pb2.SpeculateReply(proposals=draft_pb2.Proposals(**columns)))
    num_speculative_tokens = [4] * len(columns["sequences"])
    advance = draft_pb2.Advance(**columns, num_speculative_tokens=num_speculative_tokens)
    with pytest.raises(ValueError, match=r"zip|add up"):
        decode_request(draft_pb2.SpeculateRequest(advance=advance))


def test_an_advance_without_its_k_is_refused() -> None:
    advance = draft_pb2.Advance(sequences=[1], bases=[3], lengths=[1], token_ids=[7])
    with pytest.raises(ValueError, match="zip"):
        decode_request(draft_pb2.SpeculateRequest(advance=advance))


def test_a_bias_without_its_value_is_refused() -> None:
    with pytest.raises(ValueError, match="2 token IDs and 1 values"):
        decode_sampling(types_pb2.SamplingParams(logit_bias_token_ids=[1, 2], logit_bias_values=[1.0]))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", -1.0),
        ("temperature", 1e39),
        ("top_p", 0.0),
        ("top_p", float("nan")),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-300),
        ("repetition_penalty", 1e39),
        ("presence_penalty", float("-inf")),
        ("frequency_penalty", float("nan")),
        ("frequency_penalty", -1e39),
    ],
)
def test_parameters_that_no_request_may_have_are_refused(field: str, value: float) -> None:
    message = encode_sampling(SamplingParams())
    setattr(message, field, value)
    with pytest.raises(ValueError, match=field):
        decode_sampling(message)


@pytest.mark.parametrize("biases", [[1.0] * 1025, [float("inf")], [1e39], [float("nan")]])
def test_a_bias_beyond_its_bounds_is_refused(biases: list[float]) -> None:
    message = encode_sampling(SamplingParams())
    message.logit_bias_token_ids.extend(range(len(biases)))
    message.logit_bias_values.extend(biases)
    with pytest.raises(ValueError, match="logit_bias"):
        decode_sampling(message)


def test_timing_and_credit_survive_to_the_microsecond() -> None:
    """Replies are compared without them."""
    timing = Timing(held_seconds=0.012_345, step_seconds=0.000_678, batch=3, rows=9, is_first=True)
    decoded = decode_reply(encode_reply(SpeculateReply(timing=timing, credit=0, max_tokens_read=260)))
    assert decoded.timing is not None
    assert decoded.max_tokens_read == 260
    assert (decoded.timing.batch, decoded.timing.rows, decoded.timing.is_first, decoded.credit) == (3, 9, True, 0)
    assert (decoded.timing.held_seconds, decoded.timing.step_seconds) == pytest.approx((0.012_345, 0.000_678))
    longest = decode_reply(encode_reply(SpeculateReply(timing=Timing(1e9, 0.0, 1)))).timing
    assert longest is not None
    assert longest.held_seconds == pytest.approx((2**32 - 1) / 1e6)
