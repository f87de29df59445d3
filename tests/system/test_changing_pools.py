"""Programs started one by one, which find each other in files: workers that are added and taken away."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from protos.speculation.v1 import draft_pb2_grpc, types_pb2
from services.launch.local import free_ports
from tests.system.client import eventually
from tests.waiting import WAIT_S


class Programs:
    """Simulated workers and a router that follow the files `targets` and `drafts`."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.targets, self.drafts = folder / "targets", folder / "drafts"
        self.targets.write_text("")
        self.drafts.write_text("")
        self._stack = stack

    def start(self, program: str, **settings: object) -> subprocess.Popen[bytes]:
        settings |= {
            "target.engine": "simulated",
            "draft.drafter": "simulated",
            "simulation.target_step_ms": "[[1, 20]]",
            "target.addresses": f"['file:{self.targets}']",
            "draft.addresses": f"['file:{self.drafts}']",
        }
        options = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        process = subprocess.Popen([sys.executable, "-m", "services.cli", program, *options])
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with contextlib.ExitStack() as stack:
        yield Programs(tmp_path, stack)


def test_workers_are_added_and_taken_away_while_requests_run(programs: Programs) -> None:
    first, second, draft, other_draft, http = free_ports(5)
    programs.targets.write_text(f"127.0.0.1:{first}\n")
    programs.drafts.write_text(f"127.0.0.1:{draft}\n")
    programs.start("draft", **{"draft.listen": f"127.0.0.1:{draft}"})
    programs.start("draft", **{"draft.listen": f"0.0.0.0:{other_draft}", "draft.advertise": f"gateway:{other_draft}"})
    one = programs.start("target", **{"target.listen": f"127.0.0.1:{first}"})
    programs.start("target", **{"target.listen": f"127.0.0.1:{second}", "target.advertise": f"gateway:{second}"})
    programs.start("router", **{"router.port": http})

    with httpx.Client(base_url=f"http://127.0.0.1:{http}", timeout=WAIT_S, verify=False) as client:

        def targets() -> list[dict]:
            with contextlib.suppress(httpx.TransportError):
                return client.get("/health").json()["targets"]
            return []

        def links() -> list[tuple[int, int]]:
            return [(target.get("num_draft_links"), target.get("num_draft_links_configured")) for target in targets()]

        def complete(seed: int) -> str:
            fields = {"prompt": "def f(", "max_tokens": 8, "temperature": 1, "seed": seed, "return_token_ids": True}
            response = client.post("/v1/completions", json=fields)
            assert response.status_code == 200, response.text
            return response.json()["choices"][0]["token_ids"]

        assert eventually(lambda: links() == [(1, 1)])
        (target,) = targets()
        assert (target["status"], target["advertised_address"]) == ("up", f"127.0.0.1:{first}")
        assert target["wire_version"] > 0
        expected = complete(1)

        # Another of both.
        programs.drafts.write_text(f"127.0.0.1:{draft}\n127.0.0.1:{other_draft}  # on its way\n")
        programs.targets.write_text(f"127.0.0.1:{first}\n127.0.0.1:{second}\n")
        assert eventually(lambda: links() == [(2, 2)] * 2)
        assert [target["advertised_address"] for target in targets()][1] == f"gateway:{second}"
        assert {target["problem"] for target in targets()} == {None}

        # The first leaves the list, and then ends: nothing is asked of it any more.
        programs.targets.write_text(f"127.0.0.1:{second}\n")
        assert eventually(lambda: len(targets()) == 1)
        one.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline:
            assert complete(1) == expected

    with grpc.insecure_channel(f"127.0.0.1:{other_draft}") as channel:
        description = draft_pb2_grpc.DraftStub(channel).Describe(types_pb2.DescribeRequest())
    assert description.advertised_address == f"gateway:{other_draft}"
    assert description.wire_version > 0
