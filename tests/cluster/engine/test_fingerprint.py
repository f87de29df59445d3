"""Fingerprints of model folders: equal for copies, different for everything that changes an answer."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.engine.fingerprint import architecture_fingerprint, weights_fingerprint
from cluster.errors import ConfigurationError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    torch.manual_seed(3)
    names = [f"model.layers.{index}.weight" for index in range(40)]
    save_file({name: torch.randn(64, 128) for name in names}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"rope_theta": 500.0, "_name_or_path": "here", "num_layers": 40}))
    return folder


def shard_in_two(folder: Path) -> None:
    tensors = list(load_file(folder / "model.safetensors").items())
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for number, part in enumerate((tensors[:20], tensors[20:])):
        save_file(dict(part), folder / f"part-{number}.safetensors")
        weight_map |= {name: f"part-{number}.safetensors" for name, _ in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def index_of_one(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "part.safetensors"}}))


def test_a_copy_has_the_same(folder: Path, tmp_path: Path):
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    assert weights_fingerprint(copy) == weights_fingerprint(folder)
    assert architecture_fingerprint(copy) == architecture_fingerprint(folder)
    assert len(weights_fingerprint(folder)) == 64


@pytest.mark.parametrize("index", [0, 1, 17, 39])
def test_training_of_any_tensor_shows(folder: Path, index: int):
    before = weights_fingerprint(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[f"model.layers.{index}.weight"] *= 1.001
    save_file(tensors, folder / "model.safetensors")
    assert weights_fingerprint(folder) != before


def test_another_dtype_or_name_shows(folder: Path):
    seen = {weights_fingerprint(folder)}
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / "model.safetensors")
    seen.add(weights_fingerprint(folder))
    save_file({f"{name}.other": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    seen.add(weights_fingerprint(folder))
    assert len(seen) == 3


def test_all_shards_count(folder: Path):
    shard_in_two(folder)
    before = weights_fingerprint(folder)
    for number in (0, 1):
        path = folder / f"part-{number}.safetensors"
        kept = path.read_bytes()
        save_file({name: tensor + 1 for name, tensor in load_file(path).items()}, path)
        assert weights_fingerprint(folder) != before
        path.write_bytes(kept)
    assert weights_fingerprint(folder) == before


def test_little_of_a_large_file_is_read(tmp_path: Path):
    """A hole of 200 GB, which reading would show."""
    header = json.dumps({"w": {"dtype": "BF16", "shape": [10**11], "data_offsets": [0, 2 * 10**11]}}).encode()
    path = tmp_path / "part.safetensors"
    index_of_one(tmp_path)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 2 * 10**11)
    assert len(weights_fingerprint(tmp_path)) == 64


@pytest.mark.parametrize(
    "content", [b"", b"1234567", struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 9) + b'{"w": {}}']
)
def test_a_file_that_is_not_one_is_named(tmp_path: Path, content: bytes):
    (tmp_path / "part.safetensors").write_bytes(content)
    index_of_one(tmp_path)
    with pytest.raises(ConfigurationError, match=r"part\.safetensors"):
        weights_fingerprint(tmp_path)


def test_what_the_configuration_says_of_the_model_counts_and_who_wrote_it_does_not(folder: Path):
    before = architecture_fingerprint(folder)
    (folder / "config.json").write_text(
        json.dumps({"num_layers": 40, "rope_theta": 500.0, "_name_or_path": "there", "transformers_version": "5"})
    )
    assert architecture_fingerprint(folder) == before
    (folder / "config.json").write_text(json.dumps({"num_layers": 40, "rope_theta": 501.0}))
    assert architecture_fingerprint(folder) != before
    (folder / "config.json").write_text("[]")
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        architecture_fingerprint(folder)
