from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.errors import ConfigurationError
from services.http_call import API_KEY
from services.running_cluster.pages import MetricsPage, read_page
from tests.http_server import AnsweringServer, HttpAnswer, HttpRequest, answering


def answer(request: HttpRequest) -> HttpAnswer:
    """Redirects requests for /elsewhere to /metrics."""
    content = 'things_total{kind="a"} 2\nthings_total{kind="b"} 3\n'
    return HttpAnswer(content, 302 if request.path == "/elsewhere" else 200, {"location": "/metrics"})


@pytest.fixture
def worker() -> Iterator[AnsweringServer]:
    with answering(answer) as server:
        yield server


def test_a_page_is_read_as_numbers(worker: AnsweringServer) -> None:
    page = read_page(f"{worker.url}/metrics")
    assert page.sum("things_total") == 5
    assert page.by_label("things_total", "kind") == {"a": 2, "b": 3}
    assert page.by_label("things_total", "kind", kind="a") == {"a": 2}


@pytest.mark.parametrize("text", [" {", "a{", "a{b", 'a{b="c} 1', "a 1 2 3 4 x", "a one"])
def test_what_is_no_page_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        MetricsPage(text)


def test_the_routers_key_goes_to_nobody_by_itself(worker: AnsweringServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY, "secret")
    read_page(f"{worker.url}/metrics")
    read_page(f"{worker.url}/metrics", token="secret")
    assert [request.headers["authorization"] for request in worker.requests] == [None, "Bearer secret"]


@pytest.mark.parametrize("place", ["/elsewhere"])
def test_nobody_is_sent_elsewhere(place: str, worker: AnsweringServer) -> None:
    with pytest.raises(ConfigurationError, match="302"):
        read_page(f"{worker.url}{place}", token="secret")
    assert len(worker.requests) == 1


def test_files_are_no_pages() -> None:
    with pytest.raises(ConfigurationError, match="neither http"):
        read_page("file:///etc/hostname")
