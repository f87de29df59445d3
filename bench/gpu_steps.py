"""Times of steps and of draft levels on a GPU, for random models of published shapes, with their lower bounds.

The bound of a step is the sum over its products of max(bytes / copy speed, operations / rate of a large product), plus
the bytes of its KV / copy speed. Copy speed and rate are measured on the same device.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.gpu_rows import milliseconds
from cluster.config import Config
from cluster.config.workers import Numerics
from cluster.drafters.base import DraftSequence
from cluster.drafters.model import ModelDrafter
from cluster.engine.batch import Segment
from cluster.engine.checkpoint import TensorReader
from cluster.engine.limits import StepLimits
from cluster.engine.loader import LoadedModel, WeightReader, form_on
from cluster.engine.model import Model
from cluster.engine.model_config import ModelConfig
from cluster.engine.quantization import Quantization
from cluster.engine.runner import ModelRunner
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.speculation.sampling import Sampler, SampleRequest

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
        copy_ms = _device_ms(device, lambda: copied.copy_(source))
        product_ms = _device_ms(device, lambda: factor @ factor)
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
    return LoadedModel(config, reader.read(range(config.num_layers), lambda done, total: None), form)


def measure_steps(
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


def measure_levels(
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


def measure_top_p(device: torch.device, num_rows: int = 64, vocab_size: int = 128_256) -> float:
    """Returns the milliseconds of sampling with top-p."""
    logits = 3 * torch.randn(num_rows, vocab_size, device=device)
    params = SamplingParams(top_p=0.9)
    requests = [SampleRequest(params, NoiseKey(index, 1), [1], 1) for index in range(num_rows)]
    return milliseconds(partial(Sampler(device).sample, logits, requests))


def _tokens(seed: int, number: int, vocab_size: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocab_size) for _ in range(number)]


def _device_ms(device: torch.device, call: Callable[[], object]) -> float:
    def waited() -> None:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return milliseconds(waited)
