"""Models with something in their caches."""

from __future__ import annotations

from pathlib import Path

import torch

from cluster.engine.kv_cache import KVCache
from cluster.engine.loader import load_model
from cluster.engine.model import Model

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS = 4, 64


def model_and_cache(folder: Path, form: type[Model]) -> tuple[Model, KVCache]:
    """Caches are of one content."""
    loaded = load_model(folder, torch.float32, CPU, form=form)
    cache = KVCache(loaded.config, NUM_BLOCKS, BLOCK_SIZE, torch.float32, CPU)
    generator = torch.Generator().manual_seed(1)
    for tensor in (cache.keys, cache.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return loaded.bind(cache), cache
