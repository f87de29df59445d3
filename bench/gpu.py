"""Measures this project's engine on a GPU: `python -m bench.gpu steps`, then `python -m bench.gpu cluster --pair DIR`.

`steps` times steps, draft levels and sampling of random models of published shapes, as targets and draft workers
compute them. The bound of a step is the sum over its products of max(bytes / copy speed, operations / rate of a large
product), plus the bytes of its KV / copy speed; copy speed and rate are measured on the same device.

`cluster` compares clusters with the draft in the target's process with `vllm serve`, and counts the tokens that differ
under speculation in invariant bfloat16, with `draft` only. Other arguments go to `bench.gpu_vllm`. DIR has `target`,
`draft` and `wide-draft`, as `bench.models` writes them. Both write to one file, after each measurement.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench import gpu_vllm
from bench.gpu_rows import milliseconds
from bench.models import WIDE_DRAFT
from bench.result import write_result
from cluster.config import Config
from cluster.config.workers import Numerics
from cluster.drafters.base import DraftSequence
from cluster.drafters.model import ModelDrafter
from cluster.engine.batch import Segment
from cluster.engine.checkpoint import TensorReader
from cluster.engine.limits import StepLimits
from cluster.engine.loader import LoadedModel, WeightReader, form_on
from cluster.engine.model import Model, TorchModel
from cluster.engine.model_config import ModelConfig
from cluster.engine.quantization import Quantization
from cluster.engine.runner import ModelRunner
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.speculation.sampling import Sampler, SampleRequest

OUT = Path("bench/results/gpu-steps.json")
_DEPTHS: Mapping[str, Sequence[int | str]] = {"draft": (0, "auto", 2, 3, 4, 6, 8), WIDE_DRAFT: ("auto",)}
_CLUSTER = {"--streams": "1,4,16,64", "--seconds": "0.6", "--repeats": "3", "--draft-models": "", "--engine": "torch"}
_DRAFT_KV_BYTES = 2**31  # a draft on a GPU with other engines must not take all free memory

Part = Mapping[str, Any]
Shape = Mapping[str, Any]
"The config.json of a model."

_LLAMA = {"architectures": ["LlamaForCausalLM"], "vocab_size": 128_256, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0}
LLAMA_8B: Shape = {
    **_LLAMA,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32_768,
}
LLAMA_1B: Shape = {
    **_LLAMA,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
QWEN_2_5_0_5B: Shape = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 4096,
}
DRAFTS: Mapping[str, tuple[Shape, Quantization | None]] = {
    "1B": (LLAMA_1B, None),
    "1B INT4": (LLAMA_1B, Quantization.named("int4", Config().draft.quantization_group_size)),
    "0.5B": (QWEN_2_5_0_5B, None),
}
STEPS = ((1, 1, 1000), (1, 8, 1000), (16, 6, 1000), (64, 1, 1000), (64, 6, 1000), (1, 32, 32_000))
"Sequences, rows per sequence, context tokens per sequence."
PROMPT_CHUNK = (1, 512, 8192)
_LEVEL_CONTEXT = 1000
_FEW, _MANY = 2, 10  # lengths of the two proposals that are compared
_BLOCK_SIZE = 16
_DTYPE = torch.bfloat16
_VALUE_BYTES = 2


@dataclass(frozen=True, slots=True)
class Speeds:
    """The highest speeds of a device."""

    bytes_per_second: float  # read and written by a copy
    flops: float  # of a large product in bfloat16

    @classmethod
    def measure(cls, device: torch.device, num_bytes: int = 2**32, size: int = 8192) -> Speeds:
        source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        copied = torch.empty_like(source)
        factor = torch.randn(size, size, dtype=_DTYPE, device=device)
        copy_ms = milliseconds(lambda: copied.copy_(source), device=device)
        product_ms = milliseconds(lambda: factor @ factor, device=device)
        return cls(2 * num_bytes / copy_ms * 1e3, 2 * size**3 / product_ms * 1e3)

    def step_ms(self, model: LoadedModel, num_seqs: int, rows: int, context: int) -> float:
        """Returns the minimum milliseconds of a step of `num_seqs` sequences with `rows` rows each."""
        config, num_rows = model.config, num_seqs * rows
        hidden, intermediate = config.hidden_size, config.intermediate_size
        sizes = (  # of the projections of a layer, in the order of `LayerWeights.linears`
            hidden * (config.q_size + 2 * config.kv_size),
            config.q_size * hidden,
            2 * hidden * intermediate,
            intermediate * hidden,
        )
        products = [pair for layer in model.weights.layers for pair in zip(layer.linears, sizes, strict=True)]
        products.append((model.weights.head, hidden * config.vocab_size))
        seconds = sum(
            max(linear.num_bytes / self.bytes_per_second, 2 * num_rows * size / self.flops) for linear, size in products
        )
        kv_bytes = num_seqs * context * 2 * config.num_layers * config.kv_size * _VALUE_BYTES
        return 1e3 * (seconds + kv_bytes / self.bytes_per_second)


class _RandomTensors(TensorReader):
    """Random weights (standard deviation 0.02) for any name; norms are ones, biases zeros."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def read(self, parts: Sequence[tuple[str, int]], *inner: int) -> torch.Tensor:
        num_rows = sum(rows for _, rows in parts)
        if not inner:
            return torch.full((num_rows,), float("norm" in parts[0][0]), dtype=_DTYPE, device=self.device)
        return torch.randn(num_rows, *inner, dtype=_DTYPE, device=self.device).mul_(0.02)


