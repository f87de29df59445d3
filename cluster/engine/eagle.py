"""Reads EAGLE heads.

EAGLE (Li et al., arXiv 2401.15077), also with the trees of EAGLE-2 (arXiv 2406.16858), reads the target's last state.
EAGLE-3 (arXiv 2503.01840) reads states of several layers and may have a smaller vocabulary.

A head is read as it was published: by its authors, by SpecForge, or by the library speculators.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cluster.engine.checkpoint import TensorReader
from cluster.engine.heads import DecoderHead, HeadConfig
from cluster.engine.loader import LoadedModel, WeightReader, form_on
from cluster.engine.model_config import AFTER_NORM, FAMILIES, ModelConfig, read_json
from cluster.engine.quantization import Quantization
from cluster.engine.weights import ModelWeights
from cluster.errors import ConfigurationError

_SPECULATORS_TYPE = "speculators_model_type"
_FAMILY_OF_TYPE = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def read_eagle_config(folder: Path, target: ModelConfig) -> HeadConfig:
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
    return HeadConfig(
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
    """Returns a setting of `eagle_config`, or of the configuration that contains it."""
    return (values.get("eagle_config") or {}).get(name, values.get(name))


def _captured_layers(values: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Returns the numbers of the target's layers before each state that an EAGLE-3 head reads."""
    if _option(values, "use_aux_hidden_state") is False:
        return (AFTER_NORM,)
    named = _option(values, "eagle_aux_hidden_state_layer_ids")
    return tuple(named) if named else (2, num_layers // 2, num_layers - 3)


def load_eagle_head(folder: Path, target: LoadedModel, quantization: Quantization | None = None) -> DecoderHead:
    """Reads the head in `folder`, which shares tensors with `target`. Raises ConfigurationError.

    It has the device and dtype of `target`. The head's layers have integer weights with `quantization`.
    """
    shared = target.weights
    config = read_eagle_config(folder, target.config)
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
    return DecoderHead(config, model, fc, hidden_norm, fc_norms=fc_norms, target_ids=target_ids)


def _embedding(folder: Path, config: HeadConfig, tensors: TensorReader, target: LoadedModel) -> torch.Tensor:
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
