"""Medusa heads (Cai et al., arXiv 2401.10774): each drafts one of the next tokens from the same state of the target.

The heads read the state of the last computed token after the target's last norm. From it, the target's own output
layer computes the next token, and head j (from 0) the token j + 1 positions after that. Each residual layer of a head
computes x + SiLU(W x + b); the head's output layer, or else the target's, then computes logits.

Supported tensor names are those of the authors and those of vLLM.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path

import torch
import torch.nn.functional as F

from cluster.engine.checkpoint import TensorReader, weight_map
from cluster.engine.linear import Linear
from cluster.engine.loader import LoadedModel, WeightReader
from cluster.engine.model_config import AFTER_NORM, read_json
from cluster.engine.quantization import Quantization
from cluster.errors import ConfigurationError

# Names of a head's residual layer, without ".weight", and of its output layer.
_FORMS = (
    ("{head}.{layer}.linear", "{head}.{num_layers}.weight"),
    ("medusa_heads.{head}.{layer}.linear", "medusa_heads.{head}.{num_layers}.weight"),
    ("blocks.{head}.layers.{layer}", "lm_heads.{head}.weight"),
)


@dataclass(frozen=True, slots=True)
class HeadNames:
    """The names of a head's weights."""

    residuals: tuple[str, ...]  # without ".weight" and ".bias"
    output: str | None  # None: the target's output layer


def read_medusa_names(folder: Path) -> list[HeadNames]:
    """Returns the names of the heads in `folder`, in the order of the tokens that they draft.

    Counts the tensors, because the numbers in published config.json are often wrong. Raises ConfigurationError.
    """
    values, tensors = read_json(folder / "config.json"), weight_map(folder, takes_pickle=True)
    if "token_map" in tensors:
        raise ConfigurationError(f"{folder}: Medusa heads with a token_map are not supported")
    for residual, output in _FORMS:
        heads = []
        for head in count():
            residuals = _numbered(residual.replace("{head}", str(head)), tensors)
            if not residuals:
                break
            name = output.format(head=head, num_layers=len(residuals))
            # vLLM's setting `original_lm_head`: all heads share the target's output layer, so a copy is ignored.
            has_own = name in tensors and not values.get("original_lm_head")
            heads.append(HeadNames(residuals, name if has_own else None))
        if heads:
            return heads
    raise ConfigurationError(
        f"{folder} has no Medusa heads: it has neither 0.0.linear.weight nor blocks.0.layers.0.weight"
    )


def _numbered(name: str, tensors: Container[str]) -> tuple[str, ...]:
    names = (name.format(layer=layer) for layer in count())
    return tuple(takewhile(lambda name: f"{name}.weight" in tensors, names))


@dataclass(frozen=True, slots=True)
class MedusaHead:
    residuals: tuple[Linear, ...]
    output: Linear

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Returns the logits for `states` [num_rows, hidden_size]."""
        for linear in self.residuals:
            states = states + F.silu(linear(states))
        return self.output(states)


@dataclass(frozen=True, slots=True)
class MedusaHeads:
    heads: tuple[MedusaHead, ...]
    vocab_size: int
    dtype: torch.dtype  # of the heads' inputs

    captured_layers = (AFTER_NORM,)

    @property
    def num_bytes_read(self) -> int:
        """Bytes of the weights that a step reads."""
        return sum(linear.num_bytes for head in self.heads for linear in (*head.residuals, head.output))

    @torch.inference_mode()
    def logits(self, states: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Returns the logits of the first `counts[i]` heads for each row i of `states` [num_rows, hidden_size].

        The result is float32 [sum of `counts`, vocab_size], ordered by state, then by head.
        """
        states = states.to(self.dtype)
        logits = torch.empty(sum(counts), self.vocab_size, device=states.device)
        starts = [sum(counts[:row]) for row in range(len(counts))]
        for number, head in enumerate(self.heads[: max(counts)]):
            rows = [row for row, num_heads in enumerate(counts) if num_heads > number]
            places = torch.tensor([starts[row] + number for row in rows], device=states.device)
            logits.index_copy_(0, places, head.logits(states[rows]).float())
        return logits


def load_medusa_heads(folder: Path, target: LoadedModel, quantization: Quantization | None = None) -> MedusaHeads:
    """Returns the heads in `folder`, with the device and dtype of `target`. Raises ConfigurationError.

    `quantization`: format of the weights of the residual layers.
    """
    names, shared, hidden = read_medusa_names(folder), target.weights, target.config.hidden_size
    tensors = TensorReader(folder, shared.dtype, shared.device, takes_pickle=True)
    reader = WeightReader(target.config, tensors, target.form.weight_format, quantization)

    def residual(name: str) -> Linear:
        has_bias = tensors.find(f"{name}.bias") is not None
        return reader.linear((name, hidden), in_features=hidden, has_bias=has_bias)

    def output(name: str | None) -> Linear:
        return shared.head if name is None else target.form.weight_format.make_linear(reader.by_token(name))

    heads = tuple(MedusaHead(tuple(map(residual, head.residuals)), output(head.output)) for head in names)
    return MedusaHeads(heads, target.config.vocab_size, target.form.activations or shared.dtype)
