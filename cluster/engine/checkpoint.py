"""Reads the tensors of a Hugging Face folder, from one or several .safetensors."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from cluster.errors import ConfigurationError

logger = logging.getLogger(__name__)


class TensorReader:
    """Reads tensors by name from the memory-mapped shards of a folder."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._folder, self._dtype, self._device = folder, dtype, device
        self._shards: dict[str, Any] = {}
        self._file_of = weight_map(folder)
        self._has_warned = False

    def read(self, parts: Sequence[tuple[str, int]], *inner: int) -> torch.Tensor:
        """Returns the tensors named in `parts` (name, rows), [rows, *inner] each, stacked by rows.

        The tensors are copied once and converted, so the result does not keep the files open.
        """
        sizes = [rows for _, rows in parts]
        stacked = torch.empty(sum(sizes), *inner, dtype=self._dtype, device=self._device)
        for (name, rows), place in zip(parts, torch.split(stacked, sizes), strict=True):
            tensor = self._mapped(name, rows, *inner)
            if tensor.dtype == torch.float16 and self._dtype == torch.bfloat16 and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "%s is in float16 and runs in bfloat16, which has 3 bits less: answers may differ from those of "
                    "engines that keep float16; set dtype to float32 to keep all bits",
                    self._folder,
                )
            place.copy_(tensor)
        return stacked

    def _mapped(self, name: str, *shape: int) -> torch.Tensor:
        file = self._file_of.get(name)
        if file is None:
            raise ConfigurationError(f"{self._folder} has no weight named {name!r}")
        if file not in self._shards:
            self._shards[file] = _open_shard(self._folder / file)
        tensor: torch.Tensor = self._shards[file].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ConfigurationError(
                f"{self._folder}: {name!r} has shape {tuple(tensor.shape)}, config.json implies {shape}"
            )
        return tensor


def weight_map(folder: Path) -> dict[str, str]:
    """Returns the file name of each tensor by the tensor's name. Raises ConfigurationError."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (OSError, ValueError, KeyError) as error:
            raise ConfigurationError(f"cannot read {index}: {error}") from error
        return weight_map
    single = folder / "model.safetensors"
    if not single.is_file():
        raise ConfigurationError(f"{folder} has no model.safetensors (nor an index of shards)")
    with _open_shard(single) as shard:
        return dict.fromkeys(shard.keys(), single.name)


def _open_shard(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigurationError(f"cannot read {file}: {error}") from error
