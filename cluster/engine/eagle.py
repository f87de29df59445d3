"""EAGLE heads: small decoders that draft from the hidden states of their target.

EAGLE (Li et al., arXiv 2401.15077), also with the trees of EAGLE-2 (arXiv 2406.16858), reads the target's last state.
EAGLE-3 (arXiv 2503.01840) reads states of several layers and may have a smaller vocabulary. Row t of a head has the
target's state of token t, the embedding of token t + 1, and position t; it predicts token t + 2. To draft further, a
row has the output of the row before it in place of the target's state.

A head is read as it was published: by its authors, by SpecForge, or by the library speculators.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from cluster.engine.checkpoint import TensorReader
from cluster.engine.linear import Linear
from cluster.engine.loader import LoadedModel, WeightReader, form_on
from cluster.engine.model import LayerInputs, rms_norm
from cluster.engine.model_config import AFTER_NORM, FAMILIES, ModelConfig, read_json
from cluster.engine.quantization import Quantization
from cluster.engine.weights import ModelWeights
from cluster.errors import ConfigurationError

_SPECULATORS_TYPE = "speculators_model_type"
_FAMILY_OF_TYPE = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """The shape of a head, read from its `config.json`. Fields after `decoder` are of EAGLE-3."""

    decoder: ModelConfig  # layers of the head; its vocabulary is that of the head's logits
    captured_layers: tuple[int, ...]  # states of the target that the head reads, as in `ModelConfig`
    is_third: bool  # whether this is EAGLE-3
    target_hidden_size: int
    norm_before_residual: bool = False  # whether what the layer adds to is the normed state
    norm_before_fc: bool = False  # whether one norm covers all states that `fc` reads
    has_fc_norm: bool = False  # whether each state that `fc` reads has a norm of its own

    @classmethod
    def from_folder(cls, folder: Path, target: ModelConfig) -> EagleConfig:
        """Reads the head in `folder`, which drafts for `target`. Raises ConfigurationError if it cannot."""
        values = read_json(folder / "config.json")
        is_of_speculators = _SPECULATORS_TYPE in values
        if is_of_speculators:
            if values[_SPECULATORS_TYPE] != "eagle3":
                raise ConfigurationError(f"{folder}: {_SPECULATORS_TYPE} {values[_SPECULATORS_TYPE]!r} is not eagle3")
            values = {**values.get("transformer_layer_config", {}), **values}
        family = _FAMILY_OF_TYPE.get(values.get("model_type", "llama"), "LlamaForCausalLM")
        # A head shares the target's embedding and, without a vocabulary of its own, the target's output layer.
        values = {"vocab_size": target.vocab_size, "max_position_embeddings": 0, **values}
        decoder = ModelConfig.from_values(FAMILIES[family], folder, values)
        tensors = TensorReader(folder, torch.float32, torch.device("cpu"), takes_pickle=True)
        is_third = tensors.find("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight") is not None
        if not is_third and tensors.find("fc.weight") is None:
            raise ConfigurationError(f"{folder} has no EAGLE head: it has neither fc.weight nor a hidden_norm")
        return cls(
            decoder=replace(
                decoder,
                vocab_size=values.get("draft_vocab_size") or target.vocab_size,
                # Many heads name 2,048 positions and draft beyond these all the same.
                max_position_embeddings=target.max_position_embeddings,
                captured_layers=(AFTER_NORM if values.get("norm_output") else decoder.num_layers,),
                mask_token_id=None,
            ),
            captured_layers=_captured_layers(values, target.num_layers) if is_third else (AFTER_NORM,),
            is_third=is_third,
            target_hidden_size=target.hidden_size,
            norm_before_residual=bool(values.get("norm_before_residual", is_of_speculators)),
            norm_before_fc=bool(_option(values, "norm_before_fc")),
            has_fc_norm=bool(values.get("fc_norm")),
        )


def _option(values: Mapping[str, Any], name: str) -> Any:
    """Returns a setting that stands in `eagle_config` or outside it."""
    return (values.get("eagle_config") or {}).get(name, values.get(name))


def _captured_layers(values: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Returns the numbers of the target's layers before each state that an EAGLE-3 head reads."""
    if _option(values, "use_aux_hidden_state") is False:
        return (AFTER_NORM,)
    named = _option(values, "eagle_aux_hidden_state_layer_ids")
    return tuple(named) if named else (2, num_layers // 2, num_layers - 3)


@dataclass(frozen=True, slots=True)
class EagleHead:
    """A head with its weights: `model` for its layers, and what computes the inputs of the first one."""

    config: EagleConfig
    model: LoadedModel
    fc: Linear | None  # EAGLE-3: of the target's states; otherwise of embedding and state; None: a single state
    fc_norms: tuple[torch.Tensor, ...]  # one over all states, or one for each
    hidden_norm: torch.Tensor | None
    target_ids: torch.Tensor | None  # int64 [vocab_size]: the target's ID of each of the head's tokens; None: equal

    def inputs(
        self,
        token_ids: torch.Tensor,
        of_target: torch.Tensor,
        target_states: torch.Tensor,
        of_head: torch.Tensor,
        head_states: torch.Tensor,
    ) -> LayerInputs:
        """Returns the inputs for the rows of a step.

        `token_ids` int64 [num_tokens]. Rows `of_target` read `target_states` [number, target's state size], and rows
        `of_head` the head's own `head_states` [number, hidden_size].
        """
        decoder, weights = self.config.decoder, self.model.weights
        dtype = self.model.form.activations or weights.dtype
        embedded = F.embedding(token_ids, weights.embedding).to(dtype)
        states = torch.empty(len(token_ids), decoder.hidden_size, dtype=dtype, device=token_ids.device)
        states.index_copy_(0, of_head, head_states.to(dtype))
        if len(of_target):
            states.index_copy_(0, of_target, self._read(target_states.to(dtype)))
        if not self.config.is_third:
            assert self.fc is not None
            hidden = self.fc(torch.cat([embedded, states], dim=-1))
            return LayerInputs(hidden, hidden)
        input_norm, hidden_norm = weights.layers[0].input_norm, self.hidden_norm
        assert input_norm is not None
        assert hidden_norm is not None
        normed = rms_norm(states, hidden_norm, decoder.rms_norm_eps)
        attention = torch.cat([rms_norm(embedded, input_norm, decoder.rms_norm_eps), normed], dim=-1)
        return LayerInputs(normed if self.config.norm_before_residual else states, attention)

    def _read(self, target_states: torch.Tensor) -> torch.Tensor:
        """Returns what an EAGLE-3 head makes of the target's states, [number, hidden_size]."""
        if not self.config.is_third or self.fc is None:
            return target_states
        if self.fc_norms:
            parts = target_states.chunk(len(self.fc_norms), dim=-1)
            eps = self.config.decoder.rms_norm_eps
            normed = [rms_norm(part, weight, eps) for part, weight in zip(parts, self.fc_norms, strict=True)]
            target_states = torch.cat(normed, dim=-1)
        return self.fc(target_states)

    def of_target_ids(self, logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Returns `logits` [num_rows, head's vocabulary] by the target's IDs, [num_rows, vocab_size].

        Tokens that the head lacks have -inf.
        """
        if self.target_ids is None:
            return logits
        found = logits.new_full((len(logits), vocab_size), -torch.inf)
        return found.index_copy_(1, self.target_ids, logits)


def load_eagle_head(folder: Path, target: LoadedModel, quantization: Quantization | None = None) -> EagleHead:
    """Reads the head in `folder`, which shares tensors with `target`. Raises ConfigurationError.

    It has the device and dtype of `target`. The head's layers have integer weights with `quantization`.
    """
    shared = target.weights
    config = EagleConfig.from_folder(folder, target.config)
    decoder = config.decoder
    form = form_on(decoder, shared.dtype, shared.device)
    tensors = TensorReader(folder, shared.dtype, shared.device, takes_pickle=True)
    reader = WeightReader(decoder, tensors, form.weight_format, quantization)
    hidden = decoder.hidden_size
    embedding = _embedding(folder, config, tensors, target)
    num_states = len(config.captured_layers)
    fc_inputs = num_states * config.target_hidden_size if config.is_third else 2 * hidden
    fc, hidden_norm, norm = None, None, None
    fc_norms: tuple[torch.Tensor, ...] = ()
    if tensors.find("fc.weight") is not None:
        fc = reader.linear(("fc", hidden), in_features=fc_inputs, has_bias=tensors.find("fc.bias") is not None)
    elif fc_inputs != hidden:
        raise ConfigurationError(f"{folder}: the head has no fc.weight for {num_states} states of the target")
    if config.is_third:
        first = tensors.find("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight")
        assert first is not None
        first = first.removesuffix(".hidden_norm.weight")
        hidden_norm, norm = reader.norm(f"{first}.hidden_norm"), reader.norm("norm")
        layers = [reader.layer(first, reader.norm(f"{first}.input_layernorm"), 2 * hidden)]
        if config.norm_before_fc:
            fc_norms = (reader.norm("input_norm", fc_inputs),)
        elif config.has_fc_norm:
            fc_norms = tuple(reader.norm(f"fc_norm.{i}", config.target_hidden_size) for i in range(num_states))
    else:
        layers = [reader.layer("layers.0", None, hidden)]
    for index in range(1, decoder.num_layers):
        layers.append(reader.layer(f"layers.{index}", reader.norm(f"layers.{index}.input_layernorm"), hidden))
    target_ids = _target_ids(folder, tensors, decoder.vocab_size, target)
    if tensors.find("lm_head.weight") is not None and (config.is_third or hidden != target.config.hidden_size):
        head = form.weight_format.make_linear(reader.by_token("lm_head.weight"))
    elif decoder.vocab_size == target.config.vocab_size and hidden == target.config.hidden_size:
        head = shared.head
    else:
        raise ConfigurationError(f"{folder}: the head needs an lm_head.weight, as it differs in size from its target")
    weights = ModelWeights(embedding, tuple(layers), norm, head)
    model = LoadedModel(decoder, weights, form)
    return EagleHead(config, model, fc, fc_norms, hidden_norm, target_ids)


def _embedding(folder: Path, config: EagleConfig, tensors: TensorReader, target: LoadedModel) -> torch.Tensor:
    """Returns the head's embedding: the target's, unless the head has another one of its own."""
    shared, shape = target.weights.embedding, (target.config.vocab_size, config.decoder.hidden_size)
    if tensors.find("embed_tokens.weight") is None:
        if tuple(shared.shape) != shape:
            raise ConfigurationError(
                f"{folder}: the head has a hidden_size of {shape[1]} and no embed_tokens.weight, but the embedding of "
                f"its target has {shared.shape[1]} values a token"
            )
        return shared
    own = tensors.read([("embed_tokens.weight", shape[0])], shape[1])
    return shared if shared.shape == own.shape and torch.equal(shared, own) else own


def _target_ids(folder: Path, tensors: TensorReader, num_own: int, target: LoadedModel) -> torch.Tensor | None:
    """Returns the target's IDs of the head's tokens, from `d2t`, which contains differences; None if they are equal."""
    num_target = target.config.vocab_size
    if tensors.find("d2t") is None:
        if num_own != num_target:
            raise ConfigurationError(f"{folder}: the head has {num_own} tokens of {num_target} and no d2t to map them")
        return None
    ids = tensors.integers("d2t", num_own) + torch.arange(num_own)
    if ids.min() < 0 or ids.max() >= num_target or len(set(ids.tolist())) != num_own:
        raise ConfigurationError(f"{folder}: d2t does not name a different one of {num_target} tokens for each")
    return ids.to(target.weights.device)
