from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest

from cluster.errors import ConfigurationError
from services.http_call import API_KEY
from services.running_cluster.pages import MetricsPage, read_page


class Worker(http.server.BaseHTTPRequestHandler):
    """Records the keys that it receives, and redirects requests for /elsewhere to /metrics."""

    seen: list[str | None] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.seen.append(self.headers.get("authorization"))
        self.send_response(302 if self.path == "/elsewhere" else 200)
        self.send_header("location", "/metrics")
        self.end_headers()
        self.wfile.write(b'things_total{kind="a"} 2\nthings_total{kind="b"} 3\n')

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def url() -> Iterator[str]:
    Worker.seen.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Worker)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_a_page_is_read_as_numbers(url: str) -> None:
    page = read_page(f"{url}/metrics")
    assert page.sum("things_total") == 5
    assert page.by_label("things_total", "kind") == {"a": 2, "b": 3}
    assert page.by_label("things_total", "kind", kind="a") == {"a": 2}


@pytest.mark.parametrize("text", [" {", "a{", "a{b", 'a{b="c} 1', "a 1 2 3 4 x", "a one"])
def test_what_is_no_page_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        MetricsPage(text)


def test_the_routers_key_goes_to_nobody_by_itself(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY, "secret")
    read_page(f"{url}/metrics")
    read_page(f"{url}/metrics", token="secret")
    assert Worker.seen == [None, "Bearer secret"]


@pytest.mark.parametrize("place", ["/elsewhere"])
def test_nobody_is_sent_elsewhere(place: str, url: str) -> None:
    with pytest.raises(ConfigurationError, match="302"):
        read_page(f"{url}{place}", token="secret")
    assert len(Worker.seen) == 1


def test_files_are_no_pages() -> None:
    with pytest.raises(ConfigurationError, match="neither http"):
        read_page("file:///etc/hostname")
