"""LoRA adapters in PEFT's format: checks whether a folder contains an adapter that fits a model, and copies it.

An engine may read an adapter's files at any time. So the engine gets a copy that no other program writes to, and
answers are computed with the files that were checked and fingerprinted.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.engine.checkpoint import weight_map
from cluster.errors import InvalidRequestError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_MAX_CONFIG_BYTES = 2**20
_MAX_HEADER_BYTES = 2**26
_CHUNK_BYTES = 2**20
_WEIGHT = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\.(?:lora_(?P<part>[AB])\.weight|lora_embedding_(?P<row>[AB]))"
)
# Weights of the base, which PEFT saves with an adapter that trains the embedding. Engines ignore them.
_OF_THE_BASE = (".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight")
_PLAIN_TYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")  # tensors of other types are packed: shapes differ

Shape = tuple[int, int]


@dataclass(frozen=True, slots=True)
class BaseModel:
    """Shapes of the base model's weights, which an adapter must fit."""

    shapes: Mapping[str, Shape]  # shape of each module's weight: outputs, inputs

    @classmethod
    def of(cls, folder: Path) -> BaseModel:
        """Reads the shapes of a checkpoint from the headers of its shards. Raises ConfigurationError."""
        shapes: dict[str, Shape] = {}
        for file in sorted(set(weight_map(folder).values())):
            for name, (kind, shape) in _header(folder / file).items():
                if name.endswith(".weight") and len(shape) == 2 and kind in _PLAIN_TYPES:
                    shapes[name.removesuffix(".weight")] = shape[0], shape[1]
        return cls(shapes)


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """Description of an adapter, read from the files in its folder."""

    rank: int  # highest rank of its modules
    shapes: Mapping[str, Shape]  # shape of the adapter's change to each module's weight: outputs, inputs

    @classmethod
    def read(cls, folder: Path) -> AdapterFiles:
        """Reads the files of an adapter. Raises InvalidRequestError naming the problem."""
        for file in (folder / CONFIG_FILE, folder / WEIGHTS_FILE):
            if not file.is_file():
                raise InvalidRequestError(f"{folder} has no {file.name}: give a folder with an adapter saved by PEFT")
        ranks = _config_ranks(folder / CONFIG_FILE)
        parts: dict[str, dict[str, Shape]] = {}
        try:
            header = _header(folder / WEIGHTS_FILE)
        except ValueError as error:
            raise InvalidRequestError(f"cannot read {folder / WEIGHTS_FILE}: {error}") from error
        for name, (_, shape) in header.items():
            if name.endswith(_OF_THE_BASE):
                continue
            weight = _WEIGHT.fullmatch(name)
            if weight is None or len(shape) != 2:
                raise InvalidRequestError(
                    f"{folder / WEIGHTS_FILE}: {name!r} {list(shape)} is no weight of a LoRA adapter"
                )
            is_embedding = weight["row"] is not None
            # The weights of an embedding are transposed: a row is one looked-up vector.
            part = {"A": "B", "B": "A"}[weight["row"]] if is_embedding else weight["part"]
            parts.setdefault(weight["module"], {})[part] = (
                (shape[1], shape[0]) if is_embedding else (shape[0], shape[1])
            )
        if not parts:
            raise InvalidRequestError(f"{folder / WEIGHTS_FILE} has no weights")
        shapes = {}
        for module, pair in parts.items():
            if pair.keys() != {"A", "B"} or pair["A"][0] != pair["B"][1]:
                raise InvalidRequestError(
                    f"{folder / WEIGHTS_FILE}: lora_A and lora_B of {module!r} do not match: "
                    f"{ {name: list(shape) for name, shape in sorted(pair.items())} }"
                )
            shapes[module] = pair["B"][0], pair["A"][1]
        return cls(max(ranks, *(pair["A"][0] for pair in parts.values())), shapes)

    def check(self, base: BaseModel, max_rank: int) -> None:
        """Raises InvalidRequestError if the adapter does not fit `base`, or its rank is above `max_rank`.

        Does not check modules for which the checkpoint has another name than PEFT; the engine does.
        """
        if self.rank > max_rank:
            raise InvalidRequestError(
                f"the adapter's rank {self.rank} is above this target's {max_rank}: start it with "
                f"target.engine_args {{max_lora_rank: {self.rank}}} or more"
            )
        for module, shape in sorted(self.shapes.items()):
            of_base = base.shapes.get(module)
            if of_base is not None and of_base != shape:
                raise InvalidRequestError(
                    f"the adapter was made for another model: its {module} is {list(shape)}, this model's "
                    f"{list(of_base)}"
                )


