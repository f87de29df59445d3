from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.config.workers import WorkerConfig
from cluster.engine.batch import Segment
from cluster.engine.cpu_kernels import has_kernels
from cluster.engine.loader import LoadedModel, load_model, resolve_device, resolve_dtype
from cluster.engine.model_config import ModelConfig
from cluster.engine.runner import ModelRunner, kv_cache_budget
from cluster.errors import ConfigurationError

CPU = torch.device("cpu")
needs_kernels = pytest.mark.skipif(not has_kernels(), reason="the kernels do not run here")


@pytest.fixture
def folder(tiny_llama: Callable[..., Path], tmp_path: Path) -> Path:
    """A model folder to spoil."""
    return copytree(tiny_llama(), tmp_path / "model")


@pytest.fixture
def sharded(tiny_llama: Callable[..., Path], tmp_path: Path) -> Path:
    return copytree(tiny_llama(max_shard_size="100KB"), tmp_path / "sharded")


def change_json(path: Path, **values: Any) -> None:
    """Sets keys; those that are set to ... are taken out."""
    merged = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in merged.items() if value is not ...}))


def load(folder: Path) -> LoadedModel:
    return load_model(folder, torch.float32, CPU)


class TestConfig:
    @pytest.mark.parametrize("text", [None, "{"])
    def test_an_unreadable_config_is_named(self, folder: Path, text: str | None) -> None:
        (folder / "config.json").unlink()
        if text is not None:
            (folder / "config.json").write_text(text)
        with pytest.raises(ConfigurationError, match=r"cannot read .*config\.json"):
            load(folder)

    def test_what_older_folders_leave_out_is_derived(self, folder: Path) -> None:
        change_json(folder / "config.json", head_dim=..., num_key_value_heads=..., tie_word_embeddings=...)
        config = ModelConfig.from_folder(folder)
        assert (config.head_dim, config.num_kv_heads, config.tie_word_embeddings) == (16, 4, False)

    @pytest.mark.parametrize(
        ("in_config", "in_generation_config", "expected"),
        [
            (0, ..., (0,)),
            ([0, 5], ..., (0, 5)),
            (0, [3, 7, 0], (0, 3, 7)),
            (0, 4, (0, 4)),
            (None, ..., ()),
        ],
    )
    def test_every_way_a_model_may_end(
        self, folder: Path, in_config: Any, in_generation_config: Any, expected: tuple[int, ...]
    ) -> None:
        change_json(folder / "config.json", eos_token_id=in_config)
        change_json(folder / "generation_config.json", eos_token_id=in_generation_config)
        assert ModelConfig.from_folder(folder).eos_token_ids == expected

    def test_without_a_generation_config_the_config_says_how_it_ends(self, folder: Path) -> None:
        (folder / "generation_config.json").unlink()
        assert ModelConfig.from_folder(folder).eos_token_ids == (0,)


