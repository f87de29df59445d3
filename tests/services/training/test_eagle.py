"""A head learns its target's hidden states, drafts as vLLM will let it draft, and is written as vLLM reads it."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaForCausalLM

from services.training.batches import StreamWindows, evaluation_batches
from services.training.context import Context
from services.training.eagle import TrainableHead, build_head, draft_steps, eagle_loss, load_head, save_head
from services.training.models import ModelShape, build_model
from services.training.options import TrainingOptions
from services.training.runtime import Runtime
from services.training.stages import run
from services.training.trainer import Recipe, Schedule, Trainer, next_token_loss
from services.training.workspace import Workspace

RECIPE = Recipe(steps=60, batch_size=8, sequence_length=16, learning_rate=1e-2, seed=3)
SHAPES = {
    "fc.weight": [32, 64],
    "layers.0.self_attn.q_proj.weight": [32, 32],
    "layers.0.self_attn.k_proj.weight": [16, 32],
    "layers.0.self_attn.v_proj.weight": [16, 32],
    "layers.0.self_attn.o_proj.weight": [32, 32],
    "layers.0.post_attention_layernorm.weight": [32],
    "layers.0.mlp.gate_proj.weight": [64, 32],
    "layers.0.mlp.up_proj.weight": [64, 32],
    "layers.0.mlp.down_proj.weight": [32, 64],
}


@pytest.fixture
def target(tiny_shape: ModelShape) -> LlamaForCausalLM:
    return build_model(tiny_shape, 0).train(False)


@pytest.fixture
def head(target: LlamaForCausalLM) -> TrainableHead:
    return build_head(target.config, 64, 1)


def test_training_brings_a_head_closer_to_its_target(
    tmp_path: Path, target: LlamaForCausalLM, head: TrainableHead, stream: Tensor, runtime: Runtime
) -> None:
    windows = StreamWindows(stream, RECIPE.batch_size, RECIPE.sequence_length, RECIPE.seed)
    held_out = evaluation_batches(stream, 8, RECIPE.sequence_length, 512)
    rest = (windows, held_out, RECIPE, Schedule(), runtime)
    Trainer("target", target, next_token_loss, *rest, tmp_path / "target", tmp_path / "log.jsonl").train()
    target.train(False).requires_grad_(False)
    trainer = Trainer("eagle", head, eagle_loss(target, 2), *rest, tmp_path / "eagle", tmp_path / "log.jsonl")
    before = trainer.evaluate()
    assert trainer.train().held_out_loss < 0.5 * before


@torch.no_grad()
def test_a_later_step_sees_the_text_so_far_and_what_it_foretold_itself(
    target: LlamaForCausalLM, head: TrainableHead, stream: Tensor
) -> None:
    """As a drafter does that runs one position at a time, with the text's tokens as the drafts."""
    tokens = stream[:40].long()[None]
    embeddings = target.model.embed_tokens(tokens)
    hidden_states = target.model(input_ids=tokens, use_cache=False).last_hidden_state
    steps = draft_steps(head, embeddings, hidden_states, 3)
    for position in (0, 7, 36):
        known = hidden_states[:, : position + 1]
        for depth, states in enumerate(steps):
            foretold, _ = head(embeddings[:, 1 : position + depth + 2], known)
            torch.testing.assert_close(states[:, position], foretold[:, -1])
            known = torch.cat([known, foretold[:, -1:]], dim=1)


def test_a_saved_head_has_what_vllm_loads_and_nothing_that_it_takes_from_the_target(
    tmp_path: Path, head: TrainableHead, stream: Tensor
) -> None:
    inputs = torch.randn(1, 5, 32)
    save_head(head, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == SHAPES
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["EagleLlamaForCausalLM"]
    assert config["num_hidden_layers"] == 1
    loaded = load_head(tmp_path, torch.device("cpu"))
    torch.testing.assert_close(loaded(inputs, inputs)[0], head.float()(inputs, inputs)[0])


def test_a_head_is_made_for_a_target_that_is_there(
    tmp_path: Path, library_context: Context, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = library_context
    run(dataclasses.replace(pair, options=dataclasses.replace(pair.options, stages=("corpus", "tokenizer", "target"))))
    folder = tmp_path / "trained"
    shutil.copytree(pair.workspace.model("target"), folder)
    shutil.copytree(pair.workspace.tokenizer, folder, dirs_exist_ok=True)
    sizes = {
        name: getattr(pair.options, name)
        for name in ("sequence_length", "evaluation_tokens", "sample_batch_size", "acceptance_prompts")
    }
    options = TrainingOptions(
        out=tmp_path / "eagle", what="eagle", target=str(folder), eagle_tokens=256, eagle_samples=4, **sizes
    )
    context = dataclasses.replace(pair, options=options, workspace=Workspace(options.out))
    run(context)
    export = context.workspace.export("eagle")
    assert {path.name for path in export.iterdir()} == {"README.md", "config.json", "model.safetensors"}
    assert "tokens per round" in (export / "README.md").read_text()
    run(dataclasses.replace(context, options=dataclasses.replace(options, resume=True)))
    assert capsys.readouterr().err.count("already done") == 6


def test_a_target_that_is_not_there_is_named(tmp_path: Path, library_context: Context) -> None:
    options = TrainingOptions(out=tmp_path, what="eagle", target="no-such-model", stages=("adopt",))
    with pytest.raises(ValueError, match="no-such-model"):
        run(dataclasses.replace(library_context, options=options, workspace=Workspace(tmp_path)))
