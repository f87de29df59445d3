"""Compares Outrider with `vllm serve`, on one GPU: `python -m bench.gpu_vllm --pair DIR`.

Outrider's target runs on vLLM, or with `--engine torch` on this project's engine.

The servers are `vllm serve` alone, `vllm serve` with its own draft model, and clusters of this project: with the draft
in the target's process, and with a draft worker that computes on the machine's CPU. A cluster runs at fixed k and at a
k that it chooses. All servers are in the GPU's memory at once. Each measures a point before any goes on to the next, so
that a drift of the machine affects all of them equally. Answers are not streamed. DIR has `target` and `draft`, as
`bench.models` writes them.

Before that, `--exact` compares answers of the bundled pair without drafts with those under speculation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import yaml

from bench.exactness import answers, num_differing
from bench.result import write_result
from bench.workload import held_out_prompts, read_counters
from cluster.config import Config
from cluster.config.file import load_config
from services.launch.child import Child
from services.launch.local import LocalCluster, free_ports
from services.prove.client import ask_all
from services.prove.vllm_server import vllm_server

ANSWER_TOKENS = 128
MAX_MODEL_LEN = 1024
MAX_NUM_SEQS = 64
_READY_SECONDS = 300.0
_KV_CACHE_BYTES = 2**30
_SHARED_MEMORY = 0.1  # of the GPU, as vLLM checks it: what has to be free when an engine starts
_WARM_TOKENS = 24
_EXACT_PROMPTS = 20  # answers of 250 tokens


@dataclass(slots=True)
class Server:
    name: str
    child: Child
    url: str
    k: int | str | None = None  # what Outrider is asked for; None: of vLLM's own
    where: str = ""  # its draft is: `in-process` or `remote`
    pages: Sequence[str] = ()  # of its workers' metrics

    def ask(self, prompts: Sequence[Sequence[int]], num_streams: int, temperature: float, num_tokens: int) -> float:
        """Tokens a second of answers to `prompts`, `num_streams` at a time."""
        body: dict[str, Any] = {"model": "target", "max_tokens": num_tokens, "ignore_eos": True}
        body |= {"temperature": temperature} | ({} if self.k is None else {"num_speculative_tokens": self.k})
        bodies = [body | {"prompt": list(prompt)} for prompt in prompts]
        return ask_all(self.url, bodies, num_streams=num_streams, is_streamed=False).tokens_per_second

    def is_up(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False


@dataclass(slots=True)
class Cell:
    """Tokens a second of each repeat; `serve` and `draft_model` are those of the same run."""

    pair: str
    streams: int
    temperature: float
    k: int | str
    where: str
    tokens_per_second: list[float] = field(default_factory=list)
    serve: list[float] = field(default_factory=list)
    draft_model: list[float] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="outrider-gpu-vllm-") as name:
        servers = _servers(Path(name), arguments)
        try:
            for server in {id(server.child): server for server in servers}.values():
                server.child.start()
            exactness = _exactness(arguments)  # while they load
            up = _wait(servers)
            for rates in _measure(up, arguments):
                document = _document(up, rates, exactness, arguments)
                write_result(arguments.out, document)
            print(table(document), flush=True)
        finally:
            for server in servers:
                server.child.kill()
    return 0


def table(document: Mapping[str, Any]) -> str:
    """A row for each number of streams and temperature, a column for each k and place of the draft; medians."""
    cells = document["cells"]
    ways = list(dict.fromkeys(map(_way, cells)))
    lines = ["| streams | T | vllm serve | its draft_model | " + " | ".join(ways) + " |"]
    lines.append("| --- " * (4 + len(ways)) + "|")
    for streams, temperature in dict.fromkeys((cell["streams"], cell["temperature"]) for cell in cells):
        own = {_way(c): c for c in cells if (c["streams"], c["temperature"]) == (streams, temperature)}
        first = next(iter(own.values()))
        serve, drafted = (_median(first[peer]) for peer in ("serve", "draft_model"))
        row = [
            f"{_median(own[way]['tokens_per_second']):.0f} ({_ratio(own[way], 'serve'):.2f})" if way in own else ""
            for way in ways
        ]
        lines.append(f"| {streams} | {temperature:g} | {serve:.0f} | {drafted:.0f} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def _way(cell: Mapping[str, Any]) -> str:
    """The title of the column of `cell`: its k, and where its draft is."""
    return f"k = {cell['k']}" + (f", {cell['where']}" if cell["where"] else "")


def _median(rates: Sequence[float]) -> float:
    return statistics.median(rates) if rates else 0.0


def _ratio(cell: Mapping[str, Any], peer: str) -> float:
    return _median(cell["tokens_per_second"]) / (_median(cell[peer]) or float("nan"))


def _servers(folder: Path, arguments: argparse.Namespace) -> list[Server]:
    target, draft = str(arguments.pair / "target"), str(arguments.pair / arguments.draft)
    made = [_vllm("serve", target, None, arguments)]
    for name in arguments.draft_models:
        k, way = name.split("-")
        own = {"method": "draft_model", "model": draft, "num_speculative_tokens": int(k), "draft_sample_method": way}
        made.append(_vllm(f"draft_model {name}", target, own, arguments))
    clusters = {where: _outrider(folder, target, draft, where, arguments) for where, _ in arguments.cells}
    made += [replace(clusters[where], name=f"outrider {where} k={k}", k=k) for where, k in arguments.cells]
    return made


def _vllm(name: str, model: str, speculative: Mapping[str, Any] | None, arguments: argparse.Namespace) -> Server:
    (port,) = free_ports(1)
    options = {
        **{"model": model, "served-model-name": "target", "port": port, "dtype": "bfloat16"},
        **{"max-model-len": MAX_MODEL_LEN, "max-num-seqs": MAX_NUM_SEQS, "max-num-batched-tokens": 2048},
        **{"kv-cache-memory-bytes": _KV_CACHE_BYTES, "gpu-memory-utilization": _SHARED_MEMORY},
        **{"enable-prefix-caching": False, "disable-uvicorn-access-log": True},
        **{key.replace("_", "-"): value for key, value in arguments.engine_args.items()},
        **({} if speculative is None else {"speculative-config": speculative}),
    }
    return Server(name, vllm_server(name, options), f"http://127.0.0.1:{port}")


def _outrider(folder: Path, target: str, draft: str, where: str, arguments: argparse.Namespace) -> Server:
    port, *page_ports = free_ports(3)
    shared = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": MAX_NUM_SEQS, "enable_prefix_caching": False}
    settings = {
        "target": {
            **shared,
            **{
                "engine": arguments.engine,
                "model": target,
                "device": "cuda",
                "dtype": "bfloat16",
                "max_num_batched_tokens": 2048,
            },
            **{"kv_cache_bytes": _KV_CACHE_BYTES, "memory_utilization": _SHARED_MEMORY},
            **({"engine_args": arguments.engine_args} if arguments.engine == "vllm" else {}),
            **{"metrics_port": page_ports[0]},
        },
        "draft": {**shared, "model": draft, "metrics_port": page_ports[1], **_placed(where)},
        "speculation": {"num_speculative_tokens": 4, "max_speculative_tokens": 8},
        "router": {"port": port, "served_model_name": "target"},
        "logging": {"level": "warning"},
    }
    if where == "remote":
        settings["draft"]["threads"] = arguments.draft_threads
    for path, value in (text.split("=", 1) for text in arguments.set):
        section, key = path.split(".")
        settings[section][key] = yaml.safe_load(value)
    file = folder / f"{where}.yaml"
    file.write_text(yaml.safe_dump(settings), encoding="utf-8")
    environment = {"VLLM_USE_V2_MODEL_RUNNER": str(int(arguments.runner == "V2"))}
    child = Child(f"outrider {where}", ["serve", "--config", str(file)], environment=environment)
    pages = [f"http://127.0.0.1:{own}/metrics" for own in (port, *page_ports[: 1 + (where == "remote")])]
    return Server("outrider", child, f"http://127.0.0.1:{port}", where=where, pages=pages)


def _placed(where: str) -> dict[str, Any]:
    return {"placement": "in-process"} if where == "in-process" else {"device": "cpu"}


def _exactness(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Counts tokens that differ from those without drafts, for the bundled pair."""
    runner = {"VLLM_USE_V2_MODEL_RUNNER": str(int(arguments.runner == "V2")), "TRITON_F32_DEFAULT": "ieee"}
    prompts = held_out_prompts(_EXACT_PROMPTS, seed=1)
    found = []
    with ExitStack() as running:
        clusters = {
            (kind, where): running.enter_context(
                LocalCluster(_exact_config(kind, where, arguments), {"target": runner, "draft": runner})
            )
            for kind in arguments.exact
            for where in dict.fromkeys(where for where, _ in arguments.cells)
        }
        for (kind, where), cluster in clusters.items():
            cluster.wait_ready(_READY_SECONDS)
            expected = answers(cluster.url, prompts, k=0, concurrency=8)
            others = {k: answers(cluster.url, prompts, k=k, concurrency=at_once) for k, at_once in ((4, 8), (7, 20))}
            counters = read_counters(f"{cluster.url}/metrics")
            found.append(
                {
                    "kind": kind,
                    "where": where,
                    "num_tokens": sum(map(len, expected)),
                    "num_accepted_drafts": int(counters["vllm:spec_decode_num_accepted_tokens_total"]),
                    "num_different_tokens": {k: num_differing(expected, other)[0] for k, other in others.items()},
                }
            )
            print(found[-1], file=sys.stderr, flush=True)
    return found