class TestWeights:
    def test_a_missing_weight_is_named(self, folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        del weights["model.layers.1.mlp.up_proj.weight"]
        save_file(weights, folder / "model.safetensors")
        with pytest.raises(ConfigurationError, match=r"no weight named 'model\.layers\.1\.mlp\.up_proj\.weight'"):
            load(folder)

    def test_a_wrong_shape_is_named_with_both_shapes(self, folder: Path) -> None:
        change_json(folder / "config.json", intermediate_size=96)
        with pytest.raises(ConfigurationError, match=r"gate_proj.*\(128, 64\).*\(96, 64\)"):
            load(folder)

    def test_an_untied_head_must_be_there(self, tiny_llama: Callable[..., Path], tmp_path: Path) -> None:
        folder = copytree(tiny_llama(tied=True), tmp_path / "model")
        change_json(folder / "config.json", tie_word_embeddings=False)
        with pytest.raises(ConfigurationError, match=r"'lm_head\.weight'"):
            load(folder)

    @pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
    def test_the_text_half_of_a_multimodal_folder(self, prefix: str, folder: Path) -> None:
        plain = load(folder)
        text = json.loads((folder / "config.json").read_text())
        both = {"architectures": ["SeesAndWrites"], "text_config": text, "vision_config": {}, "eos_token_id": 0}
        (folder / "config.json").write_text(json.dumps(both))
        tensors = {
            name.replace("model.", prefix): tensor for name, tensor in load_file(folder / "model.safetensors").items()
        }
        save_file(tensors | {"vision_tower.proj.weight": torch.ones(2)}, folder / "model.safetensors")
        segment = [Segment([5, 6, 7], 0, [0], 1)]
        logits = [ModelRunner(model, 4, 4).run(segment).clone() for model in (plain, load(folder))]
        assert torch.equal(*logits)

    def test_no_weights_at_all(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        with pytest.raises(ConfigurationError, match=r"no model\.safetensors"):
            load(folder)

    def test_a_file_that_was_cut_off_is_named(self, folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:1000])
        with pytest.raises(ConfigurationError, match=r"cannot read .*model\.safetensors"):
            load(folder)

    def test_a_missing_shard_is_named(self, sharded: Path) -> None:
        shards = sorted(sharded.glob("model-*.safetensors"))
        assert len(shards) > 2
        shards[1].unlink()
        with pytest.raises(ConfigurationError, match=shards[1].name):
            load(sharded)

    def test_an_unreadable_index_of_shards_is_named(self, sharded: Path) -> None:
        (sharded / "model.safetensors.index.json").write_text("{}")
        with pytest.raises(ConfigurationError, match=r"cannot read .*index\.json"):
            load(sharded)

    def test_a_missing_bias_is_named(self, folder: Path) -> None:
        change_json(folder / "config.json", attention_bias=True)
        with pytest.raises(ConfigurationError, match=r"'model\.layers\.0\.self_attn\.q_proj\.bias'"):
            load(folder)


class TestProgress:
    @pytest.mark.parametrize("options", [{}, {"max_shard_size": "100KB"}], ids=["one file", "shards"])
    def test_counts_embedding_layers_and_head(self, options: dict[str, Any], tiny_llama: Callable[..., Path]) -> None:
        told: list[tuple[int, int]] = []
        load_model(tiny_llama(**options), torch.float32, CPU, lambda done, total: told.append((done, total)))
        assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]

    def test_comes_to_its_end_when_the_shards_hold_more_than_is_read(self, sharded: Path) -> None:
        """Old Llama folders hold rotary tables; a folder with tied embeddings may hold the head all the same."""
        change_json(sharded / "config.json", tie_word_embeddings=True)
        told: list[tuple[int, int]] = []
        load_model(sharded, torch.float32, CPU, lambda done, total: told.append((done, total)))
        assert told[-1] == (4, 4)


