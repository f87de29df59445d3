"""Programs of versions next to each other work together: what older ones send is read as it was meant."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from cluster.errors import InvalidRequestError
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.wire.codec import decode_reply, decode_request, decode_sampling
from cluster.wire.messages import Advance, Open, Proposal, SpeculateReply, SpeculateRequest, Timing
from cluster.wire.replies import CallReply, RoundCounts, decode_replies
from protos.speculation.v1 import draft_pb2, target_pb2, types_pb2

RECORDS = sorted(path for path in (Path(__file__).parent / "recorded").iterdir() if path.is_dir())
# Nobody called this RPC but tests; its messages went with it.
REMOVED = {"GenerateReply", "SpeculationCounts", "Target.Generate"}

SAMPLING = SamplingParams(
    temperature=0.7,
    top_k=50,
    top_p=0.95,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    logit_bias=((7, -100.0), (4294967295, 2.5)),
)
GREEDY = SamplingParams(temperature=0.0)

pytestmark = pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.name)


def read(record: Path, name: str, into):
    entry = json.loads((record / "messages.json").read_text())[name]
    assert entry["type"] == into.DESCRIPTOR.full_name
    return into.FromString(bytes.fromhex(entry["hex"]))


def test_a_coordinators_messages(record: Path):
    assert decode_request(read(record, "speculate_request", draft_pb2.SpeculateRequest)) == SpeculateRequest(
        opens={
            2**64 - 1: Open(2**64 - 1, [5, 6, 4095], 2, SAMPLING, NoiseKey(2**63 + 1, 17), 4, 10, (-1, 0, 0)),
            9: Open(9, [1], 1, GREEDY, NoiseKey(1, 2), 0, 34, None),
        },
        advances={11: Advance(11, 100, [300, 301], 5, None), 12: Advance(12, 7, [], 0, (-1, -1))},
        closes={13, 14},
    )
    of_chains = read(record, "speculate_request_of_chains", draft_pb2.SpeculateRequest)
    assert decode_request(of_chains) == SpeculateRequest(advances={1: Advance(1, 2, [3], 4, None)})


def test_a_draft_workers_messages(record: Path):
    reply = decode_reply(read(record, "speculate_reply", draft_pb2.SpeculateReply))
    assert reply == SpeculateReply(
        proposals={21: Proposal(21, 40, [1, 2, 3], [-1, 0, 0]), 22: Proposal(22, 41, [4, 5], None)},
        lost={23},
        refused={24, 25},
    )
    assert reply.timing == Timing(0.0015, 0.0008, 2)
    assert reply.credit == 123456
    of_chains = decode_reply(read(record, "speculate_reply_of_chains", draft_pb2.SpeculateReply))
    assert of_chains == SpeculateReply(proposals={21: Proposal(21, 40, [1, 2], None)})
    assert of_chains.timing is None
    assert of_chains.credit is None


def test_a_routers_messages(record: Path):
    commands = read(record, "generate_commands", target_pb2.GenerateCommands)
    (start,) = commands.start
    request = start.request
    assert (start.call, commands.cancel) == (31, [32, 33])
    assert (request.request_id, request.prompt_token_ids, request.num_generated_tokens) == ("cmpl-1", [9, 8, 7], 1)
    assert (request.seed, request.choice_index, request.max_tokens) == (-(2**63), 1, 64)
    assert request.ignore_eos
    assert request.HasField("num_speculative_tokens")
    assert request.num_speculative_tokens == 0
    assert decode_sampling(request.sampling) == SAMPLING


def test_a_targets_messages(record: Path):
    replies = decode_replies(read(record, "generate_replies", target_pb2.GenerateReplies))
    refused = replies.pop(42)
    assert replies == {
        41: CallReply([70, 71], rounds=[RoundCounts(4, 1), RoundCounts(3, 0, 2)]),
        43: CallReply([72], target_pb2.FINISH_REASON_STOP, rounds=[RoundCounts(5, 5)]),
    }
    assert isinstance(refused.error, InvalidRequestError)
    assert (refused.error.message, refused.error.param) == ("the prompt is empty", "prompt")


def test_descriptions(record: Path):
    draft = read(record, "draft_description", draft_pb2.DraftDescription)
    target = read(record, "target_description", target_pb2.TargetDescription)
    model = read(record, "model_description", types_pb2.ModelDescription)
    assert model == target.model == draft.model
    assert (model.name, model.tokenizer_fingerprint) == ("outrider-target-12m", "ab" * 32)
    assert (model.vocab_size, model.max_model_len, model.dtype) == (4096, 2048, "bfloat16")
    for load in (draft.load, target.load):
        assert (load.num_running, load.num_waiting, load.num_used_blocks, load.num_blocks) == (3, 2, 90, 2**33)
    assert (draft.epoch, target.epoch) == (2**64 - 2, 2**64 - 1)
    assert (target.num_speculative_tokens, target.max_speculative_tokens) == (4, 16)
    assert (target.num_draft_links, target.num_draft_links_configured, target.eos_token_ids) == (1, 2, [0, 2])


def test_what_an_older_worker_does_not_say_is_unknown_and_nothing_bad(record: Path):
    draft = read(record, "draft_description", draft_pb2.DraftDescription)
    target = read(record, "target_description", target_pb2.TargetDescription)
    for description in (draft, target):
        assert not description.is_draining
        assert description.advertised_address == ""
        assert description.wire_version == 0
    assert not target.is_stuck
    assert not target.traits


Number = tuple[str, int]  # of a field or an enum's value: whose, and which


def numbered(files: Iterable[descriptor_pb2.FileDescriptorProto]) -> dict[Number, tuple[object, ...]]:
    """Returns the meaning of each number, its name first."""
    meanings: dict[Number, tuple[object, ...]] = {}
    for file in files:
        for message in messages_of(file):
            for field in message.field:
                meaning = (field.name, field.type, field.label, field.type_name, field.proto3_optional)
                meanings[message.name, field.number] = meaning
        for enum in file.enum_type:
            meanings |= {(enum.name, value.number): (value.name,) for value in enum.value}
    return meanings


def messages_of(file: descriptor_pb2.FileDescriptorProto) -> Iterator[descriptor_pb2.DescriptorProto]:
    for message in file.message_type:
        assert not [nested for nested in message.nested_type if not nested.options.map_entry]
        yield message


def reserved(files: Iterable[descriptor_pb2.FileDescriptorProto]) -> set[tuple[str, int, str]]:
    """Numbers and names that nothing may have again."""
    messages = [(message, 0) for file in files for message in file.message_type]
    enums = [(enum, 1) for file in files for enum in file.enum_type]  # the ends of whose ranges belong to them
    return {
        (holder.name, number, name)
        for holder, past_end in [*messages, *enums]
        for one in holder.reserved_range
        for number in range(one.start, one.end + past_end)
        for name in holder.reserved_name
    }


def methods(files: Iterable[descriptor_pb2.FileDescriptorProto]) -> dict[str, tuple[object, ...]]:
    return {
        f"{service.name}.{method.name}": (
            *(method.input_type, method.output_type),
            *(method.client_streaming, method.server_streaming),
        )
        for file in files
        for service in file.service
        for method in service.method
    }


def recorded(record: Path) -> Sequence[descriptor_pb2.FileDescriptorProto]:
    return descriptor_pb2.FileDescriptorSet.FromString((record / "descriptors.bin").read_bytes()).file


def todays() -> list[descriptor_pb2.FileDescriptorProto]:
    files = [descriptor_pb2.FileDescriptorProto() for _ in range(3)]
    for module, file in zip((types_pb2, draft_pb2, target_pb2), files, strict=True):
        module.DESCRIPTOR.CopyToProto(file)
    return files


def test_no_number_has_another_meaning(record: Path):
    before, today = numbered(recorded(record)), numbered(todays())
    assert len(before) > 80
    kept = before.keys() & today.keys()
    assert {number: today[number] for number in kept} == {number: before[number] for number in kept}


def test_what_is_gone_is_reserved(record: Path):
    gone = {(holder, number): name for (holder, number), (name, *_) in numbered(recorded(record)).items()}
    gone = {key: name for key, name in gone.items() if key not in numbered(todays()) and key[0] not in REMOVED}
    assert {(*key, name) for key, name in gone.items()} <= reserved(todays())


def test_no_call_has_changed(record: Path):
    before, today = methods(recorded(record)), methods(todays())
    assert {name: call for name, call in before.items() if name not in REMOVED} == {
        name: call for name, call in today.items() if name in before
    }
