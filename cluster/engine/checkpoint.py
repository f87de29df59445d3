"""Reads the tensors of a Hugging Face folder, from .safetensors files or from a file of pickled tensors."""

from __future__ import annotations

import json
import logging
import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from cluster.errors import ConfigurationError

logger = logging.getLogger(__name__)

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt")


class TensorReader:
    """Reads tensors by name from the memory-mapped shards of a folder."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device, *, takes_pickle: bool = False) -> None:
        """`takes_pickle`: as in `weight_map`."""
        self._folder, self.dtype, self.device = folder, dtype, device
        self._shards: dict[str, Any] = {}
        # A multimodal checkpoint has its text model's tensors at language_model.model or model.language_model.
        files = weight_map(folder, takes_pickle=takes_pickle)
        self._stored_as = {name.replace("language_model.", ""): (file, name) for name, file in files.items()}
        self._has_warned = False

    def read(self, parts: Sequence[tuple[str, int]], *inner: int) -> torch.Tensor:
        """Returns the tensors named in `parts` (name, rows), [rows, *inner] each, stacked by rows.

        The tensors are copied once and converted, so the result does not keep the files open.
        """
        sizes = [rows for _, rows in parts]
        stacked = torch.empty(sum(sizes), *inner, dtype=self.dtype, device=self.device)
        for (name, rows), place in zip(parts, torch.split(stacked, sizes), strict=True):
            tensor = self._mapped(name, rows, *inner)
            _check_dtype(name, tensor, _FLOATS)
            if tensor.dtype == torch.float16 and self.dtype == torch.bfloat16 and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "%s is in float16 and runs in bfloat16, which has 3 bits less: answers may differ from those of "
                    "engines that keep float16; set dtype to float32 to keep all bits",
                    self._folder,
                )
            place.copy_(tensor)
        return stacked

    def find(self, *names: str) -> str | None:
        """Returns the first of `names` for which the folder has a tensor; None if there is no such tensor."""
        return next((name for name in names if name in self._stored_as), None)

    def read_raw(self, name: str, *shape: int, dtypes: Sequence[torch.dtype] = ()) -> torch.Tensor:
        """Returns the tensor `name` in its own dtype, on the reader's device; without `shape`, in any shape.

        `dtypes`: those that it may have; none: any.
        """
        tensor = self._mapped(name, *shape)
        if dtypes:
            _check_dtype(name, tensor, dtypes)
        return tensor.to(self.device)

    def integers(self, name: str, size: int) -> torch.Tensor:
        """Returns an int64 tensor [size] on the CPU."""
        return self._mapped(name, size).to(torch.int64)

    def _mapped(self, name: str, *shape: int) -> torch.Tensor:
        if name not in self._stored_as:
            raise ConfigurationError(f"{self._folder} has no weight named {name!r}")
        file, stored_as = self._stored_as[name]
        if file not in self._shards:
            self._shards[file] = _open_shard(self._folder / file)
        tensor: torch.Tensor = self._shards[file].get_tensor(stored_as)
        if shape and tuple(tensor.shape) != shape:
            raise ConfigurationError(
                f"{self._folder}: {name!r} has shape {tuple(tensor.shape)}, config.json implies {shape}"
            )
        return tensor


def _check_dtype(name: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype]) -> None:
    """Raises ConfigurationError if the dtype of `tensor` is not one of `dtypes`."""
    if tensor.dtype not in dtypes:
        found, *supported = (str(dtype).removeprefix("torch.") for dtype in (tensor.dtype, *dtypes))
        raise ConfigurationError(
            f"{name} is {found}, expected {', '.join(supported)}: its scales may be missing, or quantization_config "
            "may describe another format"
        )


def weight_map(folder: Path, *, takes_pickle: bool = False) -> dict[str, str]:
    """Returns the file name of each tensor by the tensor's name. Raises ConfigurationError.

    `takes_pickle`: whether a pytorch_model.bin or medusa_lm_head.pt is read if there are no .safetensors.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(f"cannot read {index}: {error}") from error
        return weight_map
    for name in ("model.safetensors", *(_PICKLES if takes_pickle else ())):
        if (folder / name).is_file():
            return dict.fromkeys(_open_shard(folder / name).keys(), name)
    others = "".join(f", no {name}" for name in _PICKLES) if takes_pickle else ""
    raise ConfigurationError(f"{folder} has no model.safetensors{others} (nor an index of .safetensors shards)")


class _Pickled:
    """The tensors in a pickled dict. Objects that could run code are refused."""

    def __init__(self, file: Path) -> None:
        # Files of PyTorch before 1.6 are no zip files, and cannot be mapped.
        values = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
        if not isinstance(values, dict):
            raise ConfigurationError(f"{file} contains a {type(values).__name__} instead of a dict of tensors")
        self._tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name]


def _open_shard(file: Path) -> Any:
    try:
        return _Pickled(file) if file.name in _PICKLES else safe_open(file, framework="pt")
    except (OSError, EOFError, SafetensorError, RuntimeError, pickle.UnpicklingError) as error:
        raise ConfigurationError(f"cannot read {file}: {error}") from error