def _exact_config(kind: str, where: str, arguments: argparse.Namespace) -> Config:
    dtype, _, numerics = kind.partition("-")
    engine_args = arguments.engine_args | ({"attention_backend": "TRITON_ATTN"} if numerics else {})
    settings = {
        **{"router.port": 0, "logging.level": "warning", "target.engine": arguments.engine, "target.device": "cuda"},
        **{"target.dtype": dtype, "target.numerics": numerics or "fast"},
        **({"target.engine_args": json.dumps(engine_args)} if arguments.engine == "vllm" else {}),
        **{"target.kv_cache_bytes": 2**28, "target.max_model_len": MAX_MODEL_LEN, "target.max_num_seqs": 32},
        **{"target.max_num_batched_tokens": 2048, "target.memory_utilization": 0.02},
        **{f"draft.{name}": value for name, value in _placed(where).items()},
        **{"draft.dtype": dtype, "speculation.max_speculative_tokens": 8, "speculation.draft_timeout_ms": 1000},
    }
    return load_config(None, [f"{key}={value}" for key, value in settings.items()])


def _wait(servers: Sequence[Server]) -> list[Server]:
    """Waits for `servers`, and returns those that came up."""
    started_at = time.monotonic()
    up: list[Server] = []
    for server in servers:
        while not (is_up := server.is_up()) and not server.child.has_ended():
            if time.monotonic() > started_at + _READY_SECONDS:
                break
            time.sleep(0.3)
        up += [server] if is_up else []
        state = f"ready within {time.monotonic() - started_at:.0f} s" if is_up else "did not start"
        print(f"{server.name}: {state}", file=sys.stderr, flush=True)
    return up


