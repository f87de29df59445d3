"""Training improves a head; engines load the saved head and draft the same tokens as in training."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaForCausalLM

from bench.factory.batches import StreamWindows, evaluation_batches
from bench.factory.context import Context
from bench.factory.continuation import gumbel_noise
from bench.factory.distill import eagle_loss
from bench.factory.models import ModelShape, build_model
from bench.factory.options import TrainingOptions
from bench.factory.runtime import Runtime
from bench.factory.stages import run
from bench.factory.trainer import Schedule, Trainer, next_token_loss
from bench.factory.workspace import Workspace
from cluster.engine.model_config import ModelConfig
from services.training.eagle import (
    TrainableEagle,
    build_head,
    captured_layers,
    captured_states,
    draft_steps,
    load_head,
    save_head,
)
from services.training.heads import TargetEnds, coupled_acceptance
from services.training.recipe import Recipe
from tests.cluster.drafters.eagle_pair import FORMS, K, Pair

RECIPE = Recipe(steps=60, batch_size=8, sequence_length=16, learning_rate=1e-2, seed=3)
NUM_DRAFTABLE = 310
SHAPES = {
    "fc.weight": [32, 32],  # of the state after the first of two layers
    "midlayer.input_layernorm.weight": [32],
    "midlayer.hidden_norm.weight": [32],
    "midlayer.self_attn.q_proj.weight": [32, 64],
    "midlayer.self_attn.k_proj.weight": [16, 64],
    "midlayer.self_attn.v_proj.weight": [16, 64],
    "midlayer.self_attn.o_proj.weight": [32, 32],
    "midlayer.post_attention_layernorm.weight": [32],
    "midlayer.mlp.gate_proj.weight": [64, 32],
    "midlayer.mlp.up_proj.weight": [64, 32],
    "midlayer.mlp.down_proj.weight": [32, 64],
    "norm.weight": [32],
    "lm_head.weight": [NUM_DRAFTABLE, 32],
    "d2t": [NUM_DRAFTABLE],
}


@pytest.fixture
def target(tiny_shape: ModelShape) -> LlamaForCausalLM:
    return build_model(tiny_shape, 0).train(False)


@pytest.fixture
def head(target: LlamaForCausalLM) -> TrainableEagle:
    return build_head(TargetEnds.of(target), 64, torch.arange(NUM_DRAFTABLE) + 5, 1)


def test_training_brings_a_head_closer_to_its_target(
    tmp_path: Path, target: LlamaForCausalLM, head: TrainableEagle, stream: Tensor, runtime: Runtime
) -> None:
    windows = StreamWindows(stream, RECIPE.batch_size, RECIPE.sequence_length, RECIPE.seed)
    held_out = evaluation_batches(stream, 8, RECIPE.sequence_length, 512)
    rest = (windows, held_out, RECIPE, Schedule(), runtime)
    Trainer("target", target, next_token_loss, *rest, tmp_path / "target", tmp_path / "log.jsonl").train()
    target.train(False).requires_grad_(False)
    trainer = Trainer("eagle", head, eagle_loss(target, 2), *rest, tmp_path / "eagle", tmp_path / "log.jsonl")
    before = trainer.evaluate()
    assert trainer.train().held_out_loss < 0.7 * before


@torch.no_grad()
def test_a_later_step_reads_the_text_and_the_output_of_earlier_steps(
    target: LlamaForCausalLM, head: TrainableEagle, stream: Tensor
) -> None:
    """Compares with a head that runs at one position at a time, with the text's tokens as the drafts."""
    tokens = stream[:40].long()[None]
    embeddings = target.model.embed_tokens(tokens)
    hidden_states = target.model(input_ids=tokens, use_cache=False, output_hidden_states=True).hidden_states
    read = captured_states(head, hidden_states)
    steps = draft_steps(head, embeddings, read, 3)
    begun = head.fc(read)
    for position in (0, 7, 36):
        known = begun[:, : position + 1]
        for depth, states in enumerate(steps):
            predicted, _ = head(embeddings[:, 1 : position + depth + 2], known)
            torch.testing.assert_close(states[:, position], predicted[:, -1])
            known = torch.cat([known, predicted[:, -1:]], dim=1)


def test_the_coupled_acceptance_is_the_probability_of_equal_choices() -> None:
    """Within 5 standard deviations of 40,000 draws: fails once in a million runs for each pair."""
    num_tokens, num_own, num_draws = 24, 18, 40_000
    torch.manual_seed(7)
    for sharpness in (0.3, 1.0, 3.0):
        of_target = (sharpness * torch.randn(num_tokens)).softmax(dim=0)
        of_head = (sharpness * torch.randn(num_own)).softmax(dim=0)
        noise = gumbel_noise((num_draws, num_tokens), torch.device("cpu"), sharpness)
        chosen = (of_target.log() + noise).argmax(dim=1)
        drafted = (of_head.log() + noise[:, :num_own]).argmax(dim=1)  # the head has the first tokens
        found = coupled_acceptance(of_target[None, :num_own], of_head[None], of_target[num_own:].sum()[None])
        share = float((chosen == drafted).float().mean())
        deviation = (share * (1 - share) / num_draws) ** 0.5
        assert found.item() == pytest.approx(share, abs=5 * deviation)


def test_a_saved_head_has_the_tensors_that_engines_load_and_no_others(
    tmp_path: Path, target: LlamaForCausalLM, head: TrainableEagle, stream: Tensor
) -> None:
    inputs = torch.randn(1, 5, 32)
    save_head(head, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name: list(tensor.shape) for name, tensor in tensors.items() if name != "t2d"} == SHAPES
    floating = {tensor.dtype for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    assert floating == {torch.bfloat16}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["num_hidden_layers"], config["draft_vocab_size"]) == (1, NUM_DRAFTABLE)
    target.save_pretrained(tmp_path / "target")
    loaded = load_head(tmp_path, ModelConfig.from_folder(tmp_path / "target"))
    assert loaded.target_ids.tolist() == list(range(5, 5 + NUM_DRAFTABLE))
    torch.testing.assert_close(loaded(inputs, inputs)[0], head.float()(inputs, inputs)[0])


@torch.no_grad()
def test_the_engine_drafts_the_tokens_that_the_head_drafts_in_training(tmp_path: Path, stream: Tensor) -> None:
    """A target of eight layers, so that three different states are read."""
    shape = ModelShape(64, 96, 8, 4, 2, 16, 512)
    target = build_model(shape, 0).train(False)
    target.save_pretrained(tmp_path / "target")
    assert captured_layers(8) == (2, 4, 5)
    head = build_head(TargetEnds.of(target), 64, torch.arange(100, 400), 1)
    save_head(head, tmp_path / "head")
    head.float()
    token_ids = [token % 512 for token in stream[:30].tolist()]
    pair = Pair(tmp_path / "target", tmp_path / "head", FORMS[0])
    (drafts,) = pair.draft(pair.open(token_ids))
    for num_drafts in range(K):
        tokens = torch.tensor([[*token_ids, *drafts[:num_drafts], 0]])
        hidden_states = target.model(input_ids=tokens, use_cache=False, output_hidden_states=True).hidden_states
        read = captured_states(head, hidden_states)
        steps = draft_steps(head, target.model.embed_tokens(tokens), read, num_drafts + 1)
        logits = head.logits(steps[-1][0, len(token_ids) - 2])
        assert drafts[num_drafts] == int(head.target_ids[logits.argmax()])


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
