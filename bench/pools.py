"""Measures how fast load follows a target that joins or leaves a pool: `python -m bench.pools`.

It runs once with a file of addresses, and once with DNS, using a hosts file that only this run sees. The latter needs
the right to create a mount namespace. It prints the time from the change until the new target has its share of the
streams, at least two fifths. Then the other target is removed from the list, and it prints the time until nearly all
streams run on the new one. No request may fail.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx

from bench.fault_client import Clients, Question
from services.launch.child import Child, end_all
from services.launch.local import free_ports

BAR_SECONDS = 5.0
READY_SECONDS = 60.0
NUM_STREAMS = 16
SHARE = 0.4
NAME = "targets.outrider.test"
_HOSTS = Path("/etc/hosts")
_INSIDE = "--inside"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.pools", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--by", choices=("file", "dns"), default=None, help="default: both")
    parser.add_argument(_INSIDE, action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.by is None:
        return max(main(["--by", by]) for by in ("file", "dns"))
    if arguments.by == "dns" and not arguments.inside:
        return _with_own_hosts(["--by", "dns", _INSIDE])
    with tempfile.TemporaryDirectory() as folder:
        return measure(arguments.by, Path(folder))


def _with_own_hosts(arguments: Sequence[str]) -> int:
    with tempfile.NamedTemporaryFile("w", suffix=".hosts") as hosts:
        hosts.write(_HOSTS.read_text(encoding="utf-8"))
        hosts.flush()
        script = 'mount --bind "$0" /etc/hosts && exec "$@"'
        command = ["unshare", "--mount", "sh", "-c", script, hosts.name]
        return subprocess.run([*command, sys.executable, "-m", "bench.pools", *arguments], check=False).returncode


def measure(by: str, folder: Path) -> int:
    port, http = free_ports(2)
    file = folder / "targets"
    before = _HOSTS.read_text(encoding="utf-8") if by == "dns" else ""

    def publish(*hosts: str) -> None:
        """The pool is of these from now on."""
        if by == "file":
            file.write_text("".join(f"{host}:{port}\n" for host in hosts), encoding="utf-8")
        else:
            with _HOSTS.open("r+", encoding="utf-8") as own:  # in place: the mount is of this very file
                own.write(before + "".join(f"{host} {NAME}\n" for host in hosts))
                own.truncate()

    hosts = ("127.0.0.1", "127.0.0.2")
    publish(hosts[0])
    address = f"file:{file}" if by == "file" else f"dns:{NAME}:{port}"
    common = ["--set", "target.engine=simulated", "--set", "draft.drafter=simulated"]
    common += ["--set", "simulation.target_step_ms=[[1, 20]]", "--set", f"target.addresses=['{address}']"]
    targets = [Child(f"target {host}", ["target", *common, "--set", f"target.listen={host}:{port}"]) for host in hosts]
    router = Child("router", ["router", *common, "--set", f"router.port={http}"])
    url = f"http://127.0.0.1:{http}"
    for child in (*targets, router):
        child.start()
    questions = [Question([3 + index], index, 40) for index in range(NUM_STREAMS)]
    clients = Clients([url], questions, None, may_change_router=False)
    load = threading.Thread(target=lambda: asyncio.run(clients.run()))
    try:
        _seconds_until(lambda: len(_running(url)) == 1)
        load.start()
        time.sleep(2.0)
        publish(*hosts)
        joined = _seconds_until(lambda: _running(url).get(f"{hosts[1]}:{port}", 0) >= SHARE * NUM_STREAMS)
        time.sleep(2.0)
        publish(hosts[1])
        left = _seconds_until(lambda: _running(url).get(f"{hosts[1]}:{port}", 0) >= 0.9 * NUM_STREAMS)
    finally:
        clients.stop()
        if load.ident is not None:
            load.join()
        end_all([router, *targets], 10.0)
    tally = clients.tally
    print(
        f"by {by}: {tally.num_sent} requests, {tally.num_failed} failed; the newcomer had its share after "
        f"{joined:.1f} s, nearly all {left:.1f} s after the other left (bar {BAR_SECONDS:g} s)",
        flush=True,
    )
    return int(tally.num_failed > 0 or joined > BAR_SECONDS)


def _running(url: str) -> dict[str, int]:
    """Sequences that run on each target of the pool that can be used."""
    try:
        entries = httpx.get(f"{url}/health", timeout=2.0).json()["targets"]
    except (httpx.HTTPError, KeyError):
        return {}
    return {entry["address"]: entry["running"] for entry in entries if entry["problem"] is None}


def _seconds_until(condition: Callable[[], bool]) -> float:
    started_at = time.monotonic()
    while not condition():
        if time.monotonic() > started_at + READY_SECONDS:
            raise TimeoutError(f"not within {READY_SECONDS:.0f} s (process {os.getpid()})")
        time.sleep(0.05)
    return time.monotonic() - started_at


if __name__ == "__main__":
    sys.exit(main())