@pytest.fixture(scope="module")
def large(tiny_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 MB in two shards; the largest product takes 8."""
    folder = copytree(tiny_llama(), tmp_path_factory.mktemp("large") / "model")
    (folder / "model.safetensors").unlink()
    hidden, intermediate, num_layers = 512, 2048, 6
    change_json(
        folder / "config.json",
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
    )
    shapes = {"model.embed_tokens": (512, hidden), "lm_head": (512, hidden), "model.norm": (hidden,)}
    for layer in (f"model.layers.{index}" for index in range(num_layers)):
        shapes |= {f"{layer}.self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
        shapes |= {f"{layer}.mlp.{name}_proj": (intermediate, hidden) for name in ("gate", "up")}
        shapes |= {f"{layer}.{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
        shapes[f"{layer}.mlp.down_proj"] = (hidden, intermediate)
    weights = {f"{name}.weight": torch.ones(shape) for name, shape in shapes.items()}
    weight_map = {name: f"{index % 2}.safetensors" for index, name in enumerate(weights)}
    for shard in set(weight_map.values()):
        save_file({name: weights[name] for name, file in weight_map.items() if file == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("form", ["torch", pytest.param("kernels", marks=needs_kernels)])
def test_loading_takes_the_copy_of_one_weight_beside_the_model(large: Path, form: str) -> None:
    """In a process of its own, where the allocator hands back at once what is freed."""
    completed = subprocess.run(
        [sys.executable, "-m", "tests.cluster.engine.loading_memory", str(large), form],
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "100000"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        check=True,
    )
    memory = json.loads(completed.stdout)
    model_bytes = sum(file.stat().st_size for file in large.glob("*.safetensors"))
    largest_weight = 2 * 2048 * 512 * 4  # gate and up are one product
    print(
        f"model {model_bytes / 1e6:.1f} MB, {memory['after'] / 1e6:.1f} MB loaded, peak {memory['peak'] / 1e6:.1f} MB"
    )
    assert model_bytes > 100e6
    assert memory["after"] < model_bytes + 4e6
    assert memory["peak"] < model_bytes + largest_weight + 4e6


class TestRunner:
    def worker(self, folder: Path, **settings: Any) -> WorkerConfig:
        return WorkerConfig(model=str(folder), device="cpu", dtype="float32", **settings)

    def test_the_cache_is_sized_by_its_bytes(self, tiny_llama: Callable[..., Path]) -> None:
        # 2 (keys and values) * 2 layers * 2 heads * 32 * 4 bytes a token
        bytes_per_block = 2 * 2 * 2 * 32 * 4 * 16
        config = self.worker(tiny_llama(), kv_cache_bytes=10 * bytes_per_block + 5)
        assert ModelRunner.from_config(config).blocks.num_blocks == 10

    def test_a_cache_without_room_for_a_block_says_what_it_takes(self, tiny_llama: Callable[..., Path]) -> None:
        config = self.worker(tiny_llama(), kv_cache_bytes=100)
        with pytest.raises(ConfigurationError, match="at least 16384"):
            ModelRunner.from_config(config)

    def test_an_automatic_cache_takes_its_share_of_what_the_weights_leave_of_a_gpu(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40 * 10**9, 80 * 10**9))
        config = self.worker(Path("anywhere"), memory_utilization=0.75)
        on_gpu = SimpleNamespace(weights=SimpleNamespace(device=torch.device("cuda")))
        assert kv_cache_budget(config, cast("LoadedModel", on_gpu), 10**9) == (60 - 40 - 1) * 10**9

    def test_prefix_caching_can_be_switched_off(self, tiny_llama: Callable[..., Path]) -> None:
        for is_enabled in (True, False):
            config = self.worker(tiny_llama(), kv_cache_bytes=2**18, enable_prefix_caching=is_enabled)
            blocks = ModelRunner.from_config(config).blocks
            table = blocks.allocate(1)
            assert table is not None
            blocks.cache(table, list(range(16)), 16)
            blocks.free(table)
            assert blocks.num_cached_blocks == int(is_enabled)

    def test_auto_dtype_depends_on_the_device_and_the_kernels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert resolve_dtype("auto", CPU) is (torch.bfloat16 if has_kernels() else torch.float32)
        monkeypatch.setenv("OUTRIDER_CPU_ISA", "none")
        assert resolve_dtype("auto", CPU) is torch.float32
        assert resolve_dtype("auto", torch.device("cuda")) is torch.bfloat16
        assert resolve_dtype("bfloat16", CPU) is torch.bfloat16

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_a_gpu_that_is_not_there_is_said(self) -> None:
        assert resolve_device("auto") == CPU
        with pytest.raises(ConfigurationError, match="no GPU"):
            resolve_device("cuda")


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_pytorchs_operators_run_where_the_kernels_do_not(dtype: str) -> None:
    """oneDNN takes instructions up to AVX2, as on such a processor, and packs no bfloat16 then."""
    code = (
        "import logging, torch; logging.basicConfig()\n"
        "from cluster.config.workers import WorkerConfig; from cluster.engine.batch import Segment\n"
        "from cluster.engine.runner import ModelRunner\n"
        "assert not torch.ops.mkldnn._is_mkldnn_bf16_supported()\n"
        f"runner = ModelRunner.from_config(WorkerConfig(model='outrider-draft-2m', dtype={dtype!r}, device='cpu'))\n"
        "print(runner.model.dtype, runner.run([Segment([1, 2, 3], 0, [0], num_logits=1)]).argmax().item())"
    )
    environment = os.environ | {"OUTRIDER_CPU_ISA": "none", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.startswith("torch.float32" if dtype == "auto" else "torch.bfloat16")
    assert run.stderr.count("PyTorch's operators compute on this CPU") == 1
    assert "OUTRIDER_CPU_ISA is none: unset it" in run.stderr
