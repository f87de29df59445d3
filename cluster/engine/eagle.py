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
from cluster.engine.loader import LoadedModel, WeightReader, form_like
from cluster.engine.model_config import AFTER_NORM, FAMILIES, ModelConfig, read_json
from cluster.engine.quantization import Quantization
from cluster.engine.weights import ModelWeights
from cluster.errors import ConfigurationError

_SPECULATORS_TYPE = "speculators_model_type"
_FAMILY_OF_TYPE = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def read_eagle_config(folder: Path, target: ModelConfig) -> HeadConfig:
    """Returns the shape of the EAGLE head in `folder`. Raises ConfigurationError if it does not fit `target`."""
    try:
        return _read_config(folder, target)
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{folder}: config.json: {error}") from error


def _read_config(folder: Path, target: ModelConfig) -> HeadConfig:
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
    if decoder.num_layers < 1:
        raise ConfigurationError(f"{folder}: config.json: num_hidden_layers is {decoder.num_layers}, not 1 or more")
    tensors = TensorReader(folder, torch.float32, torch.device("cpu"), takes_pickle=True)
    is_third = tensors.find("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight") is not None
    if not is_third and tensors.find("fc.weight") is None:
        raise ConfigurationError(
            f"{folder} has no EAGLE head, as it has neither fc.weight nor a hidden_norm: set draft.model to the folder "
            "of one (bundled, for the bundled target: outrider-eagle-12m)"
        )
    return HeadConfig(
        decoder=replace(
            decoder,
            vocab_size=values.get("draft_vocab_size") or target.vocab_size,
            # Many heads have a limit of 2,048 positions in their config.json but can draft beyond it.
            max_position_embeddings=target.max_position_embeddings,
            captured_layers=(AFTER_NORM if values.get("norm_output") else decoder.num_layers,),
            mask_token_id=None,
        ),
        captured_layers=_captured_layers(folder, values, target.num_layers) if is_third else (AFTER_NORM,),
        is_third=is_third,
        target_hidden_size=target.hidden_size,
        norm_before_residual=bool(values.get("norm_before_residual", is_of_speculators)),
        norm_before_fc=bool(_option(values, "norm_before_fc")),
        has_fc_norm=bool(values.get("fc_norm")),
    )


def _option(values: Mapping[str, Any], name: str) -> Any:
    """Returns a setting of `eagle_config`, or of the configuration that contains it."""
    return (values.get("eagle_config") or {}).get(name, values.get(name))


def _captured_layers(folder: Path, values: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Returns, for each state that an EAGLE-3 head reads, how many of the target's `num_layers` layers precede it."""
    if _option(values, "use_aux_hidden_state") is False:
        return (AFTER_NORM,)
    named = _option(values, "eagle_aux_hidden_state_layer_ids") or usual_layers(num_layers)
    if not all(type(layer) is int and 0 <= layer <= num_layers for layer in named):
        raise ConfigurationError(
            f"{folder}: the head reads the states after {list(named)} layers, but its target has {num_layers}: set "
            "eagle_aux_hidden_state_layer_ids in its config.json"
        )
    return tuple(named)


def usual_layers(num_layers: int) -> tuple[int, int, int]:
    """Returns how many of a target's `num_layers` layers precede each state that EAGLE-3 reads, if nothing is set."""
    return 2, num_layers // 2, num_layers - 3


def load_eagle_head(folder: Path, target: LoadedModel, quantization: Quantization | None = None) -> DecoderHead:
    """Returns the head in `folder`, which shares tensors with `target`. Raises ConfigurationError.

    The head has the device and dtype of `target`. `quantization`: format of the weights of the head's layers.
    """
    shared = target.weights
    config = read_eagle_config(folder, target.config)
    decoder = config.decoder
    form = form_like(target.form, decoder, shared.dtype)
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
    target_ids = read_target_ids(folder, tensors, decoder.vocab_size, target.config.vocab_size)
    if target_ids is not None:
        target_ids = target_ids.to(shared.device)
    if tensors.find("lm_head.weight") is not None and (config.is_third or hidden != target.config.hidden_size):
        head = form.weight_format.make_linear(reader.by_token("lm_head.weight"))
    elif decoder.vocab_size != target.config.vocab_size or hidden != target.config.hidden_size:
        raise ConfigurationError(f"{folder} has no lm_head.weight, but the head and its target differ in size")
    elif form.activations != target.form.activations:
        raise ConfigurationError(
            f"{folder}: the head uses its target's output layer, so the same kernels must support both, but only one "
            f"of the head_dim {decoder.head_dim} of the head and {target.config.head_dim} of the target is supported"
        )
    else:
        head = shared.head
    weights = ModelWeights(embedding, tuple(layers), norm, head)
    model = LoadedModel(decoder, weights, form, is_head=True)
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
        if target.config.embedding_scale != 1:
            raise ConfigurationError(f"{folder}: the head has no embed_tokens.weight, and its target scales its own")
        return shared
    own = tensors.read([("embed_tokens.weight", shape[0])], shape[1])
    return shared if shared.shape == own.shape and torch.equal(shared, own) else own


def read_target_ids(folder: Path, tensors: TensorReader, num_own: int, num_target: int) -> torch.Tensor | None:
    """Returns the target's ID of each of the head's tokens, on the CPU; None if the IDs are the same.

    `d2t` in the file is the target's ID minus the head's. Raises ConfigurationError.
    """
    if tensors.find("d2t") is None:
        if num_own != num_target:
            raise ConfigurationError(f"{folder}: the head has {num_own} tokens of {num_target} and no d2t to map them")
        return None
    ids = tensors.integers("d2t", num_own) + torch.arange(num_own)
    if ids.min() < 0 or ids.max() >= num_target or len(set(ids.tolist())) != num_own:
        raise ConfigurationError(f"{folder}: d2t does not name {num_own} different tokens of the target's {num_target}")
    return ids
