"""An EAGLE-3 head: one decoder layer that drafts from its target's hidden states (Li et al., arXiv 2503.01840).

At position t its inputs are the target's states of several layers at t and the embedding of the token at t + 1. It
predicts the token at t + 2. To draft further, it gets its own output as the state. It has an output layer of its own,
for the most frequent tokens only; the embedding is the target's.

Names and shapes of the parameters are those that `cluster.engine.eagle` and vLLM's method `eagle3` load.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from cluster.engine.checkpoint import TensorReader, weight_map
from cluster.engine.eagle import read_eagle_config, read_target_ids, usual_layers
from cluster.engine.model_config import ModelConfig, read_json
from cluster.errors import ConfigurationError
from services.training.heads import TargetEnds, TrainableHead


@dataclass(frozen=True)
class KeysValues:
    """Keys and values of earlier steps, each [rows, num_kv_heads, positions, head_dim]."""

    keys: Tensor
    values: Tensor


class TrainableEagle(TrainableHead):
    """An EAGLE-3 head.

    The configuration has `draft_vocab_size`, the number of tokens that the head can draft, and
    `eagle_aux_hidden_state_layer_ids`: how many target layers precede each state.
    """

    num_trained_steps = 3  # all but the first have the head's own output as input; the head can draft deeper than that

    d2t: Tensor  # int64 [draft_vocab_size]: ID of the target minus ID of the head
    t2d: Tensor  # bool [vocab_size]: whether the head has the token

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.captured_layers = tuple(config.eagle_aux_hidden_state_layer_ids)
        size = config.hidden_size
        self.fc = nn.Linear(len(self.captured_layers) * size, size, bias=False)
        self.midlayer = _Layer(config)
        self.norm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self._rotary = LlamaRotaryEmbedding(config)

    @property
    def target_ids(self) -> Tensor:
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def set_target_ids(self, target_ids: Tensor) -> None:
        """Sets the target's IDs of the tokens that the head can draft, int64 [draft_vocab_size]."""
        self.d2t.copy_(target_ids - torch.arange(len(target_ids)))
        self.t2d.zero_()[target_ids] = True

    def step_logits(self, embeddings: Tensor, states: Tensor, num_steps: int, positions: slice) -> Iterator[Tensor]:
        for step in draft_steps(self, embeddings, states, num_steps):
            yield self.logits(step[:, positions])

    def logits(self, states: Tensor) -> Tensor:
        """Returns the logits of the head's tokens, [..., draft_vocab_size]. `states`: output of a step."""
        logits: Tensor = self.lm_head(self.norm(states))
        return logits

    def forward(
        self,
        embeddings: Tensor,  # [rows, positions, hidden_size]
        states: Tensor,  # [rows, positions, hidden_size]: from `fc`, later the output of the step before
        earlier: Sequence[KeysValues] = (),
    ) -> tuple[Tensor, KeysValues]:
        """Returns the states of the next tokens, and keys and values for later steps.

        In the first step a position attends to itself and those before it. In later steps it also attends to its own
        steps after the first. `earlier`: keys and values of all previous steps, including the first.
        """
        positions = torch.arange(states.shape[1], device=states.device)[None] + len(earlier)
        cosine, sine = self._rotary(states, positions)
        output: tuple[Tensor, KeysValues] = self.midlayer(embeddings, states, cosine, sine, earlier)
        return output


class _Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)  # type: ignore[no-untyped-call]

    def forward(
        self, embeddings: Tensor, states: Tensor, cosine: Tensor, sine: Tensor, earlier: Sequence[KeysValues]
    ) -> tuple[Tensor, KeysValues]:
        inputs = torch.cat([self.input_layernorm(embeddings), self.hidden_norm(states)], dim=-1)
        attended, own = self.self_attn(inputs, cosine, sine, earlier)
        hidden_states = states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states)), own


