"""The page's files and feed over HTTP: who gets them, with what headers, and what is never in them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.config.router import RouterConfig
from services.router.page.feed import MAX_VIEWERS
from services.router.page.routes import STATIC
from tests.waiting import WAIT_S, wait_until

FILES = ["/", *(f"/page/{path.name}" for path in STATIC.iterdir() if path.name != "index.html")]
SECRET = "the lazy fox jumps over a quick dog"


def events_until(url: str, name: str, found: list[Any], headers: dict[str, str] | None = None) -> str:
    """All that the feed says up to the event `name`, whose data are appended to `found`."""
    text = ""
    with httpx.stream("GET", url + "/page/events", timeout=WAIT_S, headers=headers, verify=False) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            text += line + "\n"
            if line.startswith("data: ") and text.endswith(f"event: {name}\n{line}\n"):
                found.append(json.loads(line.removeprefix("data: ")))
                return text
    raise AssertionError(f"the feed ended before {name!r}: {text}")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, True),
        ({"host": "::1"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "0.0.0.0", "page": True}, True),
        ({"page": False}, False),
    ],
)
def test_it_is_on_where_only_this_machine_listens(settings, expected):
    assert RouterConfig.model_validate(settings).has_page is expected


def test_its_files_may_do_nothing_but_call_their_router(router):
    assert len(FILES) > 8
    for path in FILES:
        response = router.client.get(path)
        assert response.status_code == 200, path
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert router.client.get(path, headers={"if-none-match": response.headers["etag"]}).status_code == 304
        addresses = re.findall(r"https?://[^\s\"'`<>)]+", response.text)
        assert set(addresses) <= {"http://www.w3.org/2000/svg"}
    page = router.client.get("/").text
    assert not re.search(r"<script(?![^>]*src=)|<style| style=| on[a-z]+=", page)
    for link in re.findall(r'(?:src|href)="([^"#]+)"', page):
        assert f"/{link}" in FILES


def test_switched_off_there_is_none(new_router, target):
    router = new_router([target.address], page=False)
    for path in (*FILES, "/page/events"):
        assert router.client.get(path).status_code == 404


def test_with_keys_its_files_are_open_and_its_feed_is_not(new_router, target, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("me:a-key-of-more-than-thirty-two-characters\n")
    router = new_router([target.address], api_keys_file=str(keys))
    for path in FILES:
        assert router.client.get(path).status_code == 200
    refused = router.client.get("/page/events")
    assert refused.status_code == 401
    assert router.client.get("/page/nothing").status_code == 401
    found: list[Any] = []
    events_until(router.url, "hello", found, {"authorization": "Bearer a-key-of-more-than-thirty-two-characters"})
    assert found[0]["model"] == router.model


def test_the_feed_ends_with_its_key(new_router, target, tmp_path):
    key, other = "a-key-of-more-than-thirty-two-characters", "another-key-of-more-than-thirty-two-characters"
    keys = tmp_path / "keys"
    keys.write_text(f"me:{key}\nyou:{other}\n")
    router = new_router([target.address], api_keys_file=str(keys))
    begun = {name: threading.Event() for name in (key, other)}

    def watch(name: str) -> None:
        headers = {"authorization": f"Bearer {name}"}
        with httpx.stream("GET", router.url + "/page/events", timeout=WAIT_S, headers=headers) as response:
            for _ in response.iter_lines():
                begun[name].set()
                if is_over.is_set():
                    return

    is_over = threading.Event()
    watching = {name: threading.Thread(target=watch, args=(name,)) for name in begun}
    for name, thread in watching.items():
        thread.start()
        assert begun[name].wait(WAIT_S)
    keys.write_text(f"you:{other}\n")
    watching[key].join(WAIT_S)
    assert not watching[key].is_alive()
    assert watching[other].is_alive()
    is_over.set()
    watching[other].join(WAIT_S)
    assert router.client.get("/page/events", headers={"authorization": f"Bearer {key}"}).status_code == 401


def test_a_viewer_sees_steps_and_neither_text_nor_requests(target, router, tokenizer):
    target.tokens_per_reply, target.delay_s = 4, 0.05
    found: list[Any] = []
    texts: list[str] = []
    watching = threading.Thread(target=lambda: texts.append(events_until(router.url, "steps", found)))
    watching.start()
    prompt = tokenizer.encode(SECRET)
    while watching.is_alive():
        answer = router.complete(prompt=prompt, max_tokens=len(prompt), request_id="whose-request")
        assert answer.json()["choices"][0]["text"] == SECRET
    watching.join()
    ((choice, num_tokens, flat, _), *_) = found[0]["choices"]
    assert (type(choice), num_tokens, flat) == (int, 4, [4, 3])
    words = [word for word in SECRET.split() if len(word) > 3]
    for secret in (*words, "whose-request", target.address, str(prompt[1:3])[1:-1]):
        assert secret not in texts[0]
    answered = answer.json()["id"]
    assert answered not in texts[0]


def test_a_target_of_an_older_version_is_shown_without_its_steps(target, router):
    found: list[Any] = []
    text = events_until(router.url, "workers", found)
    (told,) = found[0]["targets"]
    assert told["status"] == "up"
    assert told["model"] == "scripted"
    assert "steps" not in told
    assert target.address not in text


def test_viewers_beyond_the_bound_are_told_to_come_later(router):
    with httpx.Client(base_url=router.url, timeout=WAIT_S, verify=False) as client:
        streams = [client.stream("GET", "/page/events") for _ in range(MAX_VIEWERS)]
        lines = [stream.__enter__().iter_lines() for stream in streams]
        assert all(next(line) == "event: hello" for line in lines)
        assert router.client.get("/page/events").status_code == 503
        for stream in streams:
            stream.__exit__(None, None, None)

    def is_let_in() -> bool:
        with router.client.stream("GET", "/page/events") as response:
            return response.status_code == 200

    wait_until(is_let_in)


def test_a_wheel_has_its_files(tmp_path: Path):
    """As setuptools copies them; the kernels, which take long to build, are left out."""
    root = Path(__file__).parents[4]
    program = (
        "import tomllib; from setuptools import setup; from pathlib import Path;"
        f"setup(packages=['services.router.page'], script_args=['-q', 'build_py', '--build-lib', {str(tmp_path)!r}],"
        "package_data=tomllib.loads(Path('pyproject.toml').read_text())['tool']['setuptools']['package-data'])"
    )
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True, capture_output=True)
    installed = tmp_path / "services" / "router" / "page" / "static"
    assert {path.name for path in installed.iterdir()} == {path.name for path in STATIC.iterdir()}
