"""No command lets what others wrote do anything to the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from cluster.diagnosis.findings import Finding
from protos.speculation.v1 import types_pb2
from services.cli import main
from services.doctor.report import DoctorReport
from services.running_cluster.workers import ClusterFacts, WorkerFacts
from services.terminal import as_line, as_lines, as_text
from services.top.cli import show
from tests.cluster.diagnosis.clusters import FormulaCluster
from tests.http_server import AnsweringServer, HttpAnswer, HttpRequest, answering

NAME = "m\x1b]0;owned\x07\x9b2J\nall is well"
STEP = {"num_draft_tokens": 1, "num_accepted_tokens": 1, "tokens": ["\x1b[2J", "a\tb\n"]}


def is_harmless(text: str) -> bool:
    return not any(character in text for character in "\x1b\x07\x9b\r")


@pytest.mark.parametrize("bad", ["\x1b", "\x00", "\r", "\x7f", "\x9b", "\u202e", "\u2066", "\u2028", "\ud800"])
def test_what_is_no_text_is_written_out(bad: str) -> None:
    for clean in (as_line, as_text):
        assert clean(f"a{bad}b") == f"a{bad.encode('unicode_escape').decode()}b"
        clean(f"a{bad}b").encode()


def test_text_stays_as_it_is() -> None:
    text = "naïve 文字 ع 👩‍👩‍👧 █ \\x1b"
    assert as_line(text) == as_text(text) == text
    assert as_text("a\n\tb") == "a\n\tb"
    assert as_line("a\n\tb") == r"a\n\tb"
    assert as_lines(["a\nb", "c"]) == "a\\nb\nc"


def facts() -> ClusterFacts:
    worker = WorkerFacts(
        "target", NAME, types_pb2.ModelDescription(name=NAME), types_pb2.Load(), types_pb2.Machine(host=NAME), 1, 1, 0.0
    )
    return ClusterFacts("http://127.0.0.1:8000", NAME, NAME, (worker,), (), (NAME,))


def test_a_doctors_report_has_none_of_it_nor_lines_of_others() -> None:
    wrong = [Finding("worker unreachable", NAME, NAME, None)]
    text = DoctorReport(facts(), FormulaCluster().examine(), wrong, None).text()
    assert is_harmless(text)
    assert "all is well" in text
    assert not any(line.startswith("all is well") for line in text.splitlines())


def test_top_shows_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    show(["numbers", NAME], clears=True)
    shown = capsys.readouterr().out
    assert is_harmless(shown)
    assert len(shown.splitlines()) == 2


def answer(request: HttpRequest) -> HttpAnswer:
    """Answers as a router that means harm."""
    if request.method == "GET":
        return HttpAnswer(
            json.dumps({"data": [{"id": NAME}], "targets": [{"address": NAME}], "model": NAME, "version": NAME})
        )
    if b"fail" in request.body:
        return HttpAnswer(json.dumps({"error": {"message": NAME}}), 500)
    return HttpAnswer(f"data: {json.dumps({'choices': [{'text': 'x', 'rounds': [STEP]}]})}\n\n")


@pytest.fixture
def router() -> Iterator[AnsweringServer]:
    with answering(answer) as server:
        yield server


def test_chat_shows_escapes_and_keeps_lines(router: AnsweringServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", router.url, "--completion", "go"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("\\x1b[2Ja\tb\n")
    assert is_harmless(shown)


@pytest.mark.parametrize("said", [[], {}, {"data": []}, {"data": None}, {"data": [1]}])
def test_chat_with_what_is_no_router_ends_in_one_line(
    said: object, router: AnsweringServer, capsys: pytest.CaptureFixture[str]
) -> None:
    router.answer = lambda request: HttpAnswer(json.dumps(said))
    assert main(["chat", "--url", router.url, "hello"]) == 2
    assert "does not answer as a router" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["chat", "fail"], ["doctor"], ["top", "--once"]])
def test_errors_from_the_network(
    command: list[str], router: AnsweringServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--url", router.url]) == 2
    shown = capsys.readouterr()
    assert "owned" in shown.err
    assert not any(line.startswith("all is well") for line in shown.err.splitlines())
    assert is_harmless(shown.out + shown.err)
