"""An EAGLE head: one decoder layer that predicts its target's hidden states.

At position t its inputs are the target's hidden state at t and the embedding of the token at t + 1. Its output is the
predicted hidden state at t + 1, which the target's own output layer converts to logits. To draft further, it gets its
own output as the hidden state (Li et al., arXiv 2401.15077).

Names and shapes of the parameters are those that vLLM's `EagleLlamaForCausalLM` loads. As in vLLM, the embedding and
the output layer are the target's, and the layer has no normalisation before its attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from services.training.trainer import LossFunction

# Weight of the error of the hidden states, which is added to the divergence of the distributions.
_REGRESSION_WEIGHT = 0.05


@dataclass(frozen=True)
class KeysValues:
    """Keys and values of earlier steps, each [rows, num_kv_heads, positions, head_dim]."""

    keys: Tensor
    values: Tensor


class TrainableHead(nn.Module):
    """Computes one draft step for every position of a text at once.

    Each position is treated as the last committed one.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([_Layer(config)])
        self._rotary = LlamaRotaryEmbedding(config)

    def forward(
        self,
        embeddings: Tensor,  # [rows, positions, hidden_size]
        hidden_states: Tensor,  # [rows, positions, hidden_size]
        earlier: Sequence[KeysValues] = (),
    ) -> tuple[Tensor, KeysValues]:
        """Return hidden states of the next tokens, and keys and values for later steps.

        In the first step a position attends to itself and those before it. In later steps it also attends to its own
        steps after the first. `earlier`: keys and values of all previous steps, including the first.
        """
        inputs = self.fc(torch.cat([embeddings, hidden_states], dim=-1))
        positions = torch.arange(inputs.shape[1], device=inputs.device)[None] + len(earlier)
        cosine, sine = self._rotary(inputs, positions)
        output: tuple[Tensor, KeysValues] = self.layers[0](inputs, cosine, sine, earlier)
        return output


class _Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)  # type: ignore[no-untyped-call]

    def forward(
        self, inputs: Tensor, cosine: Tensor, sine: Tensor, earlier: Sequence[KeysValues]
    ) -> tuple[Tensor, KeysValues]:
        attended, own = self.self_attn(inputs, cosine, sine, earlier)
        hidden_states = inputs + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states)), own


class _Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
        self._head_dim: int = config.head_dim or config.hidden_size // num_heads
        self._group_size = num_heads // num_kv_heads
        query_size, kv_size = num_heads * self._head_dim, num_kv_heads * self._head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
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


def build_head(target: LlamaConfig, intermediate_size: int, seed: int) -> TrainableHead:
    """Return a float32 head for `target` with random weights.

    Its layer has the sizes of the target's layers, except for the MLP's `intermediate_size`.
    """
    torch.manual_seed(seed)
    sizes = target.to_dict() | {"num_hidden_layers": 1, "intermediate_size": intermediate_size}
    head = TrainableHead(LlamaConfig(**sizes))
    for parameter in head.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=target.initializer_range)
    return head


def load_head(directory: Path, device: torch.device) -> TrainableHead:
    """Load a saved head for inference, in float32."""
    head = TrainableHead(LlamaConfig.from_pretrained(directory))
    head.load_state_dict(load_file(directory / "model.safetensors"))
    return head.to(device).requires_grad_(False).train(False)


def draft_steps(head: TrainableHead, embeddings: Tensor, hidden_states: Tensor, num_steps: int) -> list[Tensor]:
    """Predicts hidden states from every position of a text, for `num_steps` steps.

    The tokens of the text serve as the drafts. Both tensors are the target's, [rows, length, hidden_size]. Step d, from
    0, predicts at position t the hidden state of the token at t + 1 + d. Returns [rows, length - num_steps,
    hidden_size] for each step, so that every position has all steps.
    """
    num_positions = embeddings.shape[1] - num_steps
    states, earlier, steps = hidden_states[:, :num_positions], list[KeysValues](), list[Tensor]()
    for depth in range(num_steps):
        states, own = head(embeddings[:, depth + 1 : depth + 1 + num_positions], states, earlier)
        steps.append(states)
        earlier.append(own)
    return steps


def eagle_loss(target: LlamaForCausalLM, num_steps: int) -> LossFunction[TrainableHead]:
    """Return the loss: KL(target || head) plus the weighted error of the hidden states.

    It is the mean over ``num_steps`` draft steps. The later steps train the head on its own output, as in drafting.
    ``target`` is not changed.
    """

    def loss(head: TrainableHead, windows: Tensor) -> Tensor:
        inputs = windows[:, :-1]
        with torch.no_grad():
            embeddings = target.model.embed_tokens(inputs)
            hidden_states = target.model(input_ids=inputs, use_cache=False).last_hidden_state
            log_probs = target.lm_head(hidden_states).float().log_softmax(dim=-1)
        losses = []
        for depth, states in enumerate(draft_steps(head, embeddings, hidden_states, num_steps)):
            foretold = slice(depth + 1, depth + 1 + states.shape[1])
            head_log_probs = target.lm_head(states).float().log_softmax(dim=-1)
            divergence = nn.functional.kl_div(
                head_log_probs.flatten(0, 1),
                log_probs[:, foretold].flatten(0, 1),
                reduction="batchmean",
                log_target=True,
            )
            error = nn.functional.smooth_l1_loss(states.float(), hidden_states[:, foretold].float())
            losses.append(divergence + _REGRESSION_WEIGHT * error)
        return torch.stack(losses).mean()

    return loss


def save_head(head: TrainableHead, directory: Path) -> None:
    """Write the folder that vLLM's method `eagle` loads, in bfloat16. The head itself is converted, too."""
    directory.mkdir(parents=True, exist_ok=True)
    head.to(torch.bfloat16)
    save_file(head.state_dict(), directory / "model.safetensors", metadata={"format": "pt"})
    config = head.config
    config.architectures = ["EagleLlamaForCausalLM"]
    config.dtype = torch.bfloat16
    config.save_pretrained(directory)
