"""The whole way from source files to a folder that transformers loads."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cluster.training import sources
from cluster.training.models import ModelShape
from cluster.training.options import TrainingOptions
from cluster.training.runtime import Runtime
from cluster.training.stages import Context, run
from cluster.training.workspace import Workspace

TINY = {
    "target_tokens": 256,
    "draft_tokens": 256,
    "batch_size": 2,
    "sequence_length": 32,
    "evaluation_tokens": 128,
    "samples": 4,
    "sample_batch_size": 4,
    "acceptance_prompts": 3,
}


@pytest.fixture
def context(
    tmp_path: Path,
    library: Path,
    tiny_shape: ModelShape,
    runtime: Runtime,
    monkeypatch: pytest.MonkeyPatch,
) -> Context:
    root = dataclasses.replace(sources.standard_library(), directory=library)
    monkeypatch.setattr(sources, "standard_library", lambda: root)
    shape = dataclasses.replace(tiny_shape, vocab_size=300)
    options = TrainingOptions(out=tmp_path / "out", **TINY)  # type: ignore[arg-type]
    return Context(options, Workspace(options.out), runtime, shape, shape)


def test_the_exported_pair_loads_with_transformers(context: Context) -> None:
    run(context)
    for name in ("target", "draft"):
        folder = context.workspace.export(name)
        model = AutoModelForCausalLM.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert model.dtype == torch.bfloat16
        assert model.config.eos_token_id == tokenizer.eos_token_id == 0
        prompt = tokenizer("def f(", return_tensors="pt")["input_ids"]
        assert model(prompt).logits.shape == (*prompt.shape, 300)
        card = (folder / "README.md").read_text()
        assert "license: apache-2.0" in card


def test_resuming_skips_what_is_done(context: Context, capsys: pytest.CaptureFixture[str]) -> None:
    first = dataclasses.replace(context.options, stages=("corpus", "tokenizer", "target"))
    run(dataclasses.replace(context, options=first))
    facts = context.workspace.training_facts("target")
    written = facts.stat().st_mtime_ns
    run(dataclasses.replace(context, options=dataclasses.replace(first, resume=True)))
    assert facts.stat().st_mtime_ns == written
    assert capsys.readouterr().err.count("already done") == 3
    assert json.loads(facts.read_text())["outcome"]["steps"] == 4


def test_a_stage_says_what_it_misses(context: Context) -> None:
    options = dataclasses.replace(context.options, stages=("draft",))
    with pytest.raises(ValueError, match="earlier stages"):
        run(dataclasses.replace(context, options=options))


def test_unknown_stages_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown stage"):
        TrainingOptions(out=tmp_path, stages=("bake",))