def copy_adapter(source: Path, folder: Path) -> str:
    """Copies the two files of an adapter to the new `folder`. Returns the copy's fingerprint (SHA-256).

    Raises InvalidRequestError if `source` cannot be read.
    """
    digest = hashlib.sha256()
    folder.mkdir(mode=0o700)
    try:
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            with (source / name).open("rb") as original, (folder / name).open("wb") as copy:
                digest.update(f"{name}\0".encode())
                while chunk := original.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    copy.write(chunk)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise InvalidRequestError(f"cannot read an adapter in {source}: {error.strerror}") from error
    return digest.hexdigest()


def folder_within(path: str, root: Path) -> Path:
    """Returns the adapter's folder at `path`, absolute or relative to `root`. Raises InvalidRequestError.

    After following all links, the folder and its files must be below `root`. The files must be regular files, because
    reading a FIFO would block forever.
    """
    root = root.expanduser().resolve()
    try:
        folder = (root / path).resolve(strict=True)
        files = [(folder / name).resolve(strict=True) for name in (CONFIG_FILE, WEIGHTS_FILE)] if folder != root else []
        is_within = all(place.is_relative_to(root) for place in (folder, *files))
        is_usable = is_within and bool(files) and all(stat.S_ISREG(file.stat().st_mode) for file in files)
    except (OSError, ValueError, RuntimeError):  # no such folder, a NUL in the path, or a loop of links
        is_usable = False
    if not is_usable:  # one message for all cases, so that callers learn nothing about other paths
        raise InvalidRequestError(
            f"there is no folder {path[:256]!r} with {CONFIG_FILE} and {WEIGHTS_FILE} below this target's lora_root"
        )
    return folder


def _config_ranks(file: Path) -> int:
    """Returns the highest rank in the configuration `file`. Raises InvalidRequestError."""
    try:
        if file.stat().st_size > _MAX_CONFIG_BYTES:
            raise ValueError(f"it has more than {_MAX_CONFIG_BYTES} bytes")
        config: Any = json.loads(file.read_bytes())
        ranks = [config["r"], *(config.get("rank_pattern") or {}).values()]
        if not all(type(rank) is int and rank > 0 for rank in ranks):
            raise ValueError(f"its ranks are {ranks!r:.100}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidRequestError(f"{file} is no configuration of a LoRA adapter: {error!r:.200}") from error
    highest: int = max(ranks)
    return highest


def _header(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns the type and shape of each tensor of a .safetensors file. Raises ValueError."""
    try:
        with file.open("rb") as opened:
            (num_bytes,) = struct.unpack("<Q", opened.read(8))
            if num_bytes > _MAX_HEADER_BYTES:
                raise ValueError("not a .safetensors file")
            tensors = json.loads(opened.read(num_bytes))
        tensors.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        if file.stat().st_size != 8 + num_bytes + end:
            raise ValueError("truncated, or longer than its header claims")
        return {name: (str(entry["dtype"]), tuple(map(int, entry["shape"]))) for name, entry in tensors.items()}
    except (OSError, KeyError, TypeError, AttributeError, IndexError, struct.error, RecursionError) as error:
        raise ValueError(f"{file} is not a .safetensors file") from error
