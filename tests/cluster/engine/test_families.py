"""Every family against `transformers`, with PyTorch's operators and with the kernels."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.engine.batch import Segment
from cluster.engine.cpu_kernels import has_kernels
from cluster.engine.cpu_model import CpuModel
from cluster.engine.loader import load_model
from cluster.engine.model import Model, TorchModel
from cluster.engine.runner import ModelRunner

from .checkpoints import CHECKPOINTS

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS = 4, 64
TOKENS = random.Random(1).choices(range(1, 512), k=90)
TABLE = random.Random(2).sample(range(NUM_BLOCKS), NUM_BLOCKS)


both_forms = pytest.mark.parametrize(
    "form",
    [
        TorchModel,
        pytest.param(CpuModel, marks=pytest.mark.skipif(not has_kernels(), reason="the kernels do not run here")),
    ],
)
every_checkpoint = pytest.mark.parametrize("options", CHECKPOINTS.values(), ids=CHECKPOINTS.keys())


def new_runner(folder: Path, form: type[Model]) -> ModelRunner:
    model = load_model(folder, torch.float32, CPU, form=form)
    return ModelRunner(model, BLOCK_SIZE, NUM_BLOCKS)


def transformers_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@both_forms
@every_checkpoint
@torch.inference_mode()
def test_logits_equal_those_of_transformers(
    options: dict[str, Any], form: type[Model], tiny_folder: Callable[..., Path]
) -> None:
    """As a whole, and a prompt in chunks, decode steps and a verify segment."""
    folder = tiny_folder(**options)
    expected = transformers_model(folder)(torch.tensor([TOKENS])).logits[0]
    for chunks in ([90], [31, 1, 1, 6, 50, 1]):
        runner, start, rows = new_runner(folder, form), 0, []
        for chunk in chunks:
            rows.append(runner.run([Segment(TOKENS[start : start + chunk], start, TABLE, num_logits=chunk)]))
            start += chunk
        torch.testing.assert_close(torch.cat(rows), expected, rtol=1e-4, atol=1e-4)


@both_forms
@every_checkpoint
def test_greedy_tokens_equal_those_of_generate(
    options: dict[str, Any], form: type[Model], tiny_folder: Callable[..., Path]
) -> None:
    folder, prompt = tiny_folder(**options), TOKENS[:20]
    generated = transformers_model(folder).generate(
        torch.tensor([prompt]), max_new_tokens=40, min_new_tokens=40, do_sample=False, pad_token_id=0
    )
    runner, tokens = new_runner(folder, form), list(prompt)
    computed = 0
    while len(tokens) < 60:
        logits = runner.run([Segment(tokens[computed:], computed, TABLE, num_logits=1)])[0].clone()
        logits[0] = -torch.inf  # the end of the sequence, which `generate` was asked to put off
        computed = len(tokens)
        tokens.append(int(logits.argmax()))
    assert tokens == generated[0].tolist()