def config_of(shape: Shape) -> ModelConfig:
    with tempfile.TemporaryDirectory(prefix="random-model-") as folder:
        Path(folder, "config.json").write_text(json.dumps(dict(shape)), encoding="utf-8")
        return ModelConfig.from_folder(Path(folder))


def random_model(
    shape: Shape,
    device: torch.device,
    *,
    numerics: Numerics = "fast",
    quantization: Quantization | None = None,
    form: type[Model] | None = None,
) -> LoadedModel:
    """Returns a model of `shape` with random weights in bfloat16; `form` as in `load_model`."""
    config = config_of(shape)
    form = form or form_on(config, _DTYPE, device, numerics)
    reader = WeightReader(config, _RandomTensors(device), form.weight_format, quantization)
    return LoadedModel(config, reader.read(lambda done, total: None), form)


def step_times(
    name: str,
    model: LoadedModel,
    speeds: Speeds,
    steps: Sequence[tuple[int, int, int]],
    numerics: Numerics = "fast",
    repeats: int = 20,
) -> list[dict[str, Any]]:
    """Returns the milliseconds of each of `steps`, with its sampling at T = 1, and its bound."""
    num_blocks = max(n * -(-context // _BLOCK_SIZE) for n, _, context in steps)
    runner = ModelRunner(model, _BLOCK_SIZE, num_blocks, enable_prefix_caching=False)
    runner.model.prepare(max(n * rows for n, rows, _ in steps), max(context for _, _, context in steps))
    sampler, vocab_size = Sampler(runner.model.device), model.config.vocab_size
    found = []
    for num_seqs, rows, context in steps:
        texts = [_tokens(index, context, vocab_size) for index in range(num_seqs)]
        tables = [runner.blocks.allocate(runner.blocks.num_blocks_for(context)) for _ in texts]
        segments = [
            Segment(text[-rows:], context - rows, table, rows)
            for text, table in zip(texts, tables, strict=True)
            if table is not None
        ]
        requests = [
            SampleRequest(SamplingParams(), NoiseKey(index, 1), text, 1, rows) for index, text in enumerate(texts)
        ]

        def step(segments: Sequence[Segment] = segments, requests: Sequence[SampleRequest] = requests) -> None:
            sampler.sample(runner.run(segments), requests)

        measured = milliseconds(step, repeats)
        bound = speeds.step_ms(model, num_seqs, rows, context)
        found.append(
            {"model": name, "form": type(runner.model).__name__, "numerics": numerics}
            | {"sequences": num_seqs, "rows": rows, "context": context, "step_ms": measured, "bound_ms": bound}
        )
        for segment in segments:
            runner.blocks.free(list(segment.block_table))
    return found


def level_times(
    name: str,
    model: LoadedModel,
    speeds: Speeds,
    batch_sizes: Sequence[int] = (1, 64),
    context: int = _LEVEL_CONTEXT,
    repeats: int = 10,
) -> list[dict[str, Any]]:
    """Returns the milliseconds of a draft level, and its bound, at each batch size in `batch_sizes`."""
    longest = context + 64 * _MANY
    limits = StepLimits(max_model_len=longest, max_num_seqs=max(batch_sizes), max_num_batched_tokens=4096)
    num_blocks = max(batch_sizes) * -(-longest // _BLOCK_SIZE)
    runner = ModelRunner(model, _BLOCK_SIZE, num_blocks, enable_prefix_caching=False)
    runner.model.prepare(max(batch_sizes), longest)
    burst = None
    if runner.model.device.type == "cuda":
        from cluster.drafters.burst import Burst  # needs Triton

        burst = Burst.of(runner, limits)
    drafter = ModelDrafter(runner, limits, burst)
    found = []
    for number in batch_sizes:
        few, many = (_proposal_ms(drafter, number, context, length, repeats) for length in (_FEW, _MANY))
        level, bound = (many - few) / (_MANY - _FEW), speeds.step_ms(model, number, 1, context)
        found.append({"model": name, "sequences": number, "ms": level, "bound_ms": bound})
    return found


def _proposal_ms(drafter: ModelDrafter, number: int, context: int, length: int, repeats: int) -> float:
    """Returns the milliseconds of proposals of `length` tokens for `number` sequences. All drafts are rejected."""
    sequences = [
        DraftSequence(
            _tokens(index, context, drafter.vocab_size), 1, SamplingParams(), NoiseKey(index, 1), length, window=length
        )
        for index in range(number)
    ]
    for sequence in sequences:
        assert drafter.admit(sequence)

    def propose() -> None:
        while waiting := [sequence for sequence in sequences if sequence.missing(drafter.max_model_len)]:
            drafter.draft(waiting)

    seconds = []
    for _ in range(3 + repeats):
        started_at = time.perf_counter()
        propose()
        seconds.append(time.perf_counter() - started_at)
        for sequence in sequences:
            kept = sequence.commit(sequence.num_committed, [(sequence.token_of(0) + 1) % drafter.vocab_size])
            assert kept is not None
            drafter.rewind(sequence, kept)
    for sequence in sequences:
        drafter.release(sequence)
    return 1e3 * sorted(seconds[3:])[repeats // 2]


def top_p_ms(device: torch.device, num_rows: int = 64, vocab_size: int = 128_256) -> float:
    """Returns the milliseconds of sampling with top-p."""
    logits = 3 * torch.randn(num_rows, vocab_size, device=device)
    params = SamplingParams(top_p=0.9)
    requests = [SampleRequest(params, NoiseKey(index, 1), [1], 1) for index in range(num_rows)]
    return milliseconds(partial(Sampler(device).sample, logits, requests))


def _tokens(seed: int, number: int, vocab_size: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocab_size) for _ in range(number)]


def measure_steps(device: torch.device) -> Iterator[Part]:
    """Yields the parts of the document as they are measured."""
    speeds = Speeds.measure(device)
    yield {"copy_tb_s": speeds.bytes_per_second / 1e12, "matmul_tflops": speeds.flops / 1e12}
    steps: list[dict[str, Any]] = []
    for numerics in ("fast", "invariant"):
        model = random_model(LLAMA_8B, device, numerics=numerics)
        steps += step_times("8B", model, speeds, [*STEPS, PROMPT_CHUNK], numerics)
        del model
        yield {"steps": steps}
    model = random_model(LLAMA_8B, device, form=TorchModel)
    steps += step_times("8B", model, speeds, [PROMPT_CHUNK], repeats=5)
    del model
    yield {"steps": steps}
    levels: list[dict[str, Any]] = []
    for name, (shape, quantization) in DRAFTS.items():
        model = random_model(shape, device, quantization=quantization)
        levels += level_times(name, model, speeds)
        del model
        yield {"levels": levels}
    yield {"top_p_ms": top_p_ms(device)}


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
