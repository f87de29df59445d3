"""A link to a real server: comes up, carries rounds, and comes back whatever happened to it."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Iterator
from dataclasses import replace

import grpc
import pytest

from cluster.coordination.base import LinkEvent, LinkState
from cluster.coordination.link import DraftLink
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.wire.codec import decode_request
from cluster.wire.messages import Advance, Open, Proposal, SpeculateReply, SpeculateRequest
from protos.speculation.v1 import draft_pb2
from tests.background_loop import BackgroundLoop
from tests.waiting import WAIT_S, wait_until

from .draft_server import FINGERPRINT, DraftServer


class Side:
    """The coordinator's side of a link, and what happened on it."""

    def __init__(self, loop: BackgroundLoop, address: str) -> None:
        self.link = DraftLink(address, FINGERPRINT, self._notify)
        self.failure: Exception | None = None  # raised when the next reply is handled
        self._events: queue.Queue[LinkEvent] = queue.Queue()
        self._running = loop.start(self.link.run())

    def _notify(self, event: LinkEvent) -> None:
        self._events.put(event)
        if self.failure is not None and isinstance(event.event, SpeculateReply):
            failure, self.failure = self.failure, None
            raise failure

    def next(self) -> LinkEvent:
        event = self._events.get(timeout=WAIT_S)
        assert event.link is self.link
        return event

    @property
    def has_events(self) -> bool:
        return not self._events.empty()

    def comes_up(self) -> None:
        assert self.next() == LinkEvent(self.link, LinkState.UP)
        assert self.link.is_up

    def goes_down(self) -> None:
        assert self.next() == LinkEvent(self.link, LinkState.DOWN)

    def cancel(self) -> None:
        self._running.cancel()


@pytest.fixture
def server(loop: BackgroundLoop) -> Iterator[DraftServer]:
    server = DraftServer(loop)
    yield server
    server.stop()


@pytest.fixture
def side(loop: BackgroundLoop, server: DraftServer) -> Iterator[Side]:
    side = Side(loop, server.address)
    yield side
    side.cancel()
    wait_until(lambda: not side.link.is_up)


@pytest.fixture
def up(side: Side) -> Side:
    side.comes_up()
    return side


def opens(*wire_ids: int) -> SpeculateRequest:
    openings = [Open(wire_id, [1, 2, 3], 3, SamplingParams(), NoiseKey(1, 2), 4, 10) for wire_id in wire_ids]
    return SpeculateRequest(opens={opening.wire_id: opening for opening in openings})


def advances(wire_id: int, *token_ids: int) -> SpeculateRequest:
    return SpeculateRequest(advances={wire_id: Advance(wire_id, 3, list(token_ids), 4)})


def proposes(wire_id: int, *token_ids: int) -> SpeculateReply:
    return SpeculateReply(proposals={wire_id: Proposal(wire_id, 3, list(token_ids))})


def carries_a_round(side: Side, server: DraftServer, wire_id: int = 1) -> LinkEvent:
    side.link.send(opens(wire_id))
    assert server.request() == opens(wire_id)
    server.reply(proposes(wire_id, 7, 8))
    event = side.next()
    assert event.event == proposes(wire_id, 7, 8)
    return event


def comes_back(side: Side, server: DraftServer) -> None:
    """The stream ends, and the link carries rounds on the next one."""
    side.goes_down()
    side.comes_up()
    carries_a_round(side, server)


