"""Counts requests lost between clients and a router, with and without nginx: `python -m bench.proxies`.

A prompt takes longer than nginx waits for an answer (60 s by default), and then connections are used again after about
as long as nginx or the router keeps them. The cluster has simulated engines; nginx has its defaults, HTTP/1.1 and
connections to the router that it keeps. Needs nginx (`apt-get install nginx-light`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from bench.in_process import SIMULATED
from bench.machine import describe_machine
from cluster.config.file import load_config
from services.launch.local import LocalCluster, free_ports

READY_SECONDS = 60.0
_NGINX = """
daemon off;
pid {folder}/nginx.pid;
error_log stderr warn;
events {{ worker_connections 4096; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  upstream router {{ server 127.0.0.1:{router_port}; keepalive {connections}; }}
  server {{
    listen 127.0.0.1:{port};
    keepalive_timeout 300s;
    location / {{ proxy_pass http://router; proxy_http_version 1.1; proxy_set_header Connection ""; }}
  }}
}}
"""


@dataclass(frozen=True, slots=True)
class Result:
    case: str
    requests: int
    lost: int
    errors: dict[str, int]


@contextlib.contextmanager
def nginx(router_url: str, connections: int) -> Iterator[str]:
    """Runs nginx in front of the router at `router_url`; yields its address."""
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory(prefix="bench-proxies-") as folder:
        config = Path(folder) / "nginx.conf"
        router_port = router_url.rpartition(":")[2]
        config.write_text(
            _NGINX.format(folder=folder, router_port=router_port, port=port, connections=connections), encoding="utf-8"
        )
        program = subprocess.Popen(["nginx", "-p", folder, "-c", str(config)])
        try:
            url = f"http://127.0.0.1:{port}"
            for _ in range(100):
                with contextlib.suppress(httpx.TransportError):
                    httpx.get(f"{url}/health/live")
                    break
                time.sleep(0.1)
            yield url
        finally:
            program.terminate()
            program.wait()


def stream_slow_prompt(url: str) -> Result:
    """Streams an answer whose first token takes longer than a proxy waits."""
    body = {"prompt": [5] * 64, "max_tokens": 4, "stream": True}
    started_at, events, comments = time.monotonic(), 0, 0
    errors: Counter[str] = Counter()
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30.0) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                events += line.startswith("data: {")
                comments += line.startswith(":")
    except httpx.HTTPError as error:
        errors[type(error).__name__] += 1
    print(f"{events} events and {comments} comments in {time.monotonic() - started_at:.0f} s", flush=True)
    return Result("slow prompt", 1, int(events < 1 or bool(errors)), dict(errors))


async def use_again(url: str, case: str, connections: int, least_s: float, most_s: float) -> Result:
    """Sends a request on each of many connections, and another once it was idle for a while."""
    errors: Counter[str] = Counter()
    rng = random.Random(1)

    async def one(idle_s: float) -> None:
        limits = httpx.Limits(max_connections=1, keepalive_expiry=1000.0)
        async with httpx.AsyncClient(base_url=url, timeout=60.0, limits=limits) as client:
            for pause_s in (idle_s, 0.0):
                try:
                    response = await client.post("/tokenize", json={"prompt": "a"})
                    if response.status_code != 200:
                        errors[str(response.status_code)] += 1
                except httpx.HTTPError as error:
                    errors[type(error).__name__] += 1
                await asyncio.sleep(pause_s)

    await asyncio.gather(*(one(rng.uniform(least_s, most_s)) for _ in range(connections)))
    return Result(case, 2 * connections, sum(errors.values()), dict(errors))


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    if shutil.which("nginx") is None:
        raise SystemExit("nginx is missing: apt-get install nginx-light")
    results = []
    slow = ["simulation.target_step_ms=[[1,20],[32,20],[64,70000]]", "target.max_prefill_ms=null"]
    settings = [*SIMULATED, "router.port=0", "draft.replicas=0", "logging.level=error"]
    with LocalCluster(load_config(None, [*settings, *slow])) as cluster:
        cluster.wait_ready(READY_SECONDS)
        with nginx(cluster.url, arguments.connections) as url:
            results.append(stream_slow_prompt(url))
    with LocalCluster(load_config(None, settings)) as cluster:
        cluster.wait_ready(READY_SECONDS)
        with nginx(cluster.url, arguments.connections) as url:
            again = use_again(url, "idle for 59 to 61 s, nginx", arguments.connections, 59.0, 61.0)
            results.append(asyncio.run(again))
        direct = use_again(cluster.url, "idle for 119 to 121 s, direct", arguments.connections, 119.0, 121.0)
        results.append(asyncio.run(direct))
    print("| case | requests | lost | errors |\n| --- | --- | --- | --- |")
    for one in results:
        print(f"| {one.case} | {one.requests} | {one.lost} | {one.errors or ''} |")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    document = {"machine": describe_machine(), "results": [asdict(one) for one in results]}
    arguments.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return int(any(one.lost for one in results))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.proxies", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--connections", type=int, default=250)
    parser.add_argument("--out", type=Path, default=Path("bench/results/proxies.json"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
