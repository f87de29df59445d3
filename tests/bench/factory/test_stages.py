"""The whole way from source files to a folder that transformers loads."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.factory.context import Context
from bench.factory.options import TrainingOptions
from bench.factory.stages import run


def test_the_exported_pair_loads_with_transformers(library_context: Context) -> None:
    run(library_context)
    for name in ("target", "draft"):
        folder = library_context.workspace.export(name)
        model = AutoModelForCausalLM.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert model.dtype == torch.bfloat16
        assert model.config.eos_token_id == tokenizer.eos_token_id == 0
        prompt = tokenizer("def f(", return_tensors="pt")["input_ids"]
        assert model(prompt).logits.shape == (*prompt.shape, 300)
        card = (folder / "README.md").read_text()
        assert "license: apache-2.0" in card


def test_resuming_skips_what_is_done(library_context: Context, capsys: pytest.CaptureFixture[str]) -> None:
    first = dataclasses.replace(library_context.options, stages=("corpus", "tokenizer", "target"))
    run(dataclasses.replace(library_context, options=first))
    facts = library_context.workspace.training_facts("target")
    written = facts.stat().st_mtime_ns
    run(dataclasses.replace(library_context, options=dataclasses.replace(first, resume=True)))
    assert facts.stat().st_mtime_ns == written
    assert capsys.readouterr().err.count("already done") == 3
    assert json.loads(facts.read_text())["outcome"]["steps"] == 4


def test_a_stage_says_what_it_misses(library_context: Context) -> None:
    options = dataclasses.replace(library_context.options, stages=("draft",))
    with pytest.raises(ValueError, match="earlier stages"):
        run(dataclasses.replace(library_context, options=options))


def test_unknown_stages_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown stage"):
        TrainingOptions(out=tmp_path, stages=("bake",))