class TestUnasked:
    def test_entries_for_sequences_that_are_not_open_are_dropped(self, up: Side, server: DraftServer) -> None:
        up.link.send(opens(1, 2, 3))
        server.request()
        up.link.send(SpeculateRequest(closes={2}))
        server.request()
        strange = SpeculateReply({number: Proposal(number, 3, [7]) for number in (1, 2, 9)}, {2, 9}, {3, 9})
        server.reply(strange)
        assert up.next().event == SpeculateReply({1: Proposal(1, 3, [7])}, refused={3})
        server.reply(proposes(3, 7))  # it was refused
        assert up.next().event == SpeculateReply()
        carries_a_round(up, server, 4)

    def test_a_reply_may_be_as_large_as_what_was_asked(self, up: Side, server: DraftServer) -> None:
        """Trees that fill the window of each sequence, with the largest numbers."""
        tokens, parents = [2**32 - 1] * 640, list(range(-1, 639))
        parents[-1] = 0  # otherwise it is a chain
        wire_ids = [2**64 - 100 + number for number in range(50)]
        up.link.send(opens(*wire_ids))
        server.request()
        trees = {number: Proposal(number, 2**32 - 1, tokens, parents, is_whole=False) for number in wire_ids}
        up.link.send(SpeculateRequest(closes=set(wire_ids[1:])))
        server.request()
        message = server.reply(SpeculateReply(trees, lost={1, 2}))
        assert message.ByteSize() > 200_000
        assert up.next().event == SpeculateReply({wire_ids[0]: trees[wire_ids[0]]})

    def test_a_larger_reply_ends_the_link(
        self, up: Side, server: DraftServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        up.link.send(opens(1))
        server.request()
        server.reply(proposes(1, *[7] * 80_000))
        comes_back(up, server)
        assert "it sent an unusable message: 80019 bytes, where 72000 were asked for at most" in caplog.text

    def test_a_long_name_is_cut(self, loop: BackgroundLoop, server: DraftServer) -> None:
        server.name = "x" * 2**20
        side = Side(loop, server.address)
        side.comes_up()
        assert side.link.model == "x" * 256
        side.cancel()


class TestRounds:
    def test_requests_arrive_and_replies_come_back(self, up: Side, server: DraftServer) -> None:
        carries_a_round(up, server)
        request = advances(1, 7, 9)
        request.merge(SpeculateRequest(closes={5}))
        up.link.send(request)
        assert server.request() == request
        up.link.send(opens(2))
        server.request()
        server.reply(SpeculateReply(lost={1}, refused={2}, credit=77))
        reply = up.next().event
        assert reply == SpeculateReply(lost={1}, refused={2})
        assert isinstance(reply, SpeculateReply)
        assert reply.credit == 77

    def test_an_answer_takes_what_passes_since_the_last_message(self, up: Side, server: DraftServer) -> None:
        up.link.send(opens(1))
        server.request()
        time.sleep(0.05)
        before = time.perf_counter()
        up.link.send(opens(2))
        server.request()
        sent = time.perf_counter()
        time.sleep(0.05)
        replied = time.perf_counter()
        server.reply(proposes(1, 7))
        event = up.next()
        assert replied - sent <= event.answer_seconds <= time.perf_counter() - before

    def test_the_round_trip_is_the_shortest_answer(self, up: Side, server: DraftServer) -> None:
        assert up.link.round_trip_seconds is None
        answers = []
        for wire_id, held_s in ((1, 0.05), (2, 0.0), (3, 0.05)):
            up.link.send(opens(wire_id))
            server.request()
            time.sleep(held_s)
            server.reply(proposes(wire_id, 7))
            answers.append(up.next().answer_seconds)
        assert up.link.round_trip_seconds == min(answers)


class TestOpenings:
    def test_they_are_cut_to_messages_that_a_worker_takes(self, up: Side, server: DraftServer) -> None:
        """64 contexts of 100,000 tokens: 19 MB, where a message may have 16 MiB."""
        openings = {i: Open(i, [70_000] * 100_000, 3, SamplingParams(), NoiseKey(1, 2), 4, 10) for i in range(1, 65)}
        up.link.send(SpeculateRequest(opens=openings))
        found: dict[int, Open] = {}
        while len(found) < 64:
            message = server.message()
            assert message.ByteSize() < 2 * 2**20
            found |= decode_request(message).opens
        assert found == openings
        assert not up.has_events  # it is still up

    def test_rounds_do_not_wait_for_openings(self, up: Side, server: DraftServer) -> None:
        openings = {i: Open(i, [70_000] * 200_000, 3, SamplingParams(), NoiseKey(1, 2), 4, 10) for i in range(2, 40)}
        up.link.send(SpeculateRequest(opens=openings, advances={1: Advance(1, 3, [7], 4), 39: Advance(39, 3, [8], 4)}))
        first = server.request()
        assert (set(first.opens), set(first.advances)) == ({2}, {1})
        up.link.send(advances(1, 7, 9))
        requests = [first]
        while 39 not in requests[-1].advances:
            requests.append(server.request())
        assert 39 in requests[-1].opens  # not before it is opened
        (told,) = [number for number, request in enumerate(requests) if 1 in request.advances and number]
        assert told < len(requests) - 1


class TestPairs:
    def test_a_worker_with_another_tokenizer_is_not_used_until_it_has_the_same(
        self, loop: BackgroundLoop, server: DraftServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        server.fingerprint = "quite another tokenizer"
        side = Side(loop, server.address)
        wait_until(lambda: bool(caplog.records))
        assert [record.levelno for record in caplog.records] == [logging.ERROR]
        for name in ("quite another tokenizer", FINGERPRINT, server.address):
            assert name in caplog.messages[0]
        assert not side.has_events
        assert server.num_streams_ever == 0
        server.fingerprint = FINGERPRINT
        side.comes_up()
        side.cancel()
        side.goes_down()


class TestLosses:
    def test_it_comes_back_when_the_worker_does(
        self, up: Side, server: DraftServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        carries_a_round(up, server)
        server.stop()
        up.goes_down()
        assert not up.link.is_up
        server.start()
        up.comes_up()
        carries_a_round(up, server, wire_id=2)
        assert [record for record in caplog.records if record.levelno > logging.INFO] == []  # workers come and go

    def test_it_waits_for_a_worker_that_is_not_there_yet(self, loop: BackgroundLoop, server: DraftServer) -> None:
        server.stop()
        side = Side(loop, server.address)
        time.sleep(0.5)  # in which it tries more than once
        assert not side.has_events
        server.start()
        side.comes_up()
        carries_a_round(side, server)
        side.cancel()
        side.goes_down()

    def test_what_is_sent_while_it_is_down_is_dropped(self, up: Side, server: DraftServer) -> None:
        server.stop()
        up.goes_down()
        up.link.send(opens(1))
        server.start()
        up.comes_up()
        up.link.send(opens(2))
        assert server.request() == opens(2)

    @pytest.mark.parametrize(
        "columns",
        [
            {"sequences": [1], "bases": [3], "lengths": [2], "token_ids": [7]},
            {"sequences": [1, 2], "bases": [3], "lengths": [1, 1], "token_ids": [7, 8]},
            {"sequences": [1], "bases": [3], "lengths": [2], "token_ids": [7, 8], "parents": [2, 0]},
        ],
        ids=["too few tokens", "too few bases", "a parent after its child"],
    )
    def test_an_unusable_message_ends_the_stream_and_not_the_link(
        self, columns: dict[str, list[int]], up: Side, server: DraftServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        server.send(draft_pb2.SpeculateReply(proposals=draft_pb2.Proposals(**columns)))
        comes_back(up, server)
        wait_until(lambda: server.num_streams == 1)
        assert server.num_streams_ever == 2
        (message,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
        assert f"draft worker {server.address} is down" in message
        assert "it sent an unusable message" in message
        assert "Traceback" not in caplog.text

    def test_a_reply_that_nobody_could_take_ends_the_stream_and_not_the_link(
        self, up: Side, server: DraftServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        up.failure = ZeroDivisionError("not foreseen")
        carries_a_round(up, server)
        comes_back(up, server)
        assert "ZeroDivisionError: not foreseen" in caplog.text

    def test_a_request_that_cannot_be_written_ends_the_stream_and_not_the_link(
        self, up: Side, server: DraftServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        up.link.send(advances(1, -7))  # token IDs are unsigned on the wire
        comes_back(up, server)
        assert "RuntimeError: a request could not be written" in caplog.text

    def test_a_worker_that_stops_during_a_write_has_stopped(
        self, up: Side, server: DraftServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        server.stop()
        up.goes_down()
        server.is_deaf = True
        server.start()
        up.comes_up()
        caplog.clear()
        caplog.set_level(logging.INFO)
        opening = Open(1, [70_000] * 200_000, 3, SamplingParams(), NoiseKey(1, 2), 4, 10)
        up.link.send(SpeculateRequest(opens={number: replace(opening, wire_id=number) for number in range(1, 20)}))
        up.goes_down()
        wait_until(lambda: f"{server.address} is down" in caplog.text)
        assert "Traceback" not in caplog.text

    def test_what_ended_a_stream_is_said(self, up: Side, server: DraftServer, caplog: pytest.LogCaptureFixture) -> None:
        server.end(grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max")
        up.goes_down()
        wait_until(lambda: bool([r for r in caplog.records if r.levelno == logging.WARNING]))
        assert "RESOURCE_EXHAUSTED: Received message larger than max" in caplog.text
        up.comes_up()

    def test_a_stream_that_ends_as_soon_as_it_is_up_is_not_begun_again_and_again(
        self, up: Side, server: DraftServer
    ) -> None:
        for _ in range(5):  # after pauses of 0.1 to 1.6 s, more or less
            server.end(grpc.StatusCode.RESOURCE_EXHAUSTED, "always")
            up.goes_down()
            up.comes_up()
        server.end(grpc.StatusCode.RESOURCE_EXHAUSTED, "always")
        up.goes_down()
        time.sleep(1.0)  # of a pause of 1.6 to 4.8 s
        assert not up.has_events

    def test_one_that_is_cancelled_ends_its_stream(self, up: Side, server: DraftServer) -> None:
        wait_until(lambda: server.num_streams == 1)
        up.cancel()
        up.goes_down()
        assert not up.link.is_up
        wait_until(lambda: server.num_streams == 0)


class TestTraffic:
    def test_openings_are_counted_apart_from_rounds(self, up: Side, server: DraftServer) -> None:
        request = opens(1, 2)
        request.merge(advances(3, 4, 5))
        up.link.send(request)
        message = server.message()
        num_open_bytes = sum(opening.ByteSize() for opening in message.open)
        traffic = up.link.traffic
        assert len(message.open) == 2
        assert (traffic.opens, traffic.sent) == (num_open_bytes, message.ByteSize() - num_open_bytes)
        up.link.send(advances(3, 4, 5, 6))
        later = server.message()
        assert traffic.opens == num_open_bytes
        assert traffic.sent == message.ByteSize() - num_open_bytes + later.ByteSize()

    def test_what_comes_is_counted(self, up: Side, server: DraftServer) -> None:
        messages = [server.reply(proposes(wire_id, 7, 8, 9)) for wire_id in (1, 2)]
        up.next()
        up.next()
        assert up.link.traffic.received == sum(message.ByteSize() for message in messages) > 0

    def test_a_life_of_the_stream_adds_to_the_last(self, up: Side, server: DraftServer) -> None:
        carries_a_round(up, server)
        opens_before, received_before = up.link.traffic.opens, up.link.traffic.received
        server.stop()
        up.goes_down()
        server.start()
        up.comes_up()
        carries_a_round(up, server)
        assert up.link.traffic.opens == 2 * opens_before > 0
        assert up.link.traffic.received == 2 * received_before > 0

    def test_readings_name_the_worker(self, up: Side, server: DraftServer) -> None:
        assert "outrider_link_round_trip_seconds" not in {reading.name for reading in up.link.readings()}
        up.link.send(opens(1))
        up.link.send(advances(1, 4))
        server.message()
        server.reply(proposes(1, 7))
        up.next()
        readings = {(r.name, r.labels.get("kind"), r.labels.get("direction")): r for r in up.link.readings()}
        link, traffic = up.link, up.link.traffic
        assert {key: (reading.value, reading.is_counter) for key, reading in readings.items()} == {
            ("outrider_link_round_trip_seconds", None, None): (link.round_trip_seconds, False),
            ("outrider_link_bytes", "open", "sent"): (traffic.opens, True),
            ("outrider_link_bytes", "round", "sent"): (traffic.sent, True),
            ("outrider_link_bytes", "round", "received"): (traffic.received, True),
            ("outrider_link_codec_seconds", None, None): (traffic.codec_seconds, True),
        }
        assert {reading.labels["draft"] for reading in readings.values()} == {server.address}
        assert all(reading.value > 0 for reading in readings.values())
