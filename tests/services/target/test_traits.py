"""Tests that traits cover all that makes two targets answer differently, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cluster.config.file import load_config
from cluster.engine.cpu_kernels import InstructionSet, has_kernels
from cluster.targets.base import TargetModel
from services.target import traits
from services.target.traits import ENGINE_VERSION, traits_of

needs_kernels = pytest.mark.skipif(not has_kernels(), reason="PyTorch's operators would run")
MODEL = TargetModel("outrider-target-12m", "bfloat16", 4096, (0, 2))


def of(*overrides: str, model: TargetModel = MODEL) -> dict[str, str]:
    return traits_of(load_config(overrides=overrides), model)


def differing(first: dict[str, str], second: dict[str, str]) -> set[str]:
    return {name for name in first.keys() | second.keys() if first.get(name) != second.get(name)}


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("target.model=outrider-draft-2m", {"weights", "architecture"}),
        ("target.quantization=int8", {"quantization"}),
        ("target.quantization=int4", {"quantization"}),
        ("target.numerics=invariant", {"numerics"}),
        ("speculation.acceptance=rejection", {"acceptance"}),
    ],
)
def test_what_changes_an_answer_is_named(override: str, named: set[str]):
    assert named <= differing(of(), of(override)) <= named | {"engine", "processor"}  # with portable kernels: see below


def test_dtype_and_ends_are_those_of_the_model_that_runs():
    model = TargetModel("outrider-target-12m", "float32", 4096, (0,))
    assert differing(of(), of(model=model)) >= {"dtype", "eos_token_ids"}


def test_the_groups_of_int4_count_and_those_of_int8_do_not_exist():
    int4 = "target.quantization=int4"
    assert differing(of(int4), of(int4, "target.quantization_group_size=128")) == {"quantization"}
    int8 = "target.quantization=int8"
    assert of(int8) == of(int8, "target.quantization_group_size=128")


@pytest.mark.parametrize(
    "override",
    [
        "speculation.acceptance=greedy",
        "speculation.num_speculative_tokens=7",
        "draft.model=other",
        "target.max_num_seqs=3",
        "target.addresses=[a:1]",
    ],
)
def test_what_changes_no_answer_does_not_count(override: str):
    assert of(override) == of()


def test_the_engine_says_its_version():
    assert of()["engine"].endswith(str(ENGINE_VERSION))


@needs_kernels
def test_kernels_of_other_instructions_round_otherwise_except_in_float32(monkeypatch: pytest.MonkeyPatch):
    in_float32 = TargetModel("outrider-target-12m", "float32", 4096, (0, 2))
    best, exact = of(), of(model=in_float32)
    monkeypatch.setattr(InstructionSet, "is_supported", True)  # of every set
    for name in ("portable", "avx512_bf16", "amx"):
        monkeypatch.setenv("OUTRIDER_CPU_ISA", name)
        assert of()["kernels"] == f"CpuModel, {name}"
        assert differing(of(), best) <= {"kernels", "engine", "processor"}
        assert of(model=in_float32) == exact


@needs_kernels
def test_portable_kernels_compute_the_same_on_every_processor(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OUTRIDER_CPU_ISA", "portable")
    here = of()
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    monkeypatch.setattr(traits, "_processor", lambda device: "another")
    assert of() == here
    # A draw of this kind depends on PyTorch's softmax too.
    assert differing(of("speculation.acceptance=rejection"), here) == {"acceptance", "engine", "processor"}


@needs_kernels
def test_kernels_that_compute_other_bits_are_like_no_others(monkeypatch: pytest.MonkeyPatch):
    here = of()
    monkeypatch.setattr(traits, "is_portable", lambda: False)
    assert len({here["kernels"], of()["kernels"], of()["kernels"]}) == 3


def test_simulated_targets_differ_by_their_vocabulary_alone():
    simulated = "target.engine=simulated"
    assert of(simulated, "target.model=does-not-exist") == of(simulated, "simulation.target_step_ms=[[1,1]]")
    other = TargetModel("simulated", "simulated", 100, ())
    assert differing(of(simulated), of(simulated, model=other)) == {"vocab_size"}
    assert of(simulated)["engine"] == "simulated"


def test_processors_are_told_apart_by_what_decides_kernels(tmp_path: Path):
    path = tmp_path / "cpuinfo"
    path.write_text("processor : 0\nflags\t\t: fpu avx2 avx512f amx_bf16\n\nprocessor : 1\nflags : fpu\n")
    assert traits._cpu_flags(path) == {"fpu", "avx2", "avx512f", "amx_bf16"}
    path.write_text("processor : 0\nFeatures : fp asimd\n")
    assert traits._cpu_flags(path) == {"fp", "asimd"}
    assert traits._cpu_flags(tmp_path / "none") == set()
