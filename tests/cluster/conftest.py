"""Tiny random models, shared by the tests of everything that runs one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cluster.engine.loader import LoadedModel, load_model
from cluster.engine.runner import ModelRunner

torch.set_num_threads(1)

TINY_VOCAB_SIZE = 512
TINY_MAX_LEN = 1024


def save_tiny_model(
    folder: Path,
    *,
    family: str = "llama",
    seed: int = 0,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    **overrides: object,
) -> Path:
    """A random model with grouped-query attention, whose every weight matters to the logits.

    `family` is its `model_type`, such as llama.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    shape: dict[str, object] = {
        "vocab_size": TINY_VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": TINY_MAX_LEN,
        "bos_token_id": None,
        "pad_token_id": None,
        "eos_token_id": 0,
    }
    config = AutoConfig.for_model(family, **(shape | {"tie_word_embeddings": tied} | overrides))
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=float("norm" in name), std=0.2, generator=generator)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny_folder(**options of save_tiny_model): a folder, made once for each set of options."""
    made: dict[str, Path] = {}

    def make(**options: object) -> Path:
        key = repr(sorted(options.items(), key=lambda item: item[0]))
        if key not in made:
            made[key] = save_tiny_model(tmp_path_factory.mktemp("tiny-model"), **options)
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_llama(tiny_folder: Callable[..., Path]) -> Callable[..., Path]:
    """tiny_folder's models of the family it has unless told otherwise."""
    return tiny_folder


@pytest.fixture(scope="session")
def tiny_model(tiny_folder: Callable[..., Path]) -> Callable[..., LoadedModel]:
    """tiny_model(**options): the engine's model of `tiny_folder(**options)`, in float32."""
    return lambda **options: load_model(tiny_folder(**options), torch.float32, torch.device("cpu"))


@pytest.fixture(scope="session")
def new_runner(tiny_model: Callable[..., LoadedModel]) -> Callable[..., ModelRunner]:
    """new_runner(block_size, num_blocks, **options): a model with an empty cache."""

    def make(block_size: int = 4, num_blocks: int = 64, **options: object) -> ModelRunner:
        return ModelRunner(tiny_model(**options), block_size, num_blocks)

    return make
