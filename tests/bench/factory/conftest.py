"""Tiny models and texts, so that every test trains for seconds at most."""

import dataclasses
from pathlib import Path

import pytest
import torch

from bench.factory import sources
from bench.factory.context import Context
from bench.factory.models import ModelShape
from bench.factory.options import TrainingOptions
from bench.factory.runtime import Runtime
from bench.factory.workspace import Workspace

TINY_VOCABULARY = 320
NUM_MODULES = 200
TINY = {
    "target_tokens": 256,
    "draft_tokens": 256,
    "batch_size": 2,
    "sequence_length": 32,
    "evaluation_tokens": 128,
    "samples": 4,
    "sample_batch_size": 4,
    "acceptance_prompts": 3,
}


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


@pytest.fixture
def library_context(
    tmp_path: Path,
    library: Path,
    tiny_shape: ModelShape,
    runtime: Runtime,
    monkeypatch: pytest.MonkeyPatch,
) -> Context:
    """A training of small sizes, with `library` for its standard library."""
    root = dataclasses.replace(sources.standard_library(), directory=library)
    monkeypatch.setattr(sources, "standard_library", lambda: root)
    shape = dataclasses.replace(tiny_shape, vocab_size=300)
    options = TrainingOptions(out=tmp_path / "out", **TINY)  # type: ignore[arg-type]
    return Context(options, Workspace(options.out), runtime, shape, shape)
