"""Fingerprints of model folders: they compare two models without reading all weights."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any, BinaryIO

from cluster.engine.checkpoint import weight_map
from cluster.errors import ConfigurationError

_END_BYTES = 64 * 2**10
_SAMPLE_BYTES = 4096
_NOT_OF_THE_MODEL = ("_", "transformers_version")  # prefixes of keys about the file's origin


def weights_fingerprint(folder: Path) -> str:
    """Returns the hexadecimal SHA-256 over parts of every shard. Raises ConfigurationError.

    The parts of a shard are its header, both ends of its data, and the middle of every tensor. One page of a tensor is
    enough, because training changes a whole tensor or leaves it unchanged. 140 GB in 30 shards take about a thousand
    reads. The same weights in other shards have another fingerprint.
    """
    digest = hashlib.sha256()
    for name in sorted(set(weight_map(folder).values())):
        digest.update(name.encode())
        try:
            with (folder / name).open("rb") as shard:
                _add_shard(digest, shard)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            raise ConfigurationError(f"cannot read {folder / name}: {error}") from error
    return digest.hexdigest()


def architecture_fingerprint(folder: Path) -> str:
    """Returns the hexadecimal SHA-256 over the model's fields in `config.json`. Raises ConfigurationError.

    It covers the file, not the parsed configuration, because the parsed fields differ between versions of this program.
    """
    file = folder / "config.json"
    try:
        said: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        kept = {key: value for key, value in said.items() if not key.startswith(_NOT_OF_THE_MODEL)}
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigurationError(f"cannot read {file}: {error}") from error
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _add_shard(digest: hashlib._Hash, shard: BinaryIO) -> None:
    (header_bytes,) = struct.unpack("<Q", shard.read(8))
    header = shard.read(header_bytes)
    digest.update(header)
    tensors = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
    start = 8 + header_bytes
    end = start + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    middles = sorted(sum(entry["data_offsets"]) // 2 - _SAMPLE_BYTES // 2 for entry in tensors.values())
    samples = [(start, _END_BYTES), (max(start, end - _END_BYTES), _END_BYTES)]
    samples += [(start + max(0, middle), _SAMPLE_BYTES) for middle in middles]
    for place, num_bytes in samples:
        shard.seek(place)
        digest.update(shard.read(num_bytes))
