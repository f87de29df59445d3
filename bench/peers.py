"""Compares Outrider with other systems that serve the same pair on this machine, over HTTP: `python -m bench.peers`.

All systems are started with every core. They work in turn, and the others are stopped (SIGSTOP) meanwhile, so that a
drift of the machine affects all of them equally. Each answers the same prompts with the same number of tokens, from a
client that streams. vLLM has the libraries that it recommends preloaded. Draft-model speculation is tried at several K,
in vLLM greedy and probabilistic; each point keeps the best for each server (`bench.llama_cpp`). Hugging Face's assisted
generation has no server: it is called in its process, with one stream.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from bench.llama_cpp import convert, llama_server
from bench.models import make_pair
from bench.result import describe_machine, write_result
from bench.workload import held_out_prompts, p99, read_counters
from cluster.errors import ConfigurationError
from cluster.model_folder import resolve_model_folder
from cluster.tokenization import Tokenizer
from services.launch.child import Child
from services.launch.local import free_ports
from services.prove.client import RequestBurst, answer_all
from services.prove.vllm_server import vllm_server
from services.router.chat.template import ChatTemplate

READY_SECONDS = 400.0
MAX_MODEL_LEN = 1024
MAX_NUM_SEQS = 16
KV_CACHE_BYTES = 2**28  # all systems are in memory at once
_ENGINES = {"torch": "PyTorch", "vllm": "vLLM"}
_PROMPTS = {1: 6, 4: 12, 16: 32}  # ten seconds' work or so
_QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Explain how rain forms.",
    "Write a short story about a lighthouse keeper.",
    "What are three benefits of exercise?",
    "How do I make pancakes?",
    "Why is the sky blue?",
    "Describe the water cycle.",
    "What is photosynthesis?",
)
_OUTRIDER = re.compile(r"(?P<engine>torch|vllm-target)(-(?P<quantization>int8|int4))?(-k(?P<k>\d+))?(@(?P<ms>[\d.]+))?")
_LLAMA_CPP = re.compile(r"llama-(?P<type>bf16|f16|q8_0|f32)(-(?P<k>\d+))?")


@dataclass(slots=True)
class System:
    """A server, or several programs that make one."""

    name: str
    url: str
    children: list[Child]
    model: str = ""  # what it calls its model, once it is ready
    results: dict[tuple[float, int], list[Result]] = field(default_factory=dict)

    def processes(self) -> Iterator[int]:
        for child in self.children:
            yield from _tree(child.pid)

    def signal(self, signum: signal.Signals) -> None:
        for pid in list(self.processes()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    def is_ready(self) -> bool:
        """Returns whether it answers and all draft links that it has configured are up."""
        try:
            self.model = httpx.get(f"{self.url}/v1/models", timeout=5).json()["data"][0]["id"]
            answer_all(self.url, self.model, [[1, 2, 3]], num_streams=1, temperature=0.0, max_tokens=4)
            health = httpx.get(f"{self.url}/health", timeout=5)
            targets = health.json().get("targets", []) if health.content else []
        except (ConfigurationError, httpx.HTTPError, ValueError, LookupError):
            return False
        return all(target["num_draft_links"] == target["num_draft_links_configured"] for target in targets)

    def counters(self) -> dict[str, float]:
        return read_counters(f"{self.url}/metrics")


@dataclass(frozen=True, slots=True)
class Result:
    """One burst."""

    tokens_per_second: float
    first_token_seconds: float  # median
    first_token_p99_seconds: float
    token_seconds: float  # of an answer after its first token, for each token; median
    gap_p99_seconds: float  # between two tokens of an answer; those of one piece come together
    acceptance_length: float | None


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="outrider-peers-") as name:
        folder = Path(name)
        if arguments.target is None:
            make_pair(folder)
        else:
            for kind, model in (("target", arguments.target), ("draft", arguments.draft)):
                shutil.copytree(resolve_model_folder(model), folder / kind)
        systems, started = _systems(folder, arguments), []
        try:
            for system in systems:  # one after the other: starting takes every core
                started.append(system)
                _start(system)
                system.signal(signal.SIGSTOP)
            for repeat in range(arguments.repeats):
                for temperature in arguments.temperatures:
                    for num_streams in arguments.streams:
                        for system in systems:
                            prompts = _prompts(folder, num_streams, arguments.target is None)
                            _measure(system, prompts, temperature, num_streams, arguments.max_tokens)
                print(f"repeat {repeat + 1} of {arguments.repeats} done", file=sys.stderr, flush=True)
                _write(arguments, systems)
        finally:
            for system in started:
                system.signal(signal.SIGCONT)
                for child in system.children:
                    child.terminate()
            time.sleep(2.0)
            for system in started:
                system.signal(signal.SIGKILL)
        if "hf" in arguments.systems:
            _assisted(folder, arguments)
    print(table(json.loads(arguments.out.read_text(encoding="utf-8"))))
    return 0


def table(document: dict[str, Any]) -> str:
    """Tokens a second, a row for each system; below it what else was measured."""
    points = [tuple(point) for point in document["points"]]
    lines = []
    for title, key, scale, digits in (
        ("tokens/s", "tokens_per_second", 1.0, 0),
        ("first token, ms", "first_token_seconds", 1e3, 0),
        ("first token p99, ms", "first_token_p99_seconds", 1e3, 0),
        ("time per output token, ms", "token_seconds", 1e3, 1),
        ("p99 between tokens, ms", "gap_p99_seconds", 1e3, 0),
        ("acceptance length", "acceptance_length", 1.0, 2),
    ):
        lines += [f"| {title} | " + " | ".join(f"T={t:g}, {n}" for t, n in points) + " |"]
        lines += ["| --- |" + " --- |" * len(points)]
        for name, results in document["systems"].items():
            cells = []
            for t, n in points:
                values = [r[key] for r in results.get(f"{t:g}/{n}", []) if r[key] is not None]
                cells.append(f"{scale * statistics.median(values):.{digits}f}" if values else "")
            if any(cells):
                lines.append(f"| {name} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def _systems(folder: Path, arguments: argparse.Namespace) -> list[System]:
    target, draft = str(folder / "target"), str(folder / "draft")
    made: dict[str, Callable[[], System]] = {
        "vllm": lambda: _vllm("vLLM", target, None),
        "ngram": lambda: _vllm(
            "vLLM ngram", target, {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
        ),
        "eagle": lambda: _vllm(
            "vLLM EAGLE", target, {"method": "eagle", "model": str(folder / "eagle"), "num_speculative_tokens": 3}
        ),
    }
    for k in (3, 5, 7):
        for way in ("greedy", "probabilistic"):
            own = {"method": "draft_model", "model": draft, "num_speculative_tokens": k, "draft_sample_method": way}
            made[f"draft-{k}-{way}"] = lambda own=own, k=k, way=way: _vllm(f"vLLM draft_model K={k} {way}", target, own)
    for name in arguments.systems:
        if found := _OUTRIDER.fullmatch(name):
            made[name] = lambda found=found: _outrider(folder, found.groupdict())
        elif found := _LLAMA_CPP.fullmatch(name):
            made[name] = lambda found=found: _llama_cpp(
                folder, arguments.llama_cpp, found["type"], int(found["k"] or 0)
            )
    unknown = set(arguments.systems) - made.keys() - {"hf"}
    if unknown:
        sys.exit(f"unknown systems {', '.join(sorted(unknown))}; known: {', '.join(made)}, hf, and those of --help")
    return [made[name]() for name in arguments.systems if name != "hf"]


def _outrider(folder: Path, what: Mapping[str, str | None]) -> System:
    """`what`: the parts of a name by `_OUTRIDER`."""
    (port,) = free_ports(1)
    engine, round_trip_ms = "vllm" if what["engine"] == "vllm-target" else "torch", float(what["ms"] or 0)
    quantization, k = what["quantization"], what["k"]
    settings: dict[str, dict[str, Any]] = {
        "target": {
            "model": str(folder / "target"),
            "engine": engine,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": MAX_NUM_SEQS,
            "enable_prefix_caching": False,
            "kv_cache_bytes": KV_CACHE_BYTES,
            "quantization": quantization,
        },
        "draft": {"model": str(folder / "draft"), "enable_prefix_caching": False},
        "speculation": {} if k is None else {"num_speculative_tokens": int(k), "controller": "fixed"},
        "router": {"port": port},
        "simulation": {"round_trip_ms": round_trip_ms},
    }
    name = f"Outrider on {_ENGINES[engine]}"
    name += "".join(
        [
            f", {quantization}" if quantization else "",
            f", k={k}" if k is not None else "",
            f", {round_trip_ms:g} ms between the pools" if round_trip_ms else "",
        ]
    )
    file = folder / f"{port}.yaml"
    file.write_text(yaml.safe_dump(settings), encoding="utf-8")
    child = Child(name, ["serve", "--config", str(file)])
    return System(name, f"http://127.0.0.1:{port}", [child])


def _llama_cpp(folder: Path, build: Path | None, file_type: str, k: int) -> System:
    """`k`: tokens that its draft proposes at most; 0: it has none."""
    if build is None:
        sys.exit("--llama-cpp has to name the folder where llama.cpp was built: see bench/llama_cpp.py")
    (port,) = free_ports(1)
    name = f"llama.cpp {file_type}" + (f" draft K={k}" if k else "")
    target, draft = (convert(build, folder / model, file_type) for model in ("target", "draft"))
    child = llama_server(
        name,
        build,
        target,
        draft if k else None,
        port,
        num_speculative_tokens=k,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
    )
    return System(name, f"http://127.0.0.1:{port}", [child])


def _vllm(name: str, model: str, speculative: dict[str, Any] | None) -> System:
    (port,) = free_ports(1)
    options = {
        **{"model": model, "port": port, "dtype": "bfloat16", "max-model-len": MAX_MODEL_LEN},
        **{"max-num-seqs": MAX_NUM_SEQS, "enable-prefix-caching": False, "kv-cache-memory-bytes": KV_CACHE_BYTES},
        **({} if speculative is None else {"speculative-config": speculative}),
    }
    child = vllm_server(name, options, cpus=sorted(os.sched_getaffinity(0)))
    return System(name, f"http://127.0.0.1:{port}", [child])


def _start(system: System) -> None:
    started_at = time.monotonic()
    for child in system.children:
        child.start()
    while not system.is_ready():
        if time.monotonic() > started_at + READY_SECONDS or any(child.has_ended() for child in system.children):
            raise SystemExit(f"{system.name} does not start")
        time.sleep(1.0)
    print(f"{system.name} is ready after {time.monotonic() - started_at:.0f} s", file=sys.stderr, flush=True)


def _prompts(folder: Path, num_streams: int, is_pair: bool) -> list[list[int]]:
    """Text that the bundled pair was not trained on or, for other models, questions in their chat template."""
    count = _PROMPTS.get(num_streams, 2 * num_streams)
    if is_pair:
        return held_out_prompts(count, seed=num_streams)
    target = folder / "target"
    template, tokenizer = ChatTemplate.from_folder(target), Tokenizer(target)
    assert template is not None, "--target has no chat template"
    texts = [template.render([{"role": "user", "content": question}]) for question in _QUESTIONS]
    return [tokenizer.encode(text) for _, text in zip(range(count), itertools.cycle(texts), strict=False)]


def _measure(
    system: System, prompts: Sequence[Sequence[int]], temperature: float, num_streams: int, max_tokens: int
) -> None:
    def burst(prompts: Sequence[Sequence[int]], max_tokens: int) -> RequestBurst:
        return answer_all(
            system.url,
            system.model,
            prompts,
            num_streams=num_streams,
            temperature=temperature,
            max_tokens=max_tokens,
        )

    system.signal(signal.SIGCONT)
    while not system.is_ready():  # links that timed out while it was stopped have to reconnect
        time.sleep(0.2)
    burst(prompts[:num_streams], 32)  # warm
    before = system.counters()
    measured = burst(prompts, max_tokens)
    after = system.counters()
    system.signal(signal.SIGSTOP)
    system.results.setdefault((temperature, num_streams), []).append(_result(measured, before, after))


def _result(burst: RequestBurst, before: dict[str, float], after: dict[str, float]) -> Result:
    first = [answer.first_token_seconds for answer in burst.answers]
    gaps = [gap for answer in burst.answers for gap in answer.token_gaps]
    per_token = [
        (answer.last_token_seconds - answer.first_token_seconds) / (answer.num_tokens - 1) for answer in burst.answers
    ]
    rounds, accepted = (
        after.get(name, 0.0) - before.get(name, 0.0)
        for name in ("vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total")
    )
    return Result(
        burst.tokens_per_second,
        statistics.median(first),
        p99(first),
        statistics.median(per_token),
        p99(gaps),
        1 + accepted / rounds if rounds else None,
    )


def _tree(pid: int) -> Iterator[int]:
    """The process and all under it."""
    yield pid
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError):
            for child in file.read_text().split():
                yield from _tree(int(child))


def _write(arguments: argparse.Namespace, systems: Sequence[System]) -> None:
    document = {
        "machine": describe_machine(),
        "max_tokens": arguments.max_tokens,
        "repeats": arguments.repeats,
        "points": [(t, n) for t in arguments.temperatures for n in arguments.streams],
        "systems": {
            system.name: {
                f"{t:g}/{n}": [asdict(result) for result in results] for (t, n), results in system.results.items()
            }
            for system in systems
        },
    }
    write_result(arguments.out, document)


def _assisted(folder: Path, arguments: argparse.Namespace) -> None:
    """Adds Hugging Face's assisted generation to the results."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    target, draft = (
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.bfloat16).eval() for name in ("target", "draft")
    )
    prompts = held_out_prompts(_PROMPTS[1], seed=1)
    document = json.loads(arguments.out.read_text(encoding="utf-8"))
    results: dict[str, list[dict[str, Any]]] = {}
    for _ in range(arguments.repeats):
        for temperature in arguments.temperatures:
            sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
            started_at, num_tokens = time.perf_counter(), 0
            for prompt in prompts:
                ids = torch.tensor([prompt])
                out = target.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    assistant_model=draft,
                    min_new_tokens=arguments.max_tokens,
                    max_new_tokens=arguments.max_tokens,
                    pad_token_id=0,
                    **sampling,
                )
                num_tokens += out.shape[1] - len(prompt)
            rate = num_tokens / (time.perf_counter() - started_at)
            result = dict.fromkeys(Result.__slots__) | {"tokens_per_second": rate, "token_seconds": 1 / rate}
            results.setdefault(f"{temperature:g}/1", []).append(result)
    document["systems"]["Hugging Face assisted generation"] = results
    write_result(arguments.out, document)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.peers", description=(__doc__ or "").partition("\n")[0])
    every = "torch,vllm-target,vllm,draft-3-greedy,draft-3-probabilistic,draft-5-greedy,draft-5-probabilistic"
    parser.add_argument(
        "--systems",
        type=lambda text: text.split(","),
        default=f"{every},ngram,eagle,hf".split(","),
        help="of the names in _systems, commas between them; torch@10 and vllm-target@10 have a round trip of 10 ms "
        "between the pools, torch-int8-k3 has weights in INT8 and a fixed k of 3; llama-bf16 and llama-bf16-5 are "
        "llama.cpp in bf16 (f16, q8_0, f32), without and with a draft of 5 tokens at most",
    )
    parser.add_argument("--llama-cpp", type=Path, help="where llama.cpp was built: see bench/llama_cpp.py")
    parser.add_argument("--target", help="an instruct model to serve instead of the 190M pair; --draft is its draft")
    parser.add_argument("--draft", default="outrider-draft-smollm2-135m")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=Path("bench/results/peers.json"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
