"""Measures this project's engine on a GPU: `python -m bench.gpu steps`, then `python -m bench.gpu cluster --pair DIR`.

`steps` times steps, draft levels and sampling of random models of published shapes, as targets and draft workers
compute them (`bench.gpu_steps`). `cluster` compares clusters with the draft in the target's process with `vllm serve`,
and counts the tokens that differ under speculation in invariant bfloat16, with `draft` only. Other arguments go to
`bench.gpu_vllm`. DIR has `target`, `draft` and `wide-draft`, as `bench.models` writes them. Both write to one file,
after each measurement.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bench import gpu_steps, gpu_vllm
from bench.models import WIDE_DRAFT
from bench.result import write_result
from cluster.engine.model import TorchModel

OUT = Path("bench/results/gpu-steps.json")
_DEPTHS: Mapping[str, Sequence[int | str]] = {"draft": (0, "auto", 2, 3, 4, 6, 8), WIDE_DRAFT: ("auto",)}
_CLUSTER = {"--streams": "1,4,16,64", "--seconds": "0.6", "--repeats": "3", "--draft-models": "", "--engine": "torch"}
_DRAFT_KV_BYTES = 2**31  # a draft on a GPU with other engines must not take all free memory

Part = Mapping[str, Any]


def measure_steps(device: torch.device) -> Iterator[Part]:
    """Yields the parts of the document as they are measured."""
    speeds = gpu_steps.Speeds.measure(device)
    yield {"copy_tb_s": speeds.bytes_per_second / 1e12, "matmul_tflops": speeds.flops / 1e12}
    steps: list[dict[str, Any]] = []
    for numerics in ("fast", "invariant"):
        model = gpu_steps.random_model(gpu_steps.LLAMA_8B, device, numerics=numerics)
        steps += gpu_steps.measure_steps("8B", model, speeds, [*gpu_steps.STEPS, gpu_steps.PROMPT_CHUNK], numerics)
        del model
        yield {"steps": steps}
    model = gpu_steps.random_model(gpu_steps.LLAMA_8B, device, form=TorchModel)
    steps += gpu_steps.measure_steps("8B", model, speeds, [gpu_steps.PROMPT_CHUNK], repeats=5)
    del model
    yield {"steps": steps}
    levels: list[dict[str, Any]] = []
    for name, (shape, quantization) in gpu_steps.DRAFTS.items():
        model = gpu_steps.random_model(shape, device, quantization=quantization)
        levels += gpu_steps.measure_levels(name, model, speeds)
        del model
        yield {"levels": levels}
    yield {"top_p_ms": gpu_steps.measure_top_p(device)}


def measure_clusters(pair: Path, further: Sequence[str]) -> Iterator[Part]:
    """Yields the parts of the document. `further`: arguments of `bench.gpu_vllm` that replace the defaults here."""
    cells: list[dict[str, Any]] = []
    for draft, depths in _DEPTHS.items():
        with tempfile.TemporaryDirectory(prefix="outrider-gpu-") as folder:
            out = Path(folder, "cells.json")
            settings = _CLUSTER | {
                "--pair": str(pair),
                "--draft": draft,
                "--cells": ",".join(f"in-process:{k}" for k in depths),
                "--exact": "" if cells else "bfloat16-invariant",
                "--set": f"draft.kv_cache_bytes={_DRAFT_KV_BYTES}",
                "--out": str(out),
            }
            gpu_vllm.main([*(f"{name}={value}" for name, value in settings.items()), *further])
            document = json.loads(out.read_text(encoding="utf-8"))
        kept = ("streams", "temperature", "k", "tokens_per_second", "serve")
        cells += [{"draft": draft} | {name: cell[name] for name in kept} for cell in document["cells"]]
        yield {"cluster": cells}
        for compared in document["exactness"]:
            differing = compared["num_different_tokens"].values()
            yield {"differing_tokens": sum(differing), "compared_tokens": compared["num_tokens"] * len(differing)}


def table(document: Part) -> str:
    """Tables of what `document` has: steps, draft levels, and clusters as ratios to `vllm serve`."""
    lines = ["| model | form | numerics | sequences x rows | context | ms | ms / bound |", "| --- " * 7 + "|"]
    for step in document.get("steps", ()):
        lines.append(
            f"| {step['model']} | {step['form']} | {step['numerics']} | {step['sequences']} x {step['rows']} "
            f"| {step['context']} | {step['step_ms']:.2f} | {step['step_ms'] / step['bound_ms']:.2f} |"
        )
    lines += ["", "| draft | sequences | ms per level | ms / bound |", "| --- " * 4 + "|"]
    for level in document.get("levels", ()):
        ratio = level["ms"] / level["bound_ms"]
        lines.append(f"| {level['model']} | {level['sequences']} | {level['ms']:.2f} | {ratio:.2f} |")
    lines += ["", "| draft | streams | T | k | tokens/s / vllm serve |", "| --- " * 5 + "|"]
    for cell in document.get("cluster", ()):
        serve = statistics.median(cell["serve"]) if cell["serve"] else float("nan")
        ratio = statistics.median(cell["tokens_per_second"]) / serve
        lines.append(f"| {cell['draft']} | {cell['streams']} | {cell['temperature']:g} | {cell['k']} | {ratio:.2f} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.gpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("part", choices=["steps", "cluster"])
    parser.add_argument("--pair", type=Path, help="folder with `target`, `draft` and `wide-draft`; for cluster")
    parser.add_argument("--commit", default="", help="commit of the measured code")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments, further = parser.parse_known_args(argv)
    if arguments.part == "steps" and further:
        parser.error(f"unknown arguments: {' '.join(further)}")
    if arguments.part == "cluster" and arguments.pair is None:
        parser.error("cluster needs --pair")
    if not torch.cuda.is_available():
        print("PyTorch finds no GPU: nothing is measured", file=sys.stderr)
        return 1
    out: Path = arguments.out
    document: dict[str, Any] = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {}
    document |= {
        "gpu": torch.cuda.get_device_name(),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": arguments.commit,
        "command": "python -m bench.gpu steps; python -m bench.gpu cluster --pair DIR",
    }
    is_steps = arguments.part == "steps"
    for part in measure_steps(torch.device("cuda")) if is_steps else measure_clusters(arguments.pair, further):
        document |= part
        write_result(out, document)
        gc.collect()
        torch.cuda.empty_cache()
    print(table(document), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
