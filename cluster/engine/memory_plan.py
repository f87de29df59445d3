"""Plan of the GPU memory that a pair of models needs, made before anything is loaded. Imports no torch.

    weights          parameters * bytes per parameter. KV of a token    2 * layers * KV heads * head size * bytes per
    value. speculation      Every sequence may write k tokens past its last one; in the draft, its whole window. These
    tokens take
                     blocks like any others until they are rolled back.
    recorded steps   Only in the PyTorch engine: see `graph_memory.py`.

A GB is 10^9 bytes. Quantised weights are counted without their scales, 3 % more for INT4 in groups of 128.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.config.speculation import SpeculationConfig
from cluster.engine.graph_memory import StepModel, graph_bytes, graph_sizes
from cluster.engine.model_config import ModelConfig
from cluster.errors import ConfigurationError
from cluster.model_folder import ASSETS, resolve_model_folder

GB = 1e9

_BYTES_OF_DTYPE = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
_DEFAULT_DTYPE = "fp16"

# Layers, KV heads and head size of well-known models of these sizes.
_KNOWN_SHAPES = {
    "0.5B": (24, 2, 64),  # Qwen 2.5
    "1B": (16, 8, 64),  # Llama 3.2
    "1.5B": (28, 2, 128),  # Qwen 2.5
    "7B": (32, 32, 128),  # Llama 2
    "8B": (32, 8, 128),  # Llama 3
    "13B": (40, 40, 128),  # Llama 2
    "70B": (80, 8, 128),  # Llama 2 and 3
}

# More of their published configurations: hidden size, intermediate size, query heads, and vocabulary (the larger one if
# two models have this size).
_KNOWN_STEPS = {
    "0.5B": (896, 4864, 14, 151_936),
    "1B": (2048, 8192, 32, 128_256),
    "1.5B": (1536, 8960, 12, 151_936),
    "7B": (4096, 11_008, 32, 32_000),
    "8B": (4096, 14_336, 32, 128_256),
    "13B": (5120, 13_824, 40, 32_000),
    "70B": (8192, 28_672, 64, 128_256),
}
_SIZE = re.compile(
    r"(?P<size>(?P<billions>\d+(\.\d+)?)B)(/(?P<layers>[1-9]\d*)x(?P<heads>[1-9]\d*)x(?P<head_dim>[1-9]\d*))?"
)


def num_speculative_blocks(num_seqs: int, num_slots: int, block_size: int) -> int:
    """Returns the blocks for uncommitted tokens, `num_slots` for each of `num_seqs` sequences."""
    return -(-num_seqs * num_slots // block_size)


SELF_DRAFTER = "self-int4"


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """Sizes of a model that determine its memory."""

    name: str
    num_parameters: int
    num_layers: int
    kv_size: int  # KV heads * head size
    dtype: str
    steps: StepModel | None = None  # None: unknown, so the memory of recorded steps is unknown too
    num_end_parameters: int = 0  # parameters of embedding, last norm and head; 0: unknown

    @classmethod
    def parse(cls, spec: str) -> PlannedModel:
        """Parses `MODEL[:DTYPE]`. Raises ConfigurationError.

        MODEL is a known size (`70B`), a size with its shape (`34B/48x8x128`: layers, KV heads, head size), a folder or
        a bundled model.
        """
        name, colon, dtype = spec.rpartition(":")
        if not colon:
            name, dtype = spec, ""
        elif dtype not in _BYTES_OF_DTYPE:
            raise ConfigurationError(f"{spec!r}: unknown dtype {dtype!r}: write one of {', '.join(_BYTES_OF_DTYPE)}")
        size = _SIZE.fullmatch(name)
        if size is None:
            return cls._from_folder(name, dtype)
        if size["layers"] is not None:
            shape = int(size["layers"]), int(size["heads"]), int(size["head_dim"])
        elif name in _KNOWN_SHAPES:
            shape = _KNOWN_SHAPES[name]
        else:
            raise ConfigurationError(
                f"the shape of a {name} is unknown (known: {', '.join(_KNOWN_SHAPES)}): write "
                f"{name}/LAYERSxKV_HEADSxHEAD_SIZE"
            )
        num_layers, num_kv_heads, head_dim = shape
        steps = None
        if size["layers"] is None:
            hidden_size, intermediate_size, num_heads, vocab_size = _KNOWN_STEPS[name]
            steps = StepModel(hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, vocab_size)
        num_parameters = round(float(size["billions"]) * 1e9)
        return cls(size["size"], num_parameters, num_layers, num_kv_heads * head_dim, dtype or _DEFAULT_DTYPE, steps)

    @classmethod
    def _from_folder(cls, name: str, dtype: str) -> PlannedModel:
        if not (ASSETS / name).is_dir() and not Path(name).expanduser().is_dir():
            raise ConfigurationError(f"{name!r} is neither a size like 7B nor a model's folder")
        config = ModelConfig.from_folder(resolve_model_folder(name))
        return cls.of(name, config, dtype or _dtype_of(config))

    @classmethod
    def of(cls, name: str, config: ModelConfig, dtype: str) -> PlannedModel:
        ends, steps = _num_end_parameters(config), StepModel.of(config)
        return cls(name, _num_parameters(config), config.num_layers, config.kv_size, dtype, steps, ends)

    def drafting_in_process(self) -> PlannedModel:
        """Returns this target as its own draft `SELF_DRAFTER`, in one process: only the layers count, in INT4."""
        num_parameters = self.num_parameters - self.num_end_parameters
        return replace(self, name=SELF_DRAFTER, num_parameters=num_parameters, dtype="int4")

    def with_wide_head(self) -> PlannedModel:
        """Returns the model with its head in 16 bits, because the PyTorch engine does not quantise the head.

        In INT8 each weight of the head thus counts twice. In a 0.5B model with 152k tokens the head is a quarter of all
        weights. Returns the model unchanged if it is not quantised or its sizes are unknown.
        """
        if self.steps is None or self.dtype not in ("int8", "int4"):
            return self
        head = self.steps.vocab_size * self.steps.hidden_size
        excess = round(head * (_BYTES_OF_DTYPE["bf16"] / _BYTES_OF_DTYPE[self.dtype] - 1))
        return replace(self, num_parameters=self.num_parameters + excess)

    @property
    def weight_bytes(self) -> float:
        return self.num_parameters * _BYTES_OF_DTYPE[self.dtype]

    @property
    def _value_bytes(self) -> int:
        """Bytes of an activation or KV value; 16 bits in a quantised model."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.kv_size * self._value_bytes

    def recorded_bytes(self, max_rows: int, max_context: int, block_size: int) -> int:
        """Returns the bytes of recorded steps of up to `max_rows` rows; 0 if the model's sizes are unknown."""
        if self.steps is None:
            return 0
        return graph_bytes(self.steps, graph_sizes(max_rows), max_context, block_size, self._value_bytes)


