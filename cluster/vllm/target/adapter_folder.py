"""LoRA adapters in PEFT's format: checks whether a folder contains an adapter that fits a model, and copies it.

An engine may read an adapter's files at any time, and by their path. So it gets a copy in a folder that only this user
may enter. Files are opened once, copied from there, and checked as the copy: the engine loads what was checked.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from cluster.engine.checkpoint import weight_map
from cluster.errors import ConfigurationError, InvalidRequestError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_MAX_CONFIG_BYTES = 2**20
_MAX_HEADER_BYTES = 2**26
_CHUNK_BYTES = 2**20
_MAX_ITEM_BYTES = 8  # of one number, as F64
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
    modules: frozenset[str]  # names of all modules with a matrix, also of packed ones, whose shapes are unknown

    @classmethod
    def of(cls, folder: Path) -> BaseModel:
        """Reads the shapes of a checkpoint from the headers of its shards. Raises ConfigurationError."""
        shapes: dict[str, Shape] = {}
        modules = set()
        for file in sorted(set(weight_map(folder).values())):
            try:
                header = _header(folder / file)
            except ValueError as error:
                raise ConfigurationError(f"cannot read {folder / file}: {error}") from error
            for name, (kind, shape) in header.items():
                if len(shape) >= 2:
                    modules.add(name.rpartition(".")[0])
                if name.endswith(".weight") and len(shape) == 2 and kind in _PLAIN_TYPES:
                    shapes[name.removesuffix(".weight")] = shape[0], shape[1]
        return cls(shapes, frozenset(modules))

    @property
    def max_size(self) -> int:
        """Upper bound of the inputs and outputs of a module whose shape is unknown."""
        return max((size for shape in self.shapes.values() for size in shape), default=0)

    def max_adapter_bytes(self, rank: int) -> int:
        """Returns the maximum size of the weights file of an adapter for all modules, of at most `rank`."""
        unknown = self.max_size, self.max_size
        num_items = sum(rank * sum(self.shapes.get(module, unknown)) for module in self.modules)
        num_items += sum(
            rows * columns
            for module, (rows, columns) in self.shapes.items()
            if module.endswith(("embed_tokens", "lm_head"))  # PEFT may save them with the adapter: `_OF_THE_BASE`
        )
        return 8 + _MAX_HEADER_BYTES + _MAX_ITEM_BYTES * num_items


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """Description of an adapter, read from the files in its folder."""

    rank: int  # highest rank of its modules
    shapes: Mapping[str, Shape]  # shape of the adapter's change to each module's weight: outputs, inputs

    @classmethod
    def read(cls, folder: Path, source: str = "") -> AdapterFiles:
        """Reads the files of an adapter. Raises InvalidRequestError naming the problem.

        `source`: name of the folder in errors if `folder` is a copy.
        """
        source = source or str(folder)
        for file in (folder / CONFIG_FILE, folder / WEIGHTS_FILE):
            if not file.is_file():
                raise InvalidRequestError(f"{source} has no {file.name}: give a folder with an adapter saved by PEFT")
        weights_name = f"{source}/{WEIGHTS_FILE}"
        ranks = _config_ranks(folder / CONFIG_FILE, f"{source}/{CONFIG_FILE}")
        parts: dict[str, dict[str, Shape]] = {}
        try:
            header = _header(folder / WEIGHTS_FILE)
        except ValueError as error:
            raise InvalidRequestError(f"cannot read {weights_name}: {error}") from error
        for name, (_, shape) in header.items():
            if name.endswith(_OF_THE_BASE):
                continue
            weight = _WEIGHT.fullmatch(name)
            if weight is None or len(shape) != 2:
                raise InvalidRequestError(
                    f"{weights_name}: {name[:256]!r} {list(shape)[:4]} is no weight of a LoRA adapter: save it by PEFT "
                    "without other tensors"
                )
            is_embedding = weight["row"] is not None
            # The weights of an embedding are transposed: a row is one looked-up vector.
            part = {"A": "B", "B": "A"}[weight["row"]] if is_embedding else weight["part"]
            parts.setdefault(weight["module"], {})[part] = (
                (shape[1], shape[0]) if is_embedding else (shape[0], shape[1])
            )
        if not parts:
            raise InvalidRequestError(f"{weights_name} has no weights: give an adapter that changes a module")
        shapes = {}
        for module, pair in parts.items():
            if pair.keys() != {"A", "B"} or pair["A"][0] != pair["B"][1]:
                raise InvalidRequestError(
                    f"{weights_name}: lora_A and lora_B of {module[:256]!r} do not match: "
                    f"{ {name: list(shape) for name, shape in sorted(pair.items())} }"
                )
            shapes[module] = pair["B"][0], pair["A"][1]
        return cls(max(ranks, *(pair["A"][0] for pair in parts.values())), shapes)

    def check(self, base: BaseModel, max_rank: int) -> None:
        """Raises InvalidRequestError if the adapter does not fit `base`, or its rank is above `max_rank`.

        The checkpoint may have another name than PEFT for a module, or a packed weight. Then only the last part of the
        name and the size are checked here, and the rest by the engine. It also checks the names of experts.
        """
        if self.rank > max_rank:
            raise InvalidRequestError(
                f"the adapter's rank {self.rank} is above this target's {max_rank}: start it with "
                f"target.engine_args {{max_lora_rank: {self.rank}}} or more"
            )
        known = {module.rpartition(".")[2] for module in base.modules}
        max_size = base.max_size
        for module, shape in sorted(self.shapes.items()):
            of_base = base.shapes.get(module)
            if module not in base.modules and ".experts" not in module and module.rpartition(".")[2] not in known:
                raise InvalidRequestError(
                    f"the adapter was made for another model: this model has no {module[:256]!r}; give one whose "
                    f"modules are among {', '.join(sorted(known))[:256]}"
                )
            if (of_base is not None and of_base != shape) or max(shape) > max_size:
                limit = f"{list(of_base)}" if of_base is not None else f"at most {max_size} in each dimension"
                raise InvalidRequestError(
                    f"the adapter was made for another model: its {module[:256]} is {list(shape)}, this model's "
                    f"{limit}; give one made for this model"
                )


@contextlib.contextmanager
def open_adapter(path: str, root: Path | None) -> Iterator[Sequence[BinaryIO]]:
    """Opens the two files in the adapter's folder at `path`, absolute or relative to `root`.

    After following all links, the folder and its files must be below `root`, if it is not None. The files must be
    regular files. Raises InvalidRequestError.
    """
    top = Path("/") if root is None else root.expanduser().resolve()
    with contextlib.ExitStack() as opened:
        try:
            folder = (top / path).resolve(strict=True)
            if folder == top or not folder.is_relative_to(top):
                raise ValueError("outside")
            files = [opened.enter_context(_open_below(top, folder / name)) for name in (CONFIG_FILE, WEIGHTS_FILE)]
        except (OSError, ValueError, RuntimeError):  # no such folder, a NUL in the path, or a loop of links
            where = "" if root is None else " below this target's lora_root"
            # One message for all cases, so that callers learn nothing about other paths.
            raise InvalidRequestError(
                f"there is no folder {path[:256]!r} with {CONFIG_FILE} and {WEIGHTS_FILE}{where}"
            ) from None
        yield files


def _open_below(top: Path, path: Path) -> BinaryIO:
    """Opens the regular file at `path`, which must be below `top` after following all links.

    The resolved path is opened from `top` on without following links. So if a part of it becomes a link after it was
    checked, this fails. Raises OSError or ValueError.
    """
    place = path.resolve(strict=True).relative_to(top)
    folder = os.open(top, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        for part in place.parts[:-1]:
            parent, folder = folder, os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(parent)
        # Not blocking, because opening a FIFO would wait for its writer.
        file = os.open(place.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "not a regular file")
    return os.fdopen(file, "rb")


def copy_adapter(files: Sequence[BinaryIO], folder: Path, max_bytes: int) -> str:
    """Copies the two opened files of an adapter to the new `folder`. Returns the copy's fingerprint (SHA-256).

    Raises InvalidRequestError, and leaves no folder, if a file cannot be copied or the weights exceed `max_bytes`.
    """
    digest = hashlib.sha256()
    folder.mkdir(mode=0o700)
    try:
        limits = ((CONFIG_FILE, _MAX_CONFIG_BYTES), (WEIGHTS_FILE, max_bytes))
        for original, (name, limit) in zip(files, limits, strict=True):
            digest.update(f"{name}\0".encode())
            _copy(original, folder / name, limit, digest)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise InvalidRequestError(f"cannot copy the adapter: {error.strerror}") from error
    except InvalidRequestError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return digest.hexdigest()


def _copy(original: BinaryIO, path: Path, limit: int, digest: hashlib._Hash) -> None:
    """Copies `original` to the new file `path` and into `digest`. Raises InvalidRequestError above `limit` bytes."""
    num_bytes = os.fstat(original.fileno()).st_size
    with path.open("xb") as copy:
        while num_bytes <= limit and (chunk := original.read(_CHUNK_BYTES)):
            digest.update(chunk)
            copy.write(chunk)
            num_bytes = max(num_bytes, copy.tell())  # it may grow meanwhile
    if num_bytes > limit:
        raise InvalidRequestError(
            f"the adapter's {path.name} has {num_bytes} bytes; for this model and max_lora_rank it may have "
            f"{limit}: give an adapter made for this model, or start the target with a higher max_lora_rank"
        )


def _config_ranks(file: Path, name: str) -> int:
    """Returns the highest rank in the configuration `file`. Raises InvalidRequestError, in which it is `name`."""
    try:
        with file.open("rb") as opened:
            text = opened.read(_MAX_CONFIG_BYTES + 1)
        if len(text) > _MAX_CONFIG_BYTES:
            raise ValueError(f"it has more than {_MAX_CONFIG_BYTES} bytes")
        config: Any = json.loads(text)
        ranks = [config["r"], *(config.get("rank_pattern") or {}).values()]
        if not all(type(rank) is int and rank > 0 for rank in ranks):
            raise ValueError(f"its ranks are {ranks!r:.100}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidRequestError(f"{name} is no configuration of a LoRA adapter: {error!r:.200}") from error
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
            size = os.fstat(opened.fileno()).st_size
        tensors.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        if size != 8 + num_bytes + end:
            raise ValueError("truncated, or longer than its header claims")
        return {name: (str(entry["dtype"]), tuple(map(int, entry["shape"]))) for name, entry in tensors.items()}
    except (OSError, KeyError, TypeError, AttributeError, IndexError, struct.error, RecursionError) as error:
        raise ValueError("not a .safetensors file") from error
