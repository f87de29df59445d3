"""Adapters are checked before an engine sees them, and only those that lie where they may are read."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.config import Config
from cluster.config.workers import TargetConfig
from cluster.errors import ConfigurationError, InvalidRequestError, NotFoundError
from cluster.model_folder import resolve_model_folder
from cluster.targets.base import TargetModel
from cluster.targets.step_loop import StepLoop
from cluster.vllm.target.adapter_folder import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterFiles,
    BaseModel,
    copy_adapter,
    open_adapter,
)
from cluster.vllm.target.lora import LoraLimits
from services.target.traits import traits_of
from tests.cluster.targets.requests import new_request
from tests.lora import BASE, write_adapter


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", 1)


@pytest.fixture(scope="module")
def base() -> BaseModel:
    return BaseModel.of(resolve_model_folder(BASE))


def test_one_that_fits(adapter: Path, base: BaseModel) -> None:
    files = AdapterFiles.read(adapter)
    assert files.rank == 8
    assert files.shapes["model.layers.5.mlp.down_proj"] == (384, 1152)
    files.check(base, 8)
    with pytest.raises(InvalidRequestError, match=r"rank 8 is above this target's 4: .*max_lora_rank: 8"):
        files.check(base, 4)


def copy(path: Path | str, folder: Path, root: Path | None = None, max_bytes: int = 2**24) -> str:
    with open_adapter(str(path), root) as files:
        return copy_adapter(files, folder, max_bytes)


def test_a_copy_is_the_same_and_has_its_fingerprint(adapter: Path, tmp_path: Path) -> None:
    first = copy(adapter, tmp_path / "copy")
    assert AdapterFiles.read(tmp_path / "copy") == AdapterFiles.read(adapter)
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o700
    assert copy(adapter, tmp_path / "second") == first
    config = json.loads((adapter / CONFIG_FILE).read_text())
    (adapter / CONFIG_FILE).write_text(json.dumps(config | {"lora_alpha": 1}))
    assert copy(adapter, tmp_path / "third") != first
    (adapter / WEIGHTS_FILE).unlink()
    with pytest.raises(InvalidRequestError, match=r"there is no folder .*adapter"):
        copy(adapter, tmp_path / "fourth")
    assert not (tmp_path / "fourth").exists()


def test_files_larger_than_an_adapter_of_the_model_are_not_copied(
    adapter: Path, tmp_path: Path, base: BaseModel
) -> None:
    size = (adapter / WEIGHTS_FILE).stat().st_size
    assert size < base.max_adapter_bytes(8) < base.max_adapter_bytes(16)
    with pytest.raises(InvalidRequestError, match=f"{WEIGHTS_FILE} has {size} bytes; .* may have {size - 1}: give"):
        copy(adapter, tmp_path / "copy", max_bytes=size - 1)
    (adapter / CONFIG_FILE).write_bytes(b" " * (2**20 + 1))
    with pytest.raises(InvalidRequestError, match=f"{CONFIG_FILE} has 1048577 bytes"):
        copy(adapter, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_what_is_replaced_after_it_was_checked_is_not_read(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    inside = write_adapter(root / "inside", 1)
    open_really = os.open

    def open_after_swap(*arguments: Any, **options: Any) -> int:
        if not inside.is_symlink():  # the path has been resolved and checked before the first call
            inside.rename(root / "moved")
            inside.symlink_to(adapter)
        return open_really(*arguments, **options)

    monkeypatch.setattr(os, "open", open_after_swap)
    with pytest.raises(InvalidRequestError, match="lora_root"):
        copy("inside", tmp_path / "copy", root)


def test_one_of_another_model(tmp_path: Path, base: BaseModel) -> None:
    files = AdapterFiles.read(write_adapter(tmp_path / "other", 1, hidden_size=256))
    with pytest.raises(InvalidRequestError, match=r"another model: its model\.layers\.0\..* \[\d+, \d+\]"):
        files.check(base, 8)


def test_modules_that_the_model_lacks_are_named(base: BaseModel) -> None:
    def check(module: str, *shape: int) -> None:
        AdapterFiles(4, {module: (shape[0], shape[1])}).check(base, 8)

    with pytest.raises(InvalidRequestError, match=r"this model has no 'model\.layers\.0\.w9'; give .*q_proj"):
        check("model.layers.0.w9", 8, 8)
    check("other.prefix.q_proj", 8, 8)  # the engine knows the other names of a module
    with pytest.raises(InvalidRequestError, match=r"other\.prefix\.q_proj is \[8, 99999999\].* at most \d+ in each"):
        check("other.prefix.q_proj", 8, 99_999_999)


@pytest.mark.parametrize(
    "said", ["", "[]", "{}", '{"r": 0}', '{"r": "8"}', '{"r": true}', '{"r": 8, "rank_pattern": [3]}', "[" * 100_000]
)
def test_configurations_that_are_none(adapter: Path, said: str) -> None:
    (adapter / CONFIG_FILE).write_text(said)
    with pytest.raises(InvalidRequestError, match="no configuration of a LoRA adapter"):
        AdapterFiles.read(adapter)


def test_the_highest_rank_counts(adapter: Path) -> None:
    config = json.loads((adapter / CONFIG_FILE).read_text())
    (adapter / CONFIG_FILE).write_text(json.dumps(config | {"rank_pattern": {"q_proj": 24}}))
    assert AdapterFiles.read(adapter).rank == 24


def _safetensors(header: object, num_data_bytes: int = 0) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(num_data_bytes)


def _tensor(*shape: int) -> dict[str, object]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 100,
        _safetensors([]),
        _safetensors({}),
        _safetensors({"x": 3}),
        _safetensors({"m.lora_A.weight": _tensor(4, 8)}),  # B is missing
        _safetensors({"m.lora_A.weight": _tensor(4, 8), "m.lora_B.weight": _tensor(8, 5)}),  # another rank
        _safetensors({"m.weight": _tensor(4, 8)}),  # a module saved whole
        _safetensors({"m.lora_A.weight": _tensor(4)}),
        _safetensors({"m.lora_A.weight": _tensor(4, 8), "m.lora_B.weight": _tensor(8, 4)}, num_data_bytes=1),
    ],
)
def test_weights_that_are_none(adapter: Path, content: bytes) -> None:
    (adapter / WEIGHTS_FILE).write_bytes(content)
    with pytest.raises(InvalidRequestError, match=WEIGHTS_FILE):
        AdapterFiles.read(adapter)


def test_an_embeddings_weights_are_the_other_way_round(adapter: Path) -> None:
    tensors = {"m.embed_tokens.lora_embedding_A": _tensor(4, 1000), "m.embed_tokens.lora_embedding_B": _tensor(64, 4)}
    (adapter / WEIGHTS_FILE).write_bytes(_safetensors(tensors))
    assert AdapterFiles.read(adapter).shapes == {"m.embed_tokens": (1000, 64)}


def test_what_lies_below_the_root(adapter: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    inside = write_adapter(root / "a" / "b", 1)
    (root / "link").symlink_to(inside)
    files = root / "files"
    files.mkdir()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        (files / name).symlink_to(inside / name)  # as in the hub's cache
    paths = ("a/b", str(inside), "a/../a/b", "link", "files")
    assert len({copy(path, tmp_path / f"copy-{number}", root) for number, path in enumerate(paths)}) == 1


def test_what_does_not(adapter: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    write_adapter(root / "inside", 1)
    (root / "out").symlink_to(adapter)
    (root / "loop").symlink_to(root / "loop")
    (root / "file").write_text("")
    files = root / "files"
    files.mkdir()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        (files / name).symlink_to(adapter / name)
    pipe = write_adapter(root / "pipe", 1)
    (pipe / WEIGHTS_FILE).unlink()
    os.mkfifo(pipe / WEIGHTS_FILE)
    sibling = write_adapter(tmp_path / "root-2", 1)
    said = set()
    for path in (
        "..",
        "../adapter",
        str(adapter),
        "/etc",
        "out",
        "loop",
        "file",
        "files",
        "pipe",
        "nowhere",
        "",
        ".",
        "a\0b",
    ):
        with pytest.raises(InvalidRequestError, match="lora_root") as caught:
            copy(path, tmp_path / "copy", root)
        said.add(str(caught.value).replace(repr(path), "PATH"))
    with pytest.raises(InvalidRequestError):
        copy(sibling, tmp_path / "copy", root)
    assert len(said) == 1  # nobody learns what there is elsewhere


@pytest.mark.parametrize(
    ("settings", "limits"),
    [
        ({"lora": {"a": 8}}, (8, 1, 1)),
        ({"lora": {"a": 8, "b": 9}}, (16, 2, 2)),
        ({"lora_root": "/x"}, (16, 8, 64)),
        ({"lora_root": "/x", "lora": {"a": 40}}, (64, 8, 65)),
        ({"lora": dict.fromkeys("abcdefghijkl", 2)}, (8, 8, 12)),
        ({"lora": {"a": 8}, "engine_args": {"max_loras": 3, "max_lora_rank": 64}}, (64, 3, 3)),
        ({"lora_root": "/x", "engine_args": {"max_cpu_loras": 5}}, (16, 5, 5)),
    ],
)
def test_what_vllm_is_set_up_for(settings: dict, limits: tuple[int, int, int], tmp_path: Path) -> None:
    ranks = settings.get("lora", {})
    lora = {name: str(write_adapter(tmp_path / name, 1, rank=rank)) for name, rank in ranks.items()}
    target = TargetConfig(engine="vllm", **{**settings, "lora": lora})
    assert LoraLimits.of(target) == LoraLimits(*limits)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"max_lora_rank": 7}, "max_lora_rank 1, 8, 16"),
        ({"max_loras": 0}, "max_loras"),
        ({"max_cpu_loras": "many"}, "max_cpu_loras"),
        ({"max_cpu_loras": 2, "max_loras": 3}, "less than"),
    ],
)
def test_limits_that_cannot_be(args: dict, reason: str, adapter: Path) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        LoraLimits.of(TargetConfig(engine="vllm", lora={"a": str(adapter)}, engine_args=args))


def test_an_adapter_that_is_missing_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"target\.lora 'sql': /nowhere has no adapter_config"):
        LoraLimits.of(TargetConfig(engine="vllm", lora={"sql": "/nowhere"}))


@pytest.mark.parametrize("engine", ["torch", "simulated"])
@pytest.mark.parametrize("setting", [{"lora": {"a": "/x"}}, {"lora_root": "/x"}])
def test_other_engines_have_none(engine: str, setting: dict) -> None:
    with pytest.raises(ValueError, match=f"need target.engine vllm: {engine}"):
        Config.model_validate({"target": {"engine": engine, **setting}})


def test_engines_of_ours_refuse_requests_for_one() -> None:
    request = dataclasses.replace(new_request(), adapter="sql")
    loop: Any = SimpleNamespace()
    with pytest.raises(NotFoundError, match="no adapter 'sql'"):
        StepLoop.submit(loop, request)


@pytest.mark.parametrize("name", ["", " ", "a b", "-a", "../a", "a\n", "a" * 129, "ä"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(ValueError, match="lora"):
        Config.model_validate({"target": {"engine": "vllm", "lora": {name: "/x"}}})


def test_the_rank_vllm_is_set_up_for_is_a_trait(adapter: Path) -> None:
    pytest.importorskip("vllm")
    model = TargetModel(BASE, "bfloat16", 4096, (0,))

    def of(**target: object) -> dict[str, str]:
        return traits_of(Config.model_validate({"target": {"engine": "vllm", **target}}), model)

    assert "max_lora_rank" not in of()
    assert of(lora={"a": str(adapter)}, lora_root="/x") == of(lora_root="/y") | {"max_lora_rank": "16"}