def _measure(
    servers: Sequence[Server], arguments: argparse.Namespace
) -> Iterator[dict[tuple[int, float, str], list[float]]]:
    """Yields tokens per second so far, by streams, temperature and server, after each point: a run may be cut off."""
    rates: dict[tuple[int, float, str], list[float]] = {}
    num_prompts: dict[tuple[int, str], int] = {}
    for repeat in range(-1, arguments.repeats):  # the first is not counted
        for streams in arguments.streams:
            prompts = held_out_prompts(64 * streams, seed=streams)
            for temperature in arguments.temperatures:
                for server in servers:
                    if repeat < 0:
                        rate = server.ask(prompts[: 2 * streams], streams, temperature, _WARM_TOKENS)
                        rounds = max(1, round(arguments.seconds * rate / (streams * ANSWER_TOKENS)))
                        num_prompts[streams, server.name] = streams * min(64, rounds)
                        continue
                    own = prompts[: num_prompts[streams, server.name]]
                    before = _counters(server) if repeat == 0 and server.k is not None else {}
                    rate = server.ask(own, streams, temperature, ANSWER_TOKENS)
                    rates.setdefault((streams, temperature, server.name), []).append(rate)
                    if before:
                        _tell(server, streams, temperature, rate, before)
                if repeat >= 0:
                    yield rates


