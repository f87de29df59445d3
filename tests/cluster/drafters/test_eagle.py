"""EAGLE heads of every published format draft the same tokens as a reference in plain PyTorch operators."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster.engine.batch import Segment
from cluster.engine.cpu_kernels import has_kernels
from cluster.engine.eagle import load_eagle_head
from cluster.engine.loader import load_model
from cluster.engine.model import Model, TorchModel
from cluster.engine.model_config import AFTER_NORM
from cluster.engine.runner import ModelRunner
from cluster.errors import ConfigurationError
from tests.cluster.drafters.eagle_pair import (
    BLOCK_SIZE,
    FORMS,
    K,
    Pair,
    check_without_states,
    ends_of,
    reference_drafts,
    states_of,
)
from tests.cluster.engine.eagle_heads import FORMATS, TARGET_LAYERS, captured_layers, save_head
from tests.cluster.engine.tokens import random_tokens

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target_folder(tiny_folder: Callable[..., Path]) -> Path:
    return tiny_folder(num_hidden_layers=TARGET_LAYERS)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize("layers", [(0,), (2, 4, 5), (TARGET_LAYERS - 1, AFTER_NORM), (1, AFTER_NORM, 4)])
def test_a_step_keeps_the_states_of_the_chosen_layers(
    form: type[Model], layers: tuple[int, ...], target_folder: Path
) -> None:
    token_ids = random_tokens(1, 37)
    plain = load_model(target_folder, torch.float32, CPU, form=form)
    runner = ModelRunner(replace(plain, config=replace(plain.config, captured_layers=layers)), BLOCK_SIZE, 16)
    table, logits = list(range(15, 5, -1)), []
    for start, end in ((0, 20), (20, 21), (21, 37)):
        logits.append(runner.run([Segment(token_ids[start:end], start, table, num_logits=1)]))
    slots = torch.tensor([table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(37)])
    expected = states_of(target_folder, token_ids, layers)
    torch.testing.assert_close(runner.states[slots], expected, rtol=1e-4, atol=1e-4)
    # Logits have the same bits as without captured states.
    other = ModelRunner(plain, BLOCK_SIZE, 16)
    for (start, end), kept in zip(((0, 20), (20, 21), (21, 37)), logits, strict=True):
        assert torch.equal(other.run([Segment(token_ids[start:end], start, table, num_logits=1)]), kept)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize("published", FORMATS)
def test_drafts_are_those_of_the_head_written_out(
    published: str, form: type[Model], target_folder: Path, tmp_path: Path
) -> None:
    tensors = save_head(tmp_path, published)
    pair = Pair(target_folder, tmp_path, form)
    texts = [random_tokens(seed, length) for seed, length in ((1, 23), (2, 40), (3, 2))]
    sequences = [pair.open(text, wire_id) for wire_id, text in enumerate(texts, start=1)]

    def expected(token_ids: list[int]) -> list[int]:
        return reference_drafts(published, tensors, target_folder, token_ids)

    assert pair.draft(*sequences) == [expected(text) for text in texts]
    # Two drafts are accepted, then none, then all. Each time the head continues from the target's states.
    for accepted in (2, 0, K):
        for sequence in sequences:
            news = [*sequence.draft_token_ids[:accepted], 7]
            pair.commit(sequence, news)
        assert pair.draft(*sequences) == [expected(sequence.token_ids[:-K]) for sequence in sequences]


def test_a_tree_has_the_best_children_of_each_node(target_folder: Path, tmp_path: Path) -> None:
    tensors = save_head(tmp_path, "eagle3")
    pair = Pair(target_folder, tmp_path, FORMS[-1])
    embedding, output = ends_of(target_folder)
    token_ids = random_tokens(4, 30)
    states = states_of(target_folder, token_ids[:-1], captured_layers("eagle3"))
    sequence = pair.open(token_ids, width=2)
    sequence.to_extend = [-1]
    pair.drafter.draft([sequence])
    sequence.to_extend = [0, 1]
    pair.drafter.draft([sequence])
    sequence.to_extend = [2, 5]
    pair.drafter.draft([sequence])
    assert sequence.parents == [-1, -1, 0, 0, 1, 1, 2, 2, 5, 5]
    for node in (-1, 0, 1, 2, 5):
        path = sequence.path_tokens(node)
        logits = _along(tensors, embedding, output, states, token_ids, path)
        best = logits.topk(2).indices.tolist()
        assert [sequence.token_of(child) for child in sequence.children(node)] == best


def _along(
    tensors: dict[str, torch.Tensor],
    embedding: torch.Tensor,
    output: torch.Tensor,
    states: torch.Tensor,
    token_ids: list[int],
    path: list[int],
) -> torch.Tensor:
    """Returns the logits after the drafts `path`, which need not be the head's best tokens."""
    from tests.cluster.engine import eagle_heads

    forced = iter([*path, 0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "argmax", lambda self: torch.tensor(next(forced)))
        return eagle_heads.draft_logits("eagle3", tensors, embedding, output, states, token_ids, len(path) + 1)[-1]


def test_without_the_targets_states_it_proposes_nothing(target_folder: Path, tmp_path: Path) -> None:
    save_head(tmp_path, "eagle")
    check_without_states(Pair(target_folder, tmp_path, TorchModel))


def test_prefixes_are_shared_only_by_what_is_equal_before_and_in_them(target_folder: Path, tmp_path: Path) -> None:
    tensors = save_head(tmp_path, "eagle")
    pair = Pair(target_folder, tmp_path, TorchModel)
    text = random_tokens(6, 30)
    others = [text[:21] + random_tokens(7, 9), [text[0] ^ 1, *text[1:]], [*text[:20], text[20] ^ 1, *text[21:]]]
    first = pair.open(text)
    pair.draft(first)
    pair.commit(first, [3])
    pair.draft(first)
    for wire_id, other in enumerate(others, start=2):
        hits = pair.head.blocks.num_hit_tokens
        sequence = pair.open(other, wire_id)
        # Place 19 has token 20 of the text; a block of 4 ends there.
        assert pair.head.blocks.num_hit_tokens - hits == (20, 0, 16)[wire_id - 2]
        assert pair.draft(sequence) == [reference_drafts("eagle", tensors, target_folder, other)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d2t": torch.zeros(320, dtype=torch.int64) - 1}, "d2t does not name"),
        ({"d2t": torch.arange(320).flip(0)}, "d2t does not name"),
        ({"midlayer.self_attn.q_proj.weight": torch.zeros(128, 64)}, "has shape"),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    change: dict[str, torch.Tensor], message: str, target_folder: Path, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    tensors = save_head(tmp_path, "eagle3")
    save_file(tensors | change, tmp_path / "model.safetensors")
    with pytest.raises(ConfigurationError, match=message):
        load_eagle_head(tmp_path, load_model(target_folder, torch.float32, CPU))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 99]}},
            r"after \[2, 3, 99\] layers, but .* has 8",
        ),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 1, 2]}}, "layers, but"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["2", "3", "4"]}}, "layers, but"),
        ({"eagle_config": [1]}, "config.json"),
        ({"model_type": ["llama"]}, "config.json"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"speculators_model_type": "peagle"}, "is not eagle3"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(
    change: dict[str, object], message: str, target_folder: Path, tmp_path: Path
) -> None:
    save_head(tmp_path, "eagle3")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ConfigurationError, match=message):
        load_eagle_head(tmp_path, load_model(target_folder, torch.float32, CPU))


@pytest.mark.skipif(not has_kernels(), reason="one form supports every head")
def test_a_head_that_shares_an_output_layer_needs_its_kernels(target_folder: Path, tmp_path: Path) -> None:
    save_head(tmp_path, "eagle")
    file = tmp_path / "config.json"
    odd = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 8}  # the same sizes of tensors
    file.write_text(json.dumps(json.loads(file.read_text()) | odd))
    with pytest.raises(ConfigurationError, match="head_dim 8 of the head and 32 of the target"):
        load_eagle_head(tmp_path, load_model(target_folder, torch.float32, CPU))


def test_a_model_that_is_no_head_is_refused(target_folder: Path) -> None:
    target = load_model(target_folder, torch.float32, CPU)
    with pytest.raises(ConfigurationError, match="has no EAGLE head"):
        load_eagle_head(target_folder, target)


def test_pickled_code_does_not_run(target_folder: Path, tmp_path: Path) -> None:
    save_head(tmp_path, "eagle with biases")
    torch.save({"fc.weight": Path("/")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigurationError, match="cannot read"):
        load_eagle_head(tmp_path, load_model(target_folder, torch.float32, CPU))
