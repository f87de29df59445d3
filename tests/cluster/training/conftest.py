"""Tiny models and texts, so that every test trains for seconds at most."""

from pathlib import Path

import pytest
import torch

from cluster.training.models import ModelShape
from cluster.training.runtime import Runtime

TINY_VOCABULARY = 320
NUM_MODULES = 200


@pytest.fixture
def tiny_shape() -> ModelShape:
    return ModelShape(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=TINY_VOCABULARY,
    )


@pytest.fixture
def runtime() -> Runtime:
    return Runtime(torch.device("cpu"))


@pytest.fixture
def stream() -> torch.Tensor:
    """A token stream that is easy to learn: short runs that count upwards."""
    starts = torch.randint(TINY_VOCABULARY - 8, (512, 1), generator=torch.Generator().manual_seed(0))
    return (starts + torch.arange(8)).flatten().int()


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A folder of small Python packages."""
    root = tmp_path / "library"
    for package in ("alpha", "beta"):
        for index in range(NUM_MODULES):
            path = root / package / f"module{index}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(
                f"def function{index}(value):\n"
                f'    """Return the sum of a {package} value and {index}."""\n'
                f"    return value + {index}\n"
            )
    return root
