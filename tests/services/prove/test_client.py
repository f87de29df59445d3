"""The client: what it counts of an answer that is streamed, and of a whole one."""

from __future__ import annotations

import pytest

from cluster.errors import ConfigurationError
from services.prove.client import TimedAnswer, answer_all, ask_all
from tests.services.prove.servers import StubServer, by_seed

BODY = {"prompt": [1, 2], "seed": 3, "max_tokens": 5}


def test_a_streamed_answer_has_its_tokens_and_their_times() -> None:
    server = StubServer()
    burst = ask_all(server.url, [BODY] * 3, num_streams=2)
    assert [answer.token_ids for answer in burst.answers] == [tuple(by_seed(BODY))] * 3
    for answer in burst.answers:
        assert answer.num_tokens == 5
        assert len(answer.gaps) == 4  # the last piece has no token
        assert 0 < answer.first_token_seconds < answer.last_token_seconds <= burst.seconds
        assert sum(answer.gaps) == pytest.approx(answer.last_token_seconds - answer.first_token_seconds)
    assert burst.tokens_per_second == pytest.approx(15 / burst.seconds)
    server.shutdown()


def test_a_whole_answer_has_its_tokens_alone() -> None:
    server = StubServer()
    (answer,) = ask_all(server.url, [BODY], num_streams=1, is_streamed=False).answers
    assert answer.token_ids == tuple(by_seed(BODY))
    assert answer.first_token_seconds == answer.last_token_seconds
    assert not server.bodies[0].get("stream")
    server.shutdown()


def test_all_prompts_are_asked_for_the_same_number_of_tokens() -> None:
    server = StubServer(lambda body: [0] * body["max_tokens"])
    burst = answer_all(server.url, "m", [[1], [2, 3]], num_streams=2, temperature=0.5, max_tokens=7)
    assert [answer.num_tokens for answer in burst.answers] == [7, 7]
    assert sorted(body["prompt"] for body in server.bodies) == [[1], [2, 3]]
    assert {body["temperature"] for body in server.bodies} == {0.5}
    server.shutdown()


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(ConfigurationError, match="does not answer as expected"):
        ask_all("http://127.0.0.1:1", [BODY], num_streams=1)


@pytest.mark.parametrize(
    ("answer", "token_gaps", "between"),
    [
        (TimedAnswer(5, 1.0, 3.0, (2.0,)), [2.0, 0.0, 0.0, 0.0], 0.5),  # two pieces
        (TimedAnswer(3, 1.0, 2.0, (0.5, 0.5)), [0.5, 0.5], 0.5),
        (TimedAnswer(1, 1.0, 1.0), [], None),
    ],
)
def test_tokens_of_one_piece_come_together(answer: TimedAnswer, token_gaps: list[float], between: float | None) -> None:
    assert answer.token_gaps == token_gaps
    assert answer.seconds_between_tokens == between
