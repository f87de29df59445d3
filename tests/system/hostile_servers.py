"""Hostile workers for the fuzzer: a draft worker and a target that send their callers whatever they like.

A target cannot be caught in a plausible lie. So the hostile one lies to requests whose ID contains `VICTIM` only.
All other calls get replies that a router can recognise as unusable, or errors, and must end well on another target.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from cluster.wire.replies import EPOCH_KEY
from protos.speculation.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc, types_pb2
from services.worker import SERVER_OPTIONS
from tests.system.fuzzing import Figures
from tests.system.spoiling import Spoiler

VICTIM = "victim"
VOCABULARY = 2048
_PAUSE_SECONDS = 0.01
_OPTIONS = (*SERVER_OPTIONS, ("grpc.max_send_message_length", -1))
_CODES = [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]
_NUMBERS = (0, 1, 5, 200, 2**31, 2**32 - 1)

Stream = Iterator[bytes]


class HostileServer:
    """Base of the hostile workers. Each stream goes wrong in one of `ways`, chosen by the seed."""

    service: str
    methods: tuple[str, str]  # the method with one answer that describes the worker, and the stream
    ways: tuple[Callable[..., Stream], ...]

    def __init__(self, seed: int, figures: Figures) -> None:
        self._random = random.Random(seed)
        self._figures = figures
        self._server = grpc.server(ThreadPoolExecutor(32), options=_OPTIONS)
        handlers = {
            self.methods[0]: grpc.unary_unary_rpc_method_handler(self._describe),
            self.methods[1]: grpc.stream_stream_rpc_method_handler(self._serve),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(self.service, handlers),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> HostileServer:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()

    def _description(self, source: random.Random) -> Any:
        """Returns what an honest worker would describe."""
        raise NotImplementedError

    def _begin(self, context: grpc.ServicerContext) -> None:
        """Sends the stream's initial metadata."""

    def _spared(self, data: bytes) -> bytes:
        """Returns `data`, or an honest description if `data` would limit what callers may ask of all workers."""
        return data

    def _describe(self, _: bytes, context: grpc.ServicerContext) -> bytes:
        source = random.Random(self._random.getrandbits(64))
        description, spoiler = self._description(source), Spoiler(source)
        way = source.choice(("honest",) * 4 + ("spoiled", "mutated", "huge", "slow", "refused"))
        self._figures.did[f"Describe.{way}"] += 1
        match way:
            case "spoiled":
                spoiler.spoil(description)
            case "mutated":
                return self._spared(spoiler.mutated(description.SerializeToString()))
            case "huge":
                description.model.name = "x" * source.choice((10**5, 3 * 10**6, 2 * 10**7))
            case "slow":
                time.sleep(source.choice((0.3, 2.0)))
            case "refused":
                context.abort(source.choice(_CODES), "a reason\r\n\x1b[2J" * source.choice((1, 300)))
        return self._spared(description.SerializeToString())

    def _serve(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Stream:
        source = random.Random(self._random.getrandbits(64))
        way = source.choice(self.ways)
        self._figures.did[f"{self.methods[1]}.{way.__name__}"] += 1
        self._begin(context)
        deadline = time.monotonic() + source.choice((0.3, 1.5, 6.0))
        for data in way(self, Heard(requests, context), source):
            if time.monotonic() > deadline or not context.is_active():
                return
            yield data
        if source.random() < 0.5:
            with contextlib.suppress(ValueError):  # of metadata
                context.set_trailing_metadata([("x-long", "y" * source.choice((1, 5_000, 200_000)))])
            context.abort(source.choice(_CODES), "a reason\r\n\x1b[2J" * source.choice((1, 300)))


class Heard:
    """The messages of a stream's caller, read in a thread of their own."""

    def __init__(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> None:
        self.messages: list[bytes] = []
        self.context = context
        self._requests = requests
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(Exception):  # the stream has ended
            for data in self._requests:
                self.messages.append(data)

    def each(self, seconds: float = 1.0) -> Iterator[bytes | None]:
        """Yields the messages in order; None if none came for a while. Ends after `seconds` without any."""
        read, quiet_since = 0, time.monotonic()
        while self.context.is_active() and time.monotonic() < quiet_since + seconds:
            if read < len(self.messages):
                read, quiet_since = read + 1, time.monotonic()
                yield self.messages[read - 1]
            else:
                time.sleep(_PAUSE_SECONDS)
                yield None


class HostileDraft(HostileServer):
    service, methods = "speculation.v1.Draft", ("Describe", "Speculate")

    def __init__(self, behind: str, seed: int, figures: Figures) -> None:
        """`behind`: address of a draft worker, which this one pretends to be."""
        super().__init__(seed, figures)
        with grpc.insecure_channel(behind) as channel:
            self._honest = draft_pb2_grpc.DraftStub(channel).Describe(types_pb2.DescribeRequest())

    def _description(self, source: random.Random) -> draft_pb2.DraftDescription:
        description = draft_pb2.DraftDescription()
        description.CopyFrom(self._honest)
        description.model.fingerprint = source.choice(
            ("", self._honest.model.fingerprint, f"{source.getrandbits(256):064x}")
        )
        return description

    def answers(self, heard: Heard, source: random.Random) -> Stream:
        """Proposes random tokens, at once or late, some twice and some in another order."""
        known: dict[int, int] = {}
        sent: list[bytes] = []
        pause = source.choice((0.0, 0.0, 0.06, 0.3))
        for data in heard.each():
            if data is not None:
                _follow(data, known)
                time.sleep(pause)
                sent.append(_proposals(known, source).SerializeToString())
                yield sent[-1]
            if sent and source.random() < 0.2:
                yield source.choice(sent[-20:])

    def spoils(self, heard: Heard, source: random.Random) -> Stream:
        """Proposes with a few values at the edge of their types, or with flipped bits."""
        known: dict[int, int] = {}
        spoiler, flips = Spoiler(source), source.random() < 0.3
        for data in heard.each():
            if data is not None:
                _follow(data, known)
            if data is not None or source.random() < 0.1:
                reply = _proposals(known, source)
                for _ in range(source.choice((0, 1, 3))):
                    spoiler.spoil(reply)
                yield spoiler.mutated(reply.SerializeToString()) if flips else reply.SerializeToString()

    def lies_about_times(self, heard: Heard, source: random.Random) -> Stream:
        """Reports times, batches and credit of any size."""
        known: dict[int, int] = {}
        for data in heard.each():
            if data is not None:
                _follow(data, known)
                reply = _proposals(known, source)
                for field in ("held_us", "step_us", "batch", "rows"):
                    setattr(reply.timing, field, source.choice(_NUMBERS))
                reply.credit.num_tokens = source.choice((*_NUMBERS, 2**64 - 1))
                yield reply.SerializeToString()

    def floods(self, heard: Heard, source: random.Random) -> Stream:
        """Sends replies that nothing asked for, as fast as they are read."""
        known: dict[int, int] = {}
        for data in itertools.islice(heard.each(3.0), 50):  # long enough for an opening
            if data is not None:
                _follow(data, known)
        reply = _proposals(known or {1: 5}, source).SerializeToString()
        yield from itertools.repeat(reply, source.choice((1_000, 200_000)))

    def sends_too_much(self, heard: Heard, source: random.Random) -> Stream:
        """Sends messages up to and over gRPC's limit."""
        known: dict[int, int] = {}
        for data in heard.each():
            if data is not None:
                _follow(data, known)
                number = source.choice((10_000, 200_000, 5_000_000, 17_000_000))
                sequence = next(iter(known), 1)
                base = known.get(sequence, 0)
                columns = draft_pb2.Proposals(
                    sequences=[sequence], bases=[base], lengths=[number], token_ids=[7] * number
                )
                if source.random() < 0.5:
                    columns.parents.extend(range(number) if number < 10**6 else [0] * number)
                many = draft_pb2.SpeculateReply(lost=range(number), refused=range(number))
                yield source.choice((draft_pb2.SpeculateReply(proposals=columns), many)).SerializeToString()

    def refuses(self, heard: Heard, source: random.Random) -> Stream:
        """Loses or refuses every sequence."""
        known: dict[int, int] = {}
        field = source.choice(("lost", "refused"))
        for data in heard.each():
            if data is not None:
                _follow(data, known)
                yield draft_pb2.SpeculateReply(**{field: known}).SerializeToString()

    def drips(self, heard: Heard, source: random.Random) -> Stream:
        """Sends a proposal as many parts of one token each, long after what was asked for."""
        known: dict[int, int] = {}
        for start, data in enumerate(heard.each(3.0)):
            if data is not None:
                _follow(data, known)
            for sequence, base in known.items():
                columns = draft_pb2.Proposals(
                    sequences=[sequence], bases=[base], lengths=[1], token_ids=[source.randrange(VOCABULARY)]
                )
                columns.starts.append(start)
                columns.are_partial.append(True)
                yield draft_pb2.SpeculateReply(proposals=columns).SerializeToString()

    def stays_silent(self, heard: Heard, source: random.Random) -> Stream:
        for _ in heard.each(3.0):
            pass
        yield from ()

    def ends(self, heard: Heard, source: random.Random) -> Stream:
        yield from ()

    ways = (
        *(answers, answers, spoils, spoils, lies_about_times, floods),
        *(sends_too_much, refuses, drips, stays_silent, ends),
    )


def _follow(data: bytes, known: dict[int, int]) -> None:
    """Updates `known`, the committed length by sequence, from a request."""
    request = draft_pb2.SpeculateRequest.FromString(data)
    known.update((entry.sequence, len(entry.token_ids)) for entry in request.open)
    advance = request.advance
    known.update(
        (sequence, base + length)
        for sequence, base, length in zip(advance.sequences, advance.bases, advance.lengths, strict=True)
    )
    for sequence in request.close:
        known.pop(sequence, None)


def _proposals(known: dict[int, int], source: random.Random) -> draft_pb2.SpeculateReply:
    reply = draft_pb2.SpeculateReply()
    columns, has_trees = reply.proposals, source.random() < 0.3
    for sequence, base in known.items():
        number = source.choice((0, 1, 4, 8, 60, 300))
        columns.sequences.append(sequence)
        columns.bases.append(max(0, base + source.choice((0, 0, 0, -1, 1, 1000))))
        columns.lengths.append(number)
        top = source.choice((VOCABULARY, VOCABULARY, 2**31, 2**32))
        columns.token_ids.extend(source.randrange(top) for _ in range(number))
        if has_trees:
            columns.parents.extend(source.randrange(node + 1) for node in range(number))
    reply.timing.held_us, reply.timing.step_us, reply.timing.batch = 10, 500, max(1, len(known))
    return reply


class HostileTarget(HostileServer):
    service, methods = "speculation.v1.Target", ("Describe", "GenerateMany")

    def __init__(self, behind: str, seed: int, figures: Figures) -> None:
        """`behind`: address of a target, which this one pretends to be."""
        super().__init__(seed, figures)
        with grpc.insecure_channel(behind) as channel:
            self._honest = target_pb2_grpc.TargetStub(channel).Describe(types_pb2.DescribeRequest())
        self._epoch = self._honest.epoch + 1

    def _begin(self, context: grpc.ServicerContext) -> None:
        context.send_initial_metadata(((EPOCH_KEY, str(self._epoch)),))

    def _description(self, source: random.Random) -> target_pb2.TargetDescription:
        description = target_pb2.TargetDescription()
        description.CopyFrom(self._honest)
        description.epoch = self._epoch
        match source.choice((None,) * 8 + ("epoch", "limits", "traits", "adapters", "end", "load")):
            case "epoch":
                description.epoch = source.getrandbits(64)
            case "limits":  # no model has such limits; plausible ones would limit the requests of all
                setattr(description.model, source.choice(("vocab_size", "max_model_len")), 0)
            case "traits":
                for number in range(source.choice((1, 100, 10_000))):
                    description.traits[f"a trait{number}"] = "v" * source.choice((1, 100, 1000))
            case "adapters":
                for number in range(source.choice((1, 100, 50_000))):
                    description.adapters[f"adapter {number}"] = "f" * 64
            case "end":
                description.eos_token_ids.extend(range(source.choice((1, 1000, 200_000))))
            case "load":
                description.load.num_blocks, description.block_size = 2**64 - 1, 2**32 - 1
                description.load.draft_demand.goodputs.extend([float("nan"), float("inf")] * 1000)
        return description

    def _spared(self, data: bytes) -> bytes:
        with contextlib.suppress(Exception):  # of bytes that are no message
            description = target_pb2.TargetDescription.FromString(data)
            model, honest = description.model, self._honest.model
            if (
                0 < model.vocab_size != honest.vocab_size
                or 0 < model.max_model_len != honest.max_model_len
                or description.wire_version != self._honest.wire_version
            ):
                return bytes(self._honest.SerializeToString())
        return data

    def lies(self, heard: Heard, source: random.Random) -> Stream:
        """Sends victims random tokens, rounds and log-probabilities; ends other calls with any error."""
        for calls in _Calls(heard).each():
            reply = _tokens(calls.victims, source)
            for call in calls.others:
                code = source.choice((5, 8, 13, 14, 2, 15, 77))
                reply.errors.add(call=call, code=code, message="a\r\nreason" * source.choice((1, 20_000)))
                calls.end(call)
            yield reply.SerializeToString()

    def spoils(self, heard: Heard, source: random.Random) -> Stream:
        """Sends victims replies with values at the edge of their types, or with flipped bits."""
        spoiler, flips = Spoiler(source), source.random() < 0.3
        for calls in _Calls(heard).each():
            reply = _tokens(calls.victims, source)
            for _ in range(source.choice((1, 1, 3))):
                spoiler.spoil(reply)
            data = spoiler.mutated(reply.SerializeToString()) if flips else reply.SerializeToString()
            if calls.are_spared_by(data):
                yield data
            if calls.others:
                return

    def counts_wrongly(self, heard: Heard, source: random.Random) -> Stream:
        """Sends rounds, ranks and cached tokens with numbers of any size."""
        for calls in _Calls(heard).each():
            reply = _tokens(calls.victims, source)
            for column in (reply.num_rounds, reply.num_draft_tokens, reply.num_accepted_tokens, reply.round_starts):
                del column[:]
            for _ in calls.victims:
                reply.num_rounds.append(1)
                reply.num_draft_tokens.append(source.choice(_NUMBERS))
                reply.num_accepted_tokens.append(source.choice(_NUMBERS))
                reply.round_starts.append(source.choice(_NUMBERS))
            reply.cached_calls.extend(calls.victims)
            reply.num_cached_tokens.extend([source.choice(_NUMBERS)] * len(calls.victims))
            yield reply.SerializeToString()
            if calls.others:
                return

    def breaks(self, heard: Heard, source: random.Random) -> Stream:
        """Sends every call something that is recognisably wrong."""
        for calls in _Calls(heard).each():
            for call in [*calls.victims, *calls.others]:
                too_many = calls.requests[call].max_tokens + 1
                wrong = (
                    target_pb2.GenerateReplies(calls=[call], num_tokens=[2], token_ids=[1]),
                    target_pb2.GenerateReplies(calls=[call], num_tokens=[1], token_ids=[2**32 - 1]),
                    target_pb2.GenerateReplies(calls=[call], num_tokens=[too_many], token_ids=[1] * too_many),
                    target_pb2.GenerateReplies(finished=[call], finish_reasons=[1]),
                    target_pb2.GenerateReplies(calls=[call], num_tokens=[0], finished=[call]),
                    target_pb2.GenerateReplies(calls=[call], num_tokens=[0], num_rounds=[7]),
                    target_pb2.GenerateReplies(calls=[call], logprobs=[target_pb2.CallLogprobs(call=call)]),
                )
                yield source.choice(wrong).SerializeToString()

    def floods(self, heard: Heard, source: random.Random) -> Stream:
        """Sends replies that nothing asked for, as fast as they are read."""
        for calls in _Calls(heard).each():
            known = [*calls.victims, 2**40, 2**40 + 1]
            reply = _tokens(known, source)
            reply.errors.add(call=2**41, code=13, message="no such call")
            data = source.choice((reply, target_pb2.GenerateReplies())).SerializeToString()
            yield from itertools.repeat(data, source.choice((1_000, 50_000)))
            if calls.others:
                return

    def sends_too_much(self, heard: Heard, source: random.Random) -> Stream:
        for calls in _Calls(heard).each():
            number = source.choice((10_000, 200_000, 5_000_000, 40_000_000))
            call = next(iter(calls.victims), 2**40)
            yield source.choice(
                (
                    b"\x4a\x00" * number,  # errors
                    b"\x52\x00" * number,  # log-probabilities
                    target_pb2.GenerateReplies(
                        calls=[call], num_tokens=[number], token_ids=bytes(number)
                    ).SerializeToString(),
                    target_pb2.GenerateReplies(calls=range(2**40, 2**40 + number // 10)).SerializeToString(),
                )
            )
            if calls.others:
                return

    def drips(self, heard: Heard, source: random.Random) -> Stream:
        """Sends victims one token at a time, long after the last one, and others nothing for a second."""
        for calls in _Calls(heard).each():
            time.sleep(0.05)
            if calls.victims:
                yield _tokens(calls.victims[:1], source).SerializeToString()
            if calls.others:
                time.sleep(1.0)
                return

    def ends(self, heard: Heard, source: random.Random) -> Stream:
        for _ in itertools.islice(heard.each(), source.choice((0, 1, 30))):
            pass
        yield from ()

    ways = (lies, lies, spoils, spoils, counts_wrongly, breaks, breaks, floods, sends_too_much, drips, ends)


class _Calls:
    """The calls of a stream that have not ended."""

    def __init__(self, heard: Heard) -> None:
        self.requests: dict[int, target_pb2.GenerateRequest] = {}
        self._ended: set[int] = set()
        self._heard = heard

    def each(self) -> Iterator[_Calls]:
        """Yields this object while calls run."""
        for data in self._heard.each():
            if data is not None:
                commands = target_pb2.GenerateCommands.FromString(data)
                self.requests.update((start.call, start.request) for start in commands.start)
                for call in commands.cancel:
                    self.end(call)
            if self.requests:
                yield self

    def end(self, call: int) -> None:
        self.requests.pop(call, None)
        self._ended.add(call)

    @property
    def victims(self) -> list[int]:
        return [call for call, request in self.requests.items() if VICTIM in request.request_id]

    @property
    def others(self) -> list[int]:
        return [call for call, request in self.requests.items() if VICTIM not in request.request_id]

    def are_spared_by(self, data: bytes) -> bool:
        """Returns whether only victims get something plausible from `data`: flipped bits may name another call."""
        try:
            reply = target_pb2.GenerateReplies.FromString(data)
        except DecodeError:
            return True  # nobody can read it
        named = {*reply.calls, *reply.finished, *(error.call for error in reply.errors)}
        return all(call in self._ended or call in self.victims or call >= 2**32 for call in named)


def _tokens(calls: list[int], source: random.Random) -> target_pb2.GenerateReplies:
    """Returns a reply to `calls` that looks right, with all that they may have asked for or not."""
    reply = target_pb2.GenerateReplies(calls=calls)
    for call in calls:
        number = source.choice((0, 1, 3))
        reply.num_tokens.append(number)
        reply.token_ids.extend(source.randrange(VOCABULARY) for _ in range(number))
        if source.random() < 0.3:
            values = [source.choice((-0.5, float("nan"), float("inf"), -float("inf"), 1e38)) for _ in range(number)]
            scores = target_pb2.CallLogprobs(call=call, ranks=[1] * number, logprobs=values)
            source.choice((reply.logprobs, reply.prompt_logprobs)).append(scores)
        if source.random() < 0.05:
            reply.finished.append(call)
            reply.finish_reasons.append(source.choice((0, 1, 2, 3, 99)))
    return reply
