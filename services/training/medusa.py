"""Medusa heads (Cai et al., arXiv 2401.10774), in training: each drafts one of the next tokens from the same state.

Names and shapes of the parameters are the authors', which `cluster.engine.medusa` loads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from cluster.engine.checkpoint import TensorReader
from cluster.engine.medusa import HeadNames, read_medusa_names
from cluster.engine.model_config import AFTER_NORM
from services.training.heads import TargetEnds, TrainableHead


class TrainableMedusa(TrainableHead):
    """Medusa heads. Heads without an output layer of their own use the target's, which is not trained."""

    captured_layers = (AFTER_NORM,)
    output: Tensor  # [vocab_size, hidden_size]: the target's output layer

    def __init__(self, output: Tensor, shapes: list[tuple[int, bool]]) -> None:
        """`shapes`: the number of residual layers of each head, and whether it has an output layer."""
        super().__init__()
        vocab_size, size = output.shape
        self.register_buffer("output", output, persistent=False)
        self.heads = nn.ModuleList()
        for num_residuals, has_output in shapes:
            layers: list[nn.Module] = [_Residual(size) for _ in range(num_residuals)]
            if has_output:
                layers.append(nn.Linear(size, vocab_size, bias=False))
            self.heads.append(nn.Sequential(*layers))
        self._has_output = [has_output for _, has_output in shapes]
        self.num_trained_steps = len(self.heads)

    @property
    def target_ids(self) -> Tensor:
        return torch.arange(len(self.output), device=self.output.device)

    def step_logits(self, embeddings: Tensor, states: Tensor, num_steps: int, positions: slice) -> Iterator[Tensor]:
        states = states[:, : embeddings.shape[1] - num_steps][:, positions]
        for head, has_output in zip(self.heads[:num_steps], self._has_output, strict=False):
            yield head(states) if has_output else F.linear(head(states), self.output)


class _Residual(nn.Module):
    """Computes x + SiLU(W x + b)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, states: Tensor) -> Tensor:
        return states + F.silu(self.linear(states))


@torch.no_grad()
def build_medusa(target: TargetEnds, num_heads: int) -> TrainableMedusa:
    """Returns untrained float32 heads that predict the same token as the target's output layer.

    Each has one residual layer, and an output layer that starts as a copy of the target's.
    """
    heads = TrainableMedusa(target.output, [(1, True)] * num_heads)
    for name, parameter in heads.named_parameters():
        if ".linear." in name:
            parameter.zero_()
        else:
            parameter.copy_(target.output)
    return heads


@torch.no_grad()
def load_medusa(folder: Path, target: TargetEnds) -> TrainableMedusa:
    """Loads heads of `target` in float32.

    The folder may have any format that the engine loads. Raises ConfigurationError if it has no supported heads.
    """
    names = read_medusa_names(folder)
    heads = TrainableMedusa(target.output, [(len(one.residuals), one.output is not None) for one in names])
    tensors = TensorReader(folder, torch.float32, torch.device("cpu"), takes_pickle=True)
    for head, own in zip(heads.heads, names, strict=True):
        for (name, parameter), source in zip(head.named_parameters(), _sources(own), strict=True):
            if name.endswith(".bias") and tensors.find(source) is None:
                parameter.zero_()
            else:
                parameter.copy_(tensors.read([(source, len(parameter))], *parameter.shape[1:]))
    return heads


def _sources(head: HeadNames) -> list[str]:
    residuals = [f"{name}.{part}" for name in head.residuals for part in ("weight", "bias")]
    return residuals if head.output is None else [*residuals, head.output]


def save_medusa(heads: TrainableMedusa, folder: Path) -> None:
    """Writes the folder that `draft.drafter: medusa` loads, in bfloat16. The heads themselves are converted, too."""
    folder.mkdir(parents=True, exist_ok=True)
    heads.heads.to(torch.bfloat16)
    save_file(heads.heads.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    vocab_size, hidden_size = heads.output.shape
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "medusa_num_heads": len(heads.heads),
        "medusa_num_layers": sum(isinstance(layer, _Residual) for layer in heads.heads[0].children()),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
