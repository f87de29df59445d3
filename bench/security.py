"""Measures the cost of keys, TLS and a token: `python -m bench.security`.

Two simulated clusters on loopback, one without and one with all three, answer in turn. Measured are the time to first
token of one request at a time over a kept connection, and tokens a second of concurrent streams. Engines are simulated
because real ones would compute the same in both clusters and only hide the difference. The processor time of TLS in
router, workers and client is included.
"""

from __future__ import annotations

import argparse
import contextlib
import ssl
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from cluster.config.file import load_config
from deploy.certificates import write_certificates
from services.launch.local import LocalCluster

KEY = "sk-bench-0123456789abcdef"
SIMULATED = (
    "target.engine=simulated",
    "draft.drafter=simulated",
    "router.port=0",
    "simulation.draft_step_ms=[[1, 0.2]]",
)


def secure_settings(folder: Path) -> list[str]:
    write_certificates(folder, [], days=1)
    (folder / "keys").write_text(f"bench:{KEY}\n", encoding="utf-8")
    files = {
        "ca_file": "ca.crt",
        "certificate_file": "{program}.crt",
        "key_file": "{program}.key",
        "token_file": "token",
    }
    return [
        *(f"tls.{name}={folder}/{file}" for name, file in files.items()),
        f"router.tls_certificate_file={folder}/router.crt",
        f"router.tls_key_file={folder}/router.key",
        f"router.api_keys_file={folder}/keys",
        "router.requests_per_minute_per_key=1000000",
        "router.max_requests_per_key=1000",
    ]


def first_token_ms(client: httpx.Client) -> float:
    began_at = time.perf_counter()
    body = {"prompt": [70, 71], "max_tokens": 2, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        pieces = answer.iter_raw()
        next(pieces)
        took = time.perf_counter() - began_at
        for _ in pieces:
            pass
    assert answer.status_code == 200
    return 1e3 * took


def tokens_per_second(client: httpx.Client, num_streams: int, num_tokens: int) -> float:
    def ask(_: int) -> None:
        body = {"prompt": [70, 71], "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            for _piece in answer.iter_raw():
                pass
        assert answer.status_code == 200

    began_at = time.perf_counter()
    with ThreadPoolExecutor(num_streams) as threads:
        list(threads.map(ask, range(2 * num_streams)))
    return 2 * num_streams * num_tokens / (time.perf_counter() - began_at)


def compare(name: str, unit: str, values: dict[str, list[float]]) -> None:
    plain, secured = values["plain"], values["secured"]
    pairs = [after - before for before, after in zip(plain, secured, strict=True)]
    before, after, difference = map(statistics.median, (plain, secured, pairs))
    quarter, _, three_quarters = statistics.quantiles(pairs, n=4)
    print(
        f"{name}: {before:.3g} {unit} without, {after:.3g} with; difference {difference:+.3g} {unit} "
        f"(quartiles {quarter:+.3g}, {three_quarters:+.3g}), {100 * difference / before:+.1f} %"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--requests", type=int, default=40, help="in a round, of which the median counts; default 40")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--step-ms", type=float, default=10.0, help="of the simulated target; default 10")
    arguments = parser.parse_args()
    step = f"simulation.target_step_ms=[[1, {arguments.step_ms}]]"
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        settings = {"plain": [], "secured": secure_settings(folder)}
        context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        clients: dict[str, httpx.Client] = {}
        for name, own in settings.items():
            cluster = stack.enter_context(LocalCluster(load_config(None, [*SIMULATED, step, *own])))
            cluster.wait_ready(60)
            headers = {"authorization": f"Bearer {KEY}"}
            client = httpx.Client(base_url=cluster.url, verify=context, headers=headers, timeout=60, trust_env=False)
            clients[name] = stack.enter_context(client)
            tokens_per_second(client, arguments.streams, 32)  # connections, and whatever else is made at first
        firsts: dict[str, list[float]] = {"plain": [], "secured": []}
        speeds: dict[str, list[float]] = {"plain": [], "secured": []}
        for number in range(arguments.rounds):
            for name in sorted(clients, reverse=bool(number % 2)):
                client = clients[name]
                firsts[name].append(statistics.median(first_token_ms(client) for _ in range(arguments.requests)))
                speeds[name].append(tokens_per_second(client, arguments.streams, 128))
    compare("time to the first token", "ms", firsts)
    compare(f"tokens a second at {arguments.streams} streams", "/s", speeds)


if __name__ == "__main__":
    main()