class _Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
        self._head_dim: int = config.head_dim or config.hidden_size // num_heads
        self._group_size = num_heads // num_kv_heads
        query_size, kv_size = num_heads * self._head_dim, num_kv_heads * self._head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)

    def forward(
        self, inputs: Tensor, cosine: Tensor, sine: Tensor, earlier: Sequence[KeysValues]
    ) -> tuple[Tensor, KeysValues]:
        queries, keys, values = (
            projection(inputs).unflatten(-1, (-1, self._head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        queries, keys = apply_rotary_pos_emb(queries, keys, cosine, sine)
        own = KeysValues(keys, values)
        text, *steps = [
            KeysValues(*(part.repeat_interleave(self._group_size, dim=1) for part in (step.keys, step.values)))
            for step in (*earlier, own)
        ]
        length = inputs.shape[1]
        future = torch.ones(length, length, dtype=torch.bool, device=inputs.device).triu(1)
        scores = [(queries @ text.keys.transpose(-1, -2)).masked_fill(future, -torch.inf)]
        scores += [(queries * step.keys).sum(dim=-1, keepdim=True) for step in steps]
        weights = (torch.cat(scores, dim=-1) * self._head_dim**-0.5).softmax(dim=-1, dtype=torch.float32)
        weights = weights.to(values.dtype)
        attended = weights[..., :length] @ text.values
        for index, step in enumerate(steps, start=length):
            attended = attended + weights[..., index : index + 1] * step.values
        return self.o_proj(attended.transpose(1, 2).flatten(2)), own


def captured_layers(num_layers: int) -> tuple[int, ...]:
    """Returns how many of the target's layers precede each state that a head reads.

    The numbers are those of EAGLE-3 if the target has enough layers for three different states.
    """
    usual = usual_layers(num_layers)
    return usual if 2 < usual[1] < usual[2] else tuple(sorted({1, num_layers // 2, num_layers - 1}))


@torch.no_grad()
def build_head(target: TargetEnds, intermediate_size: int, target_ids: Tensor, seed: int) -> TrainableEagle:
    """Returns an untrained float32 head for `target`.

    Its layer is random and has the sizes of the target's layers, except for the MLP's `intermediate_size`. Its norm and
    output layer start as copies of the target's, and `fc` as random weights plus the identity for the last captured
    state. `target_ids`: IDs of the tokens that it can draft, in ascending order.
    """
    torch.manual_seed(seed)
    config = target.config
    sizes = config.to_dict() | {
        "num_hidden_layers": 1,
        "intermediate_size": intermediate_size,
        "draft_vocab_size": len(target_ids),
        "eagle_aux_hidden_state_layer_ids": list(captured_layers(config.num_hidden_layers)),
        "tie_word_embeddings": False,
    }
    head = TrainableEagle(LlamaConfig(**sizes))
    for parameter in head.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=config.initializer_range)
    head.fc.weight[:, -config.hidden_size :] += torch.eye(config.hidden_size)
    head.norm.weight.copy_(target.norm)
    head.lm_head.weight.copy_(target.output[target_ids])
    head.set_target_ids(target_ids)
    return head


@torch.no_grad()
def load_head(folder: Path, target: ModelConfig) -> TrainableEagle:
    """Loads a head of `target` in float32. Raises ConfigurationError if it is not EAGLE-3 in SafeAILab's form."""
    shape = read_eagle_config(folder, target)
    is_plain = not (shape.norm_before_residual or shape.norm_before_fc or shape.has_fc_norm)
    if not shape.is_third or not is_plain or shape.decoder.num_layers != 1 or min(shape.captured_layers) < 0:
        raise ConfigurationError(f"{folder}: only EAGLE-3 heads in SafeAILab's form can be trained")
    own: dict[str, Any] = {
        "vocab_size": target.vocab_size,
        "draft_vocab_size": shape.decoder.vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(shape.captured_layers),
    }
    values, tensors = read_json(folder / "config.json"), weight_map(folder, takes_pickle=True)
    unsupported = [name for name in ("norm_output", "attention_bias") if values.get(name)]
    if values.get("model_type", "llama") != "llama":
        unsupported.append(f"model_type {values['model_type']}")
    if shape.decoder.hidden_size != target.hidden_size:
        unsupported.append(f"hidden_size {shape.decoder.hidden_size}, not the target's {target.hidden_size}")
    if not unsupported:
        head = TrainableEagle(LlamaConfig.from_pretrained(folder, **own))
        unsupported = sorted(tensors.keys() - head.state_dict().keys())
    if unsupported:
        raise ConfigurationError(f"{folder}: training does not support the head's {', '.join(unsupported)}")
    reader = TensorReader(folder, torch.float32, torch.device("cpu"), takes_pickle=True)
    for name, parameter in head.named_parameters():
        parameter.copy_(reader.read([(name, len(parameter))], *parameter.shape[1:]))
    num_own = shape.decoder.vocab_size
    target_ids = read_target_ids(folder, reader, num_own, target.vocab_size)
    head.set_target_ids(torch.arange(num_own) if target_ids is None else target_ids)
    return head


def draft_steps(head: TrainableEagle, embeddings: Tensor, states: Tensor, num_steps: int) -> list[Tensor]:
    """Drafts from every position of a text, for `num_steps` steps (see `TrainableHead.step_logits`).

    Returns the states of each step, [rows, length - num_steps, hidden_size]: only positions that have all steps.
    """
    num_positions = embeddings.shape[1] - num_steps
    states = head.fc(states[:, :num_positions])
    earlier, steps = list[KeysValues](), list[Tensor]()
    for depth in range(num_steps):
        states, own = head(embeddings[:, depth + 1 : depth + 1 + num_positions], states, earlier)
        steps.append(states)
        earlier.append(own)
    return steps


def captured_states(head: TrainableHead, hidden_states: Sequence[Tensor]) -> Tensor:
    """Returns the states that `head` reads, [rows, positions, captured layers * hidden_size].

    `hidden_states`: the target's hidden states, as transformers returns them; index i is before layer i.
    """
    return torch.cat([hidden_states[layer] for layer in head.captured_layers], dim=-1)


def save_head(head: TrainableEagle, directory: Path) -> None:
    """Writes the folder that `draft.drafter: eagle` and vLLM's method `eagle3` load, in bfloat16.

    The head itself is converted, too.
    """
    directory.mkdir(parents=True, exist_ok=True)
    head.to(torch.bfloat16)
    save_file(head.state_dict(), directory / "model.safetensors", metadata={"format": "pt"})
    config = head.config
    config.architectures = ["LlamaForCausalLMEagle3"]
    config.dtype = torch.bfloat16
    config.save_pretrained(directory)
