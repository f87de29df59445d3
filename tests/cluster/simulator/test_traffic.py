"""Traffic: rates, streams, traces, and what is said of broken ones."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path

import pytest

from cluster.errors import ConfigurationError
from cluster.simulator.traffic import ClosedTraffic, EndedRequest, Lengths, OpenTraffic, RecordedTraffic

TEN = Lengths(10, 10)


def gaps(traffic: OpenTraffic) -> list[float]:
    return [b.seconds - a.seconds for a, b in itertools.pairwise(traffic.arrivals())]


def test_requests_come_at_the_rate_and_with_lengths_in_between() -> None:
    requests = list(OpenTraffic(20.0, 200.0, Lengths(5, 9), TEN, seed=3).arrivals())
    assert len(requests) == pytest.approx(4000, rel=0.05)
    assert {request.prompt_tokens for request in requests} == {5, 6, 7, 8, 9}
    assert all(0 <= request.seconds < 200 for request in requests)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_are_as_spread_out_as_was_asked_for(burstiness: float) -> None:
    found = gaps(OpenTraffic(50.0, 400.0, TEN, TEN, seed=1, burstiness=burstiness))
    assert (statistics.stdev(found) / statistics.mean(found)) ** 2 == pytest.approx(burstiness, rel=0.12)


def test_streams_begin_over_the_ramp_and_stop_asking_at_the_end() -> None:
    traffic = ClosedTraffic(4, 10.0, TEN, TEN, seed=0, ramp_seconds=2.0)
    first, *others = traffic.arrivals()
    assert [arrival.seconds for arrival in (first, *others)] == [0.0, 0.5, 1.0, 1.5]
    following = traffic.after(EndedRequest(first, 9.0))
    assert following is not None
    assert following.seconds == 9.0
    assert traffic.after(EndedRequest(first, 10.0)) is None


def test_a_trace_is_read_in_the_order_of_arrival(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(
        '{"arrival_seconds": 2.5, "prompt_tokens": 7, "answer_tokens": 3, "user": "b"}\n\n'
        '{"arrival_seconds": 1, "prompt_tokens": 5, "answer_tokens": 2}\n'
    )
    traffic = RecordedTraffic.read(file)
    assert [(r.seconds, r.prompt_tokens, r.answer_tokens) for r in traffic.arrivals()] == [(1.0, 5, 2), (2.5, 7, 3)]
    assert traffic.seconds == 2.5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no requests"),
        ("{", ":1: "),
        ("[1]", ":1: arrival_seconds, prompt_tokens, answer_tokens missing"),
        ('{"arrival_seconds": 1, "prompt_tokens": 5}', ":1: answer_tokens missing"),
        ("[" * 100_000, ":1: "),
        ('{"arrival_seconds": -1, "prompt_tokens": 5, "answer_tokens": 1}', "arrival_seconds is -1"),
        ('{"arrival_seconds": NaN, "prompt_tokens": 5, "answer_tokens": 1}', "arrival_seconds is nan"),
        ('{"arrival_seconds": 1, "prompt_tokens": 0, "answer_tokens": 1}', "prompt_tokens is 0"),
        ('{"arrival_seconds": 1, "prompt_tokens": 2.5, "answer_tokens": 1}', "prompt_tokens is 2.5"),
        ('{"arrival_seconds": 1, "prompt_tokens": 2, "answer_tokens": true}', "answer_tokens is True"),
    ],
)
def test_a_broken_trace_is_named_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigurationError) as error:
        RecordedTraffic.read(file)
    assert said in str(error.value)
    assert "trace.jsonl" in str(error.value)


@pytest.mark.parametrize("text", ["0", "5:3", "x", "3:", ":4", "1.5"])
def test_lengths_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError):
        Lengths.parse(text)
