"""A tiny target that keeps its states, and heads that draft from them, without a step loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from cluster.drafters.base import Drafter, DraftSequence
from cluster.drafters.head import HeadDrafter
from cluster.drafters.medusa import MedusaDrafter
from cluster.drafters.target_states import ComputedSequence, TargetStates
from cluster.engine.batch import Segment
from cluster.engine.cpu_kernels import has_kernels
from cluster.engine.cpu_model import CpuModel
from cluster.engine.eagle import load_eagle_head
from cluster.engine.heads import DecoderHead
from cluster.engine.limits import StepLimits
from cluster.engine.loader import LoadedModel, load_model
from cluster.engine.medusa import MedusaHeads
from cluster.engine.model import Model, TorchModel
from cluster.engine.model_config import AFTER_NORM
from cluster.engine.runner import ModelRunner
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from tests.cluster.engine.eagle_heads import Tensors, captured_layers, draft_logits
from tests.cluster.engine.tokens import random_tokens

CPU = torch.device("cpu")
K = 4
BLOCK_SIZE = 4
NUM_BLOCKS = 64
LIMITS = StepLimits(max_model_len=200, max_num_seqs=8, max_num_batched_tokens=64)
GREEDY = SamplingParams(temperature=0.0)
FORMS: list[type[Model]] = [TorchModel, CpuModel] if has_kernels() else [TorchModel]

Load = Callable[[Path, LoadedModel], DecoderHead | MedusaHeads]


class Pair:
    """A target and its heads. The caller sets which tokens the target has computed."""

    def __init__(
        self, target_folder: Path, heads_folder: Path, form: type[Model], load: Load = load_eagle_head
    ) -> None:
        loaded = load_model(target_folder, torch.float32, CPU, form=form)
        heads = load(heads_folder, loaded)
        config = replace(loaded.config, captured_layers=heads.captured_layers)
        self.target = ModelRunner(replace(loaded, config=config), BLOCK_SIZE, NUM_BLOCKS)
        self.computed: dict[int, ComputedSequence] = {}
        states = TargetStates(self.target, lambda: self.computed)
        self.drafter: Drafter
        if isinstance(heads, MedusaHeads):
            self.drafter = MedusaDrafter(heads, LIMITS, states)
        else:
            self.head = ModelRunner(heads.model, BLOCK_SIZE, NUM_BLOCKS)
            self.drafter = HeadDrafter(heads, self.head, LIMITS, states)

    def open(self, token_ids: list[int], wire_id: int = 1, k: int = K, width: int = 1) -> DraftSequence:
        """Returns a sequence. The target has computed all of its tokens except the last."""
        table = self.target.blocks.allocate(NUM_BLOCKS // 4)
        assert table is not None
        self.target.run([Segment(token_ids[:-1], 0, table, num_logits=1)])
        self.computed[wire_id] = ComputedSequence(table, len(token_ids) - 1)
        sequence = DraftSequence(list(token_ids), 1, GREEDY, NoiseKey.derive(0, 0), k, k, width=width, wire_id=wire_id)
        assert self.drafter.admit(sequence)
        return sequence

    def commit(self, sequence: DraftSequence, token_ids: list[int]) -> None:
        """Commits `token_ids`. The target has then computed all of the sequence's tokens except the last."""
        computed = self.computed[sequence.wire_id]
        rows = [sequence.token_ids[sequence.num_committed - 1], *token_ids[:-1]]
        self.target.run([Segment(rows, computed.num_tokens, computed.block_table, num_logits=1)])
        self.computed[sequence.wire_id] = replace(computed, num_tokens=computed.num_tokens + len(rows))
        kept = sequence.commit(sequence.base, token_ids)
        assert kept is not None
        self.drafter.rewind(sequence, kept)

    def draft(self, *sequences: DraftSequence) -> list[list[int]]:
        while any(sequence.num_drafted < sequence.num_owed for sequence in sequences):
            owed = [sequence for sequence in sequences if sequence.num_drafted < sequence.num_owed]
            assert not self.drafter.draft(owed)
            assert not any(sequence.is_exhausted for sequence in owed)
        return [sequence.draft_token_ids for sequence in sequences]

    def close(self, sequence: DraftSequence) -> None:
        self.drafter.release(sequence)
        self.target.blocks.free(list(self.computed.pop(sequence.wire_id).block_table))


@torch.inference_mode()
def states_of(target_folder: Path, token_ids: list[int], layers: tuple[int, ...]) -> torch.Tensor:
    """Returns the states after each number of `layers`, computed by transformers; -1: after the last norm."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
    before: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda module, inputs: before.append(inputs[0][0]))
    model.model.norm.register_forward_pre_hook(lambda module, inputs: before.append(inputs[0][0]))
    last = model.model(torch.tensor([token_ids])).last_hidden_state[0]
    return torch.cat([last if layer == AFTER_NORM else before[layer] for layer in layers], dim=-1)


def reference_drafts(published: str, tensors: Tensors, target_folder: Path, token_ids: list[int]) -> list[int]:
    """Returns the K greedy drafts after `token_ids` of a head with `tensors`, by the reference computation."""
    states = states_of(target_folder, token_ids[:-1], captured_layers(published))
    found = draft_logits(published, tensors, *ends_of(target_folder), states, token_ids, K)
    return [int(logits.argmax()) for logits in found]


def check_without_states(pair: Pair) -> None:
    """Checks that the drafter proposes nothing while the target has no states of a sequence, and drafts afterwards."""
    sequence = pair.open(random_tokens(5, 20))
    known, pair.computed = pair.computed, {}
    assert not pair.drafter.draft([sequence])
    assert sequence.is_exhausted
    assert sequence.lacks_states
    pair.computed = known
    pair.commit(sequence, [9])
    assert not sequence.is_exhausted
    pair.draft(sequence)


def ends_of(target_folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the target's embedding and output layer."""
    from safetensors.torch import load_file

    tensors = load_file(target_folder / "model.safetensors")
    return tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