@dataclass(frozen=True, slots=True)
class Tenant:
    """A model in a GPU's memory, and the number of speculative tokens that each of its sequences may write."""

    role: str
    model: PlannedModel
    num_speculative_tokens: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of one GPU, or of several GPUs that divide each model evenly."""

    gigabytes: float
    utilization: float  # share of the memory left by weights and recorded steps that the KV cache gets
    block_size: int
    recorded_rows: int = 0  # rows of the largest recorded step; 0: no step is recorded
    recorded_context: int = 0  # tokens of the longest context in a recorded step


@dataclass(frozen=True, slots=True)
class Budget:
    """A memory and the models in it."""

    tenants: tuple[Tenant, ...]
    memory: Memory

    @property
    def weight_bytes(self) -> float:
        return sum(tenant.model.weight_bytes for tenant in self.tenants)

    def recorded_bytes(self, tenant: Tenant) -> int:
        memory = self.memory
        if not memory.recorded_rows:
            return 0
        return tenant.model.recorded_bytes(memory.recorded_rows, memory.recorded_context, memory.block_size)

    @property
    def left_bytes(self) -> float:
        """Bytes that weights and recorded steps leave free; negative if they do not fit."""
        return self.memory.gigabytes * GB - self.weight_bytes - sum(map(self.recorded_bytes, self.tenants))

    @property
    def kv_cache_bytes(self) -> float:
        return max(0.0, self.left_bytes) * self.memory.utilization

    def cache_shares(self) -> list[float]:
        """Returns the bytes of each tenant's KV cache if all hold the same number of tokens, as vLLM counts them.

        Weights and caches together take `utilization` of the whole memory.
        """
        per_token = [tenant.model.kv_bytes_per_token for tenant in self.tenants]
        unused = (1 - self.memory.utilization) * self.memory.gigabytes * GB
        return [max(0.0, self.left_bytes - unused) * size / sum(per_token) for size in per_token]

    def context_bytes(self, tenant: Tenant, num_seqs: int, context: int) -> int:
        """Returns the bytes of the KV of `num_seqs` sequences of `context` tokens, in whole blocks."""
        return num_seqs * -(-context // self.memory.block_size) * self._block_bytes(tenant)

    def speculative_blocks(self, tenant: Tenant, num_seqs: int) -> int:
        return num_speculative_blocks(num_seqs, tenant.num_speculative_tokens, self.memory.block_size)

    def speculative_bytes(self, tenant: Tenant, num_seqs: int) -> int:
        return self.speculative_blocks(tenant, num_seqs) * self._block_bytes(tenant)

    def largest_batch(self, context: int) -> int:
        """Returns the maximum number of sequences of `context` tokens whose KV fits, with speculative tokens."""

        def needed(num_seqs: int) -> int:
            return sum(
                self.context_bytes(tenant, num_seqs, context) + self.speculative_bytes(tenant, num_seqs)
                for tenant in self.tenants
            )

        at_most = int(self.kv_cache_bytes / sum(self.context_bytes(tenant, 1, context) for tenant in self.tenants))
        return bisect_right(range(1, at_most + 1), self.kv_cache_bytes, key=needed)

    def _block_bytes(self, tenant: Tenant) -> int:
        return self.memory.block_size * tenant.model.kv_bytes_per_token


def plan_pair(
    target: PlannedModel,
    draft: PlannedModel,
    num_speculative_tokens: int,
    memory: Memory,
    draft_memory: Memory | None = None,
) -> tuple[Budget, ...]:
    """Returns one budget if target and draft share `memory`, two if the draft has its own."""
    speculation = SpeculationConfig(
        num_speculative_tokens=num_speculative_tokens, max_speculative_tokens=num_speculative_tokens
    )
    on_target = Tenant("target", target, num_speculative_tokens)
    on_draft = Tenant("draft", draft, speculation.window(num_speculative_tokens))
    if draft_memory is None:
        return (Budget((on_target, on_draft), memory),)
    return Budget((on_target,), memory), Budget((on_draft,), draft_memory)


def describe(budget: Budget, context: int, num_seqs: int) -> str:
    """Returns the budget as a table, for `num_seqs` sequences of `context` tokens."""
    tenants = budget.tenants
    sequences = f"{num_seqs} sequence{'s' if num_seqs > 1 else ''}"

    def bytes_row(title: str, parts: Sequence[float]) -> tuple[str, ...]:
        return (title, *(_in_units(part) for part in parts), _in_units(sum(parts)))

    def total_row(title: str, value: str) -> tuple[str, ...]:
        return (title, *("" for _ in tenants), value)

    recorded = [budget.recorded_bytes(tenant) for tenant in tenants]
    slots = [f"{num_seqs * t.num_speculative_tokens} / {budget.speculative_blocks(t, num_seqs)}" for t in tenants]
    rows = [
        ("", *(f"{tenant.role} {tenant.model.name} {tenant.model.dtype}" for tenant in tenants), "in all"),
        bytes_row("weights", [tenant.model.weight_bytes for tenant in tenants]),
        *([bytes_row("recorded steps", recorded)] if budget.memory.recorded_rows else []),
        total_row(
            f"left of {budget.memory.gigabytes:g} GB",
            _in_units(budget.left_bytes) if budget.left_bytes > 0 else f"{_in_units(-budget.left_bytes)} short",
        ),
        total_row(f"KV cache, {budget.memory.utilization:g} of that", _in_units(budget.kv_cache_bytes)),
        bytes_row("KV of a token", [tenant.model.kv_bytes_per_token for tenant in tenants]),
        bytes_row(
            f"KV of {sequences} of {context} tokens",
            [budget.context_bytes(tenant, num_seqs, context) for tenant in tenants],
        ),
        bytes_row("speculative slots", [budget.speculative_bytes(tenant, num_seqs) for tenant in tenants]),
        (f"  slots / blocks of {budget.memory.block_size}", *slots, ""),
        total_row(f"largest batch at {context} tokens", str(budget.largest_batch(context))),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        ).rstrip()
        for row in rows
    )


def _in_units(num_bytes: float) -> str:
    for unit, size in (("GB", GB), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def _num_parameters(config: ModelConfig) -> int:
    hidden = config.hidden_size
    attention = hidden * (config.q_size + 2 * config.kv_size) + config.q_size * hidden
    layer = attention + 3 * hidden * config.intermediate_size + 2 * hidden
    return config.num_layers * layer + _num_end_parameters(config)


def _dtype_of(config: ModelConfig) -> str:
    """Returns the dtype that projections have in memory."""
    stored = config.stored_format
    return _DEFAULT_DTYPE if stored is None or stored.loaded_bits == 16 else f"int{stored.loaded_bits}"


def _num_end_parameters(config: ModelConfig) -> int:
    embeddings = config.vocab_size * config.hidden_size * (2 if config.has_own_head else 1)
    return embeddings + config.hidden_size
