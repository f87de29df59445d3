"""The router around its targets and as a process: health, models, start before the targets, drain, no torch."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from cluster.config import Config
from cluster.errors import ConfigurationError
from cluster.wire.version import WIRE_VERSION
from services.launch.local import free_ports
from services.router.app import create_app
from services.router.main import run
from tests.waiting import WAIT_S, wait_until

from .conftest import MAX_MODEL_LEN

NOBODY = "127.0.0.1:9"


def test_health_tells_of_every_target(new_router, target):
    router = new_router([target.address, NOBODY])
    response = router.client.get("/health")
    assert response.status_code == 200
    up, down = response.json()["targets"]
    assert up == {
        "address": target.address,
        "status": "up",
        "problem": None,
        "advertised_address": None,
        "wire_version": WIRE_VERSION,
        "model": "scripted",
        "adapters": [],
        "num_draft_links": 1,
        "num_draft_links_configured": 2,
        "running": 1,
        "waiting": 2,
    }
    assert down["address"] == NOBODY
    assert down["status"] == "down"
    assert "UNAVAILABLE" in down["problem"]


def test_models_lists_the_one_served(router):
    body = router.client.get("/v1/models").json()
    assert body["object"] == "list"
    (model,) = body["data"]
    assert (model["id"], model["object"], model["owned_by"]) == (router.model, "model", "outrider")
    assert model["max_model_len"] == MAX_MODEL_LEN
    assert router.client.get(f"/v1/models/{router.model}").json() == model


@pytest.mark.parametrize("model", ["gpt-9", "owner/name", "tiny-model/"])
def test_another_model_is_404(router, model):
    response = router.client.get(f"/v1/models/{model}")
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("not_found_error", "model", "model_not_found")


def test_a_router_without_targets_says_so(new_router):
    router = new_router([NOBODY])
    health = router.client.get("/health")
    assert health.status_code == 503
    assert NOBODY in health.json()["reason"]
    refused = router.complete(prompt="fox")
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert router.complete(prompt="").status_code == 400
    assert router.client.get("/v1/models").status_code == 200


def test_a_target_may_come_late_go_and_come_back(background, new_router, target):
    background.run(target.stop())
    router = new_router([target.address])

    def healthy() -> bool:
        return router.client.get("/health").status_code == 200

    for _ in range(2):
        assert not healthy()
        background.run(target.start())
        wait_until(healthy)
        assert router.complete(prompt="fox").status_code == 200
        background.run(target.stop())
        wait_until(lambda: not healthy())


def test_a_target_with_another_tokenizer_is_not_used(new_router, target, tokenizer):
    target.description.model.tokenizer_fingerprint = "f" * 64
    router = new_router([target.address])
    health = router.client.get("/health")
    assert health.status_code == 503
    assert "f" * 64 in health.json()["reason"]
    assert tokenizer.fingerprint() in health.json()["reason"]
    assert router.complete(prompt="fox").status_code == 503


def test_version(router):
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", router.client.get("/version").json()["version"])


def test_no_target_address_is_a_configuration_error(model_folder):
    with pytest.raises(ConfigurationError, match=r"target\.addresses"):
        create_app(Config.model_validate({"target": {"model": str(model_folder)}}))


def test_a_taken_port_is_a_configuration_error(router, model_folder):
    taken = int(router.url.rpartition(":")[2])
    config = Config.model_validate(
        {
            "target": {"model": str(model_folder), "addresses": [NOBODY]},
            "router": {"port": taken},
        }
    )
    with pytest.raises(ConfigurationError, match=str(taken)):
        run(config)


PROGRAM = """
import sys
from cluster.config import Config
from cluster.telemetry.logs import setup_logging
from services.launch.local import free_ports
from services.router.main import run
setup_logging("router")
status = run(Config.model_validate_json(sys.argv[1]))
heavy = {"torch", "transformers", "numpy"} & sys.modules.keys()
print(sorted(heavy), status)
"""


@contextlib.contextmanager
def program(
    model_folder, target, *, verify: ssl.SSLContext | None = None, **settings
) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """The router as a process, ready, and a client of it. `verify`: what that takes for its certificate."""
    config = Config.model_validate(
        {
            "target": {"model": str(model_folder), "addresses": [target.address]},
            "router": {"port": 0, **settings},
        }
    )
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, config.model_dump_json()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"http_proxy": "http://127.0.0.1:9"},  # gRPC must not take it
    )
    try:
        assert process.stderr is not None
        lines = []
        while not (found := re.search(r"https?://\S+", lines[-1] if lines else "")):
            lines.append(process.stderr.readline())
            assert lines[-1], "".join(lines)
        with httpx.Client(base_url=found.group(), trust_env=False, verify=verify or False) as client:
            wait_until(lambda: client.get("/health").status_code == 200)
            yield process, client
    finally:
        process.kill()


def test_the_program_needs_no_torch_and_drains_on_sigterm(model_folder, target):
    with program(model_folder, target) as (process, client):
        target.delay_s = 0.1
        payload = {"prompt": [70], "max_tokens": 6, "stream": True}
        with client.stream("POST", "/v1/completions", json=payload) as response:
            pieces = response.iter_text()
            next(pieces)
            os.kill(process.pid, signal.SIGTERM)
            assert "".join(pieces).endswith("data: [DONE]\n\n")
        stdout, stderr = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, stderr
    assert stdout.strip() == "[] 0"
    assert "Traceback" not in stderr


def test_what_still_runs_when_draining_is_over_is_told_so(model_folder, target):
    target.hang_after = 1
    with program(model_folder, target, drain_seconds=0) as (process, client), ThreadPoolExecutor(1) as threads:
        whole = threads.submit(client.post, "/v1/completions", json={"prompt": [70]})
        with client.stream("POST", "/v1/completions", json={"prompt": [71], "stream": True}) as response:
            pieces = response.iter_text()
            next(pieces)
            wait_until(lambda: len(target.requests) == 2)
            os.kill(process.pid, signal.SIGTERM)
            (last,) = [piece for piece in "".join(pieces).split("\n\n") if piece]
        answer = whole.result()
        _, stderr = process.communicate(timeout=WAIT_S)
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "unavailable_error"
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    assert answer.json()["error"]["type"] == "unavailable_error"
    assert process.returncode == 0, stderr
    assert "Traceback" not in stderr


def test_probes_notice_before_the_port_closes(model_folder, target):
    """Requests are served meanwhile; afterwards nothing listens."""
    with program(model_folder, target, drain_notice_seconds=1.0) as (process, client):
        os.kill(process.pid, signal.SIGTERM)
        wait_until(lambda: client.get("/health").status_code == 503)
        assert client.get("/health").json()["status"] == "draining"
        assert client.get("/ping").status_code == 503
        assert client.get("/health/live").status_code == 200
        assert client.post("/v1/completions", json={"prompt": [70], "max_tokens": 2}).status_code == 200
        assert process.wait(timeout=WAIT_S) == 0
        with pytest.raises(httpx.ConnectError):
            client.get("/health")


def test_a_second_signal_ends_the_notice(model_folder, target):
    with program(model_folder, target, drain_notice_seconds=600.0, drain_seconds=600.0) as (process, client):
        os.kill(process.pid, signal.SIGTERM)
        wait_until(lambda: client.get("/health").status_code == 503)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(timeout=WAIT_S) == 0


def test_who_watches_the_page_keeps_it_from_no_end(model_folder, target):
    with program(model_folder, target, drain_seconds=600) as (process, client):
        with client.stream("GET", "/page/events") as response:
            lines = response.iter_lines()
            assert next(lines) == "event: hello"
            os.kill(process.pid, signal.SIGTERM)
            assert ": the router is stopping" in list(lines)
        assert process.wait(timeout=WAIT_S) == 0


def test_operators_have_an_address_of_their_own(model_folder, target):
    (free_port,) = free_ports(1)
    with program(model_folder, target, admin_listen=f"127.0.0.1:{free_port}") as (process, client):
        with httpx.Client(base_url=f"http://127.0.0.1:{free_port}", trust_env=False) as admin:
            assert admin.put("/admin/speculation", json={"percentage": 0}).json() == {"percentage": 0}
            assert client.put("/admin/speculation", json={"percentage": 0}).status_code == 404
            assert client.post("/v1/completions", json={"prompt": [70], "max_tokens": 2}).status_code == 200
            assert target.requests[-1].num_speculative_tokens == 0
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(timeout=WAIT_S) == 0


def test_half_a_call_of_an_operator_keeps_nobody_from_ending(model_folder, target):
    (free_port,) = free_ports(1)
    head = (
        b"PUT /admin/speculation HTTP/1.1",
        b"Host: localhost",
        b"Content-Type: application/json",
        b"Content-Length: 100",
    )
    with (
        program(model_folder, target, admin_listen=f"127.0.0.1:{free_port}") as (process, _),
        socket.create_connection(("127.0.0.1", free_port)) as unfinished,
    ):
        unfinished.sendall(b"\r\n".join(head) + b"\r\n\r\n{")
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(timeout=WAIT_S) == 0
