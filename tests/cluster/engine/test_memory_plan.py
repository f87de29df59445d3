"""The plan against the reference's table of an 80 GB card, and against models that are there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from cluster.engine.kv_cache import block_bytes
from cluster.engine.memory_plan import (
    GB,
    Budget,
    Memory,
    PlannedModel,
    describe,
    num_speculative_blocks,
    plan_pair,
)
from cluster.engine.model_config import ModelConfig
from cluster.errors import ConfigurationError
from cluster.model_folder import resolve_model_folder

K = 5


def plan(target: str, draft: str, gigabytes: float = 80.0, utilization: float = 0.9) -> Budget:
    memory = Memory(gigabytes, utilization, block_size=16)
    (budget,) = plan_pair(PlannedModel.parse(target), PlannedModel.parse(draft), K, memory)
    return budget


@pytest.mark.parametrize(
    ("target", "draft", "weights_gb", "left_gb"),
    [
        ("70B:fp16", "7B:fp16", 153.5, None),
        ("70B:int8", "7B:int4", 73.5, 6.5),
        ("70B:int4", "7B:int4", 38.5, 41.5),
        ("13B:fp16", "1.5B:int4", 27.0, 53.0),
        ("13B:int4", "1.5B:int4", 7.3, 72.7),
    ],
)
def test_the_table_of_the_reference(target: str, draft: str, weights_gb: float, left_gb: float | None) -> None:
    budget = plan(target, draft)
    assert budget.weight_bytes / GB == pytest.approx(weights_gb, abs=0.5)
    if left_gb is None:
        assert budget.left_bytes < 0
        assert budget.largest_batch(4096) == 0
    else:
        assert budget.left_bytes / GB == pytest.approx(left_gb, abs=0.3)


@pytest.mark.parametrize(
    ("target", "draft", "batch"),
    # By the formula of KV bytes; the reference says 1-2, 8-16, 32+ and 128+, the last two of shorter contexts.
    [("70B:int8", "7B:int4", 1), ("70B:int4", "7B:int4", 10), ("13B", "1.5B:int4", 13), ("13B:int4", "1.5B:int4", 18)],
)
def test_the_largest_batch_of_4096_tokens(target: str, draft: str, batch: int) -> None:
    budget = plan(target, draft)
    assert budget.largest_batch(4096) == batch

    def needed(num_seqs: int) -> int:
        return sum(
            budget.context_bytes(tenant, num_seqs, 4096) + budget.speculative_bytes(tenant, num_seqs)
            for tenant in budget.tenants
        )

    assert needed(batch) <= budget.kv_cache_bytes < needed(batch + 1)


@pytest.mark.parametrize(
    ("size", "kv_bytes"), [("70B", 327_680), ("7B", 524_288), ("13B", 819_200), ("1.5B", 28_672), ("8B", 131_072)]
)
def test_kv_bytes_of_a_token(size: str, kv_bytes: int) -> None:
    """2 * layers * KV heads * head size * 2, whatever the weights are in."""
    for dtype in ("fp16", "int8", "int4"):
        assert PlannedModel.parse(f"{size}:{dtype}").kv_bytes_per_token == kv_bytes


def test_speculative_slots_of_the_reference() -> None:
    assert num_speculative_blocks(256, 5, 16) == 80
    target, draft = plan("70B:int8", "7B:int4").tenants
    budget = plan("70B:int8", "7B:int4")
    assert budget.speculative_blocks(target, 256) == 80
    assert budget.speculative_blocks(draft, 256) == 192  # a draft runs ahead by 2k + 2


def test_a_draft_on_a_gpu_of_its_own() -> None:
    """The cluster of the reference: 4 A100 for the target, an A10G for the draft."""
    target, draft = plan_pair(
        PlannedModel.parse("70B"), PlannedModel.parse("7B"), K, Memory(4 * 80, 0.9, 16), Memory(24, 0.9, 16)
    )
    assert (target.left_bytes / GB, draft.left_bytes / GB) == (pytest.approx(180.0), pytest.approx(10.0))
    assert [tenant.role for tenant in (*target.tenants, *draft.tenants)] == ["target", "draft"]


@pytest.mark.parametrize("name", ["outrider-target-12m", "outrider-draft-2m"])
def test_a_models_folder_gives_its_own_numbers(name: str) -> None:
    folder = resolve_model_folder(name)
    with safe_open(folder / "model.safetensors", framework="pt") as shard:
        num_parameters = sum(shard.get_tensor(key).numel() for key in shard.keys())  # noqa: SIM118 (not a dict)
    for spec in (name, str(folder)):
        model = PlannedModel.parse(f"{spec}:bf16")
        assert model.num_parameters == num_parameters
        assert model.weight_bytes == 2 * num_parameters
        expected = block_bytes(ModelConfig.from_folder(folder), 16, torch.bfloat16)
        assert 16 * model.kv_bytes_per_token == expected


def test_recorded_steps_are_taken_from_what_the_cache_gets() -> None:
    models = PlannedModel.parse("8B"), PlannedModel.parse("1B")
    (without,) = plan_pair(*models, K, Memory(24, 0.9, 16))
    (budget,) = plan_pair(*models, K, Memory(24, 0.9, 16, recorded_rows=64, recorded_context=8192))
    recorded = [budget.recorded_bytes(tenant) for tenant in budget.tenants]
    assert all(0.05 * GB < num_bytes < GB for num_bytes in recorded)
    assert without.left_bytes - budget.left_bytes == pytest.approx(sum(recorded))
    assert "recorded steps" in describe(budget, 8192, 1)
    assert "recorded steps" not in describe(without, 8192, 1)
    # Of a size alone not enough is known.
    assert PlannedModel.parse("34B/48x8x128").recorded_bytes(64, 8192, 16) == 0


def test_a_size_with_its_shape() -> None:
    model = PlannedModel.parse("34B/48x8x128:int4")
    assert (model.weight_bytes, model.kv_bytes_per_token) == (17e9, 2 * 48 * 8 * 128 * 2)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("70B:int5", "int5"),
        ("34B", "34B/LAYERSxKV_HEADSxHEAD_SIZE"),
        ("34B/0x8x128", "neither"),
        ("no-such-model", "neither"),
    ],
)
def test_what_cannot_be_planned_is_said(spec: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        PlannedModel.parse(spec)


def test_a_folder_without_a_model_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no config\.json"):
        PlannedModel.parse(str(tmp_path))


def test_a_draft_made_of_its_target_takes_what_the_target_does_not_have() -> None:
    target = PlannedModel.parse("outrider-target-12m:bf16")
    config = ModelConfig.from_folder(resolve_model_folder("outrider-target-12m"))
    quantised = target.drafting_in_process()
    ends = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2) + config.hidden_size
    assert quantised.weight_bytes == (target.num_parameters - ends) / 2
    assert quantised.kv_bytes_per_token == target.kv_bytes_per_token
    assert PlannedModel.parse("70B").drafting_in_process().weight_bytes == 35e9  # its ends are not known


def test_the_table_that_is_printed() -> None:
    lines = describe(plan("70B:int8", "7B:int4"), context=4096, num_seqs=1).splitlines()
    cells = {line[:34].strip(): line[34:].split() for line in lines[1:]}
    assert cells["weights"] == ["70.0", "GB", "3.5", "GB", "73.5", "GB"]
    assert cells["left of 80 GB"] == ["6.5", "GB"]
    assert cells["slots / blocks of 16"] == ["5", "/", "1", "12", "/", "1"]
    assert cells["largest batch at 4096 tokens"] == ["1"]
    assert "74.0 GB short" in describe(plan("70B", "7B"), context=4096, num_seqs=1)


@pytest.mark.parametrize(
    ("spec", "gigabytes"),
    # The head has 151,936 * 896 = 0.136e9 of the parameters, 2 bytes each.
    [("0.5B:int8", 0.5 + 0.136), ("0.5B:int4", 0.25 + 0.75 * 0.2723), ("0.5B:bf16", 1.0), ("0.5B:fp32", 2.0)],
)
def test_a_quantised_model_may_have_its_head_in_16_bits(spec: str, gigabytes: float) -> None:
    assert PlannedModel.parse(spec).with_wide_head().weight_bytes / GB == pytest.approx(gigabytes, rel=1e-3)
