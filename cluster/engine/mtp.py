"""Reads the multi-token prediction (MTP) module of MiMo-7B (Xiaomi, arXiv 2505.07608).

The module is stored in the target's checkpoint and shares the target's embedding and output layer. It was trained to
draft one token. For further drafts it reads its own state after its last norm, as in vLLM.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cluster.engine.checkpoint import TensorReader, weight_map
from cluster.engine.heads import DecoderHead, HeadConfig
from cluster.engine.loader import LoadedModel, WeightReader, form_like
from cluster.engine.model_config import AFTER_NORM, ModelConfig
from cluster.engine.quantization import Quantization
from cluster.engine.weights import ModelWeights
from cluster.errors import ConfigurationError

_MODULE = "model.mtp_layers.0"


def read_mtp_config(folder: Path, target: ModelConfig) -> HeadConfig:
    """Returns the shape of the module of `target`, whose folder is `folder`. Raises ConfigurationError if it has none.

    If there are several modules, only the first one is used.
    """
    if f"{_MODULE}.input_proj.weight" not in weight_map(folder):
        raise ConfigurationError(
            f"{folder} has no MTP module as in MiMo-7B: it has no {_MODULE}.input_proj.weight; choose another "
            "draft.drafter"
        )
    decoder = replace(target, num_layers=1, sliding_windows=(), captured_layers=(AFTER_NORM,), mask_token_id=None)
    return HeadConfig(decoder, (target.num_layers,), target.hidden_size)


def load_mtp_head(folder: Path, target: LoadedModel, quantization: Quantization | None = None) -> DecoderHead:
    """Returns the MTP module in `folder`, the folder of `target`, with the target's device and dtype.

    Raises ConfigurationError if it has none. `quantization`: format of the weights of the module's layer.
    """
    shared, config = target.weights, read_mtp_config(folder, target.config)
    form, hidden = form_like(target.form, config.decoder, shared.dtype), config.decoder.hidden_size
    tensors = TensorReader(folder, shared.dtype, shared.device)
    reader = WeightReader(config.decoder, tensors, form.weight_format, quantization)
    layer = reader.layer(_MODULE, reader.norm(f"{_MODULE}.input_layernorm"), hidden)
    weights = ModelWeights(shared.embedding, (layer,), reader.norm(f"{_MODULE}.final_layernorm"), shared.head)
    return DecoderHead(
        config,
        LoadedModel(config.decoder, weights, form, is_head=True),
        reader.linear((f"{_MODULE}.input_proj", hidden), in_features=2 * hidden, has_bias=False),
        reader.norm(f"{_MODULE}.hidden_layernorm"),
        reader.norm(f"{_MODULE}.token_layernorm"),
    )