def _counters(server: Server) -> dict[str, float]:
    counters: dict[str, float] = {}
    for page in server.pages:
        counters |= read_counters(page)
    return counters


def _tell(server: Server, streams: int, temperature: float, rate: float, before: Mapping[str, float]) -> None:
    """Prints how the time of a cluster's steps is divided."""
    grown = {name: value - before.get(name, 0.0) for name, value in _counters(server).items()}
    rounds = grown.get("vllm:spec_decode_num_drafts_total", 0.0)
    accepted = grown.get("vllm:spec_decode_num_accepted_tokens_total", 0.0)
    told = {
        name: value for name, value in grown.items() if "seconds_total" in name or name.startswith("outrider_steps")
    }
    text = ", ".join(f"{name.removeprefix('outrider_')} {value:.3f}" for name, value in told.items() if value)
    print(
        f"{server.name}, {streams} streams, T = {temperature:g}: {rate:.0f} tokens/s, "
        f"{1 + accepted / rounds if rounds else 1:.2f} tokens a round; {text}",
        file=sys.stderr,
        flush=True,
    )


def _document(
    servers: Sequence[Server],
    rates: Mapping[tuple[int, float, str], list[float]],
    exactness: Sequence[Mapping[str, Any]],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    import torch

    names = [server.name for server in servers]
    cells = []
    for streams in arguments.streams:
        for temperature in arguments.temperatures:
            if (streams, temperature, names[0]) not in rates:
                continue
            drafted = [rates[streams, temperature, name] for name in names if name.startswith("draft_model")]
            best = max(drafted, key=_median, default=[])
            for server in servers:
                if server.k is None:
                    continue
                own = rates[streams, temperature, server.name]
                where = "" if server.k == 0 else server.where
                serve = rates.get((streams, temperature, "serve"), [])
                cells.append(Cell(arguments.pair_name, streams, temperature, server.k, where, own, serve, best))
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "date": datetime.now(UTC).date().isoformat(),
        "commit": arguments.commit,
        "command": f"python -m bench.gpu_vllm {' '.join(sys.argv[1:])}",
        "runner": arguments.runner,
        "exactness": list(exactness),
        "cells": [asdict(cell) for cell in cells],
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.gpu_vllm", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pair", type=Path, required=True, help="folder with `target` and `draft`")
    parser.add_argument("--draft", default="draft", help="name of the draft's folder in --pair")
    parser.add_argument("--pair-name", default="4.2B + 2M")
    parser.add_argument("--engine", choices=["vllm", "torch"], default="vllm", help="of the cluster's target")
    parser.add_argument("--runner", choices=["V1", "V2"], default="V2", help="of the cluster's target, on vLLM")
    parser.add_argument("--streams", type=lambda text: [int(n) for n in text.split(",")], default=[1, 4, 16])
    parser.add_argument("--temperatures", type=lambda text: [float(t) for t in text.split(",")], default=[0.0, 1.0])
    parser.add_argument(
        "--cells",
        type=lambda text: [_cell(part) for part in text.split(",")],
        default=[("in-process", 0), ("in-process", 4), ("in-process", "auto"), ("remote", "auto")],
        metavar="WHERE:K,...",
        help="of the clusters: where the draft is, in-process or remote, and k",
    )
    parser.add_argument(
        "--draft-models",
        type=lambda text: [name for name in text.split(",") if name],
        default=["3-greedy", "5-greedy", "3-probabilistic"],
        help="of `vllm serve`: K and how drafts are sampled",
    )
    parser.add_argument("--draft-threads", type=int, default=4, help="of the draft worker")
    parser.add_argument(
        "--exact",
        type=lambda text: [kind for kind in text.split(",") if kind],
        default=["float32", "bfloat16-invariant"],
        help="kinds of arithmetic in which answers are compared",
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="about what one measurement takes")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="further arguments of vLLM, as JSON")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="of the cluster")
    parser.add_argument("--commit", default="", help="of the code that is measured")
    parser.add_argument("--out", type=Path, default=Path("bench/results/gpu-vllm.json"))
    return parser


def _cell(text: str) -> tuple[str, int | str]:
    where, _, k = text.partition(":")
    return where, int(k) if k.isdigit() else k


if __name__ == "__main__":
    sys.exit(main())
