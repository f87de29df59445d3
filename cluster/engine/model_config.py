"""The shape of a model, read from the `config.json` of a Hugging Face folder."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from cluster.engine.rope_config import LayerKind, RopeConfig, Values
from cluster.engine.stored_format import StoredFormat
from cluster.errors import ConfigurationError

AFTER_NORM = -1
"In `captured_layers`: the state after the last norm, from which the output layer computes logits."


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder with rotary positions, RMS norms, grouped-query attention and a gated MLP."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    has_qkv_bias: bool = False
    has_output_bias: bool = False  # whether attention's output has a bias
    has_mlp_bias: bool = False
    has_qk_norm: bool = False  # whether each head's query and key are normalized before the rotation
    sliding_windows: tuple[int, ...] = ()  # window of each layer, in tokens; empty: no layer has one
    captured_layers: tuple[int, ...] = ()  # states that steps store: how many layers precede each, or AFTER_NORM
    stored_format: StoredFormat | None = (
        None  # how the checkpoint stores quantized projections; None: none are quantized
    )
    layer_ropes: tuple[RopeConfig, ...] = ()  # of each layer; empty: `rope` of all
    has_gelu: bool = False  # whether the MLP is gated by GELU's tanh form; otherwise by SiLU
    has_norms_after: bool = False  # whether attention's and the MLP's outputs are normalized before they are added
    has_unit_norms: bool = False  # whether a norm multiplies by 1 plus its weight
    has_fused_projections: bool = False  # whether the checkpoint has qkv_proj and gate_up_proj
    embedding_scale: float = 1.0  # of the embeddings as the first layer's input, not as the head's weight
    query_scale: float = 1.0  # of queries, in addition to 1 / sqrt(head_dim)
    mask_token_id: int | None = None  # PARD's `pard_token`: with it as input the model drafts several tokens at once

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        return self.q_size, self.kv_size, self.kv_size

    @property
    def has_own_head(self) -> bool:
        """True if head and embedding take memory of their own."""
        return not self.tie_word_embeddings or self.embedding_scale != 1

    @property
    def state_size(self) -> int:
        """Number of values that a step stores for each token in addition to keys and values."""
        return len(self.captured_layers) * self.hidden_size

    @property
    def captures_end(self) -> bool:
        """True if steps store a state from after the last layer, which must then be computed for all rows."""
        return self.num_layers in self.captured_layers or AFTER_NORM in self.captured_layers

    def resolve_max_model_len(self, wanted: int | None) -> int:
        """Returns `wanted`, or the model's limit if `wanted` is None. Raises ConfigurationError above the limit."""
        if wanted is not None and wanted > self.max_position_embeddings:
            raise ConfigurationError(
                f"max_model_len {wanted} exceeds the {self.max_position_embeddings} positions of the model"
            )
        return wanted or self.max_position_embeddings

    def attention_span(self, layer: int) -> int:
        """Returns the maximum number of positions that a row of `layer` attends to, including its own."""
        return self.sliding_windows[layer] if self.sliding_windows else self.max_position_embeddings

    def rope_of(self, layer: int) -> RopeConfig:
        """Returns the rotation of queries and keys in `layer`."""
        return self.layer_ropes[layer] if self.layer_ropes else self.rope

    def with_rows(self, rows: Sequence[int]) -> ModelConfig:
        """Returns the configuration with an embedding and a head that consist of the rows `rows` of this model's."""
        mask = self.mask_token_id
        if mask is not None:
            mask = rows.index(mask) if mask in rows else len(rows)  # an invalid ID: `model_drafter` reports it
        return replace(self, vocab_size=len(rows), mask_token_id=mask)

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Reads the shape from `folder`. Raises ConfigurationError if the engine does not support the model."""
        values = read_json(folder / "config.json")
        architecture = (values.get("architectures") or ["none"])[0]
        family = FAMILIES.get(architecture)
        if family is None and isinstance(values.get("text_config"), dict):  # the text half of a multimodal model
            of_all = {key: values[key] for key in ("eos_token_id", "quantization_config") if key in values}
            values = of_all | values["text_config"]
            architecture += f" with a {values.get('model_type')} for text"
            family = FAMILIES.get(_TEXT_MODELS.get(values.get("model_type", ""), ""))
        if family is None:
            raise ConfigurationError(
                f"{folder} holds a {architecture}; supported: {', '.join(FAMILIES)}, and what vLLM runs: "
                "--target.engine vllm, or --draft.drafter vllm for a draft"
            )
        return cls.from_values(family, folder, values)

    @classmethod
    def from_values(cls, family: Family, folder: Path, values: Values) -> ModelConfig:
        """Returns the shape that `values`, read from `folder`, describe. Raises ConfigurationError."""
        try:
            _refuse_unsupported_options(family, values)
            return cls._from_values(family, folder, {**family.defaults, **values})
        except KeyError as error:
            raise ConfigurationError(f"{folder}: config.json has no {error}") from error
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"{folder}: config.json: {error}") from error

    @classmethod
    def _from_values(cls, family: Family, folder: Path, values: Values) -> ModelConfig:
        num_layers, num_heads = int(values["num_hidden_layers"]), int(values["num_attention_heads"])
        rope = RopeConfig.from_values(values)
        max_position_embeddings = rope.max_length(int(values["max_position_embeddings"]))
        hidden_size, head_dim = int(values["hidden_size"]), values.get("head_dim")
        head_dim = int(head_dim or hidden_size // num_heads)
        windows = [family.sliding_window(values, layer) for layer in range(num_layers)]
        sliding_rope = RopeConfig.from_values(values, "sliding_attention") if any(windows) else rope
        for each in (rope, sliding_rope):
            each.check(head_dim)
        has_attention_bias = bool(values.get("attention_bias"))
        return cls(
            vocab_size=int(values["vocab_size"]),
            hidden_size=hidden_size,
            intermediate_size=int(values["intermediate_size"]),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=int(values.get("num_key_value_heads") or num_heads),
            head_dim=head_dim,
            rms_norm_eps=float(values["rms_norm_eps"]),
            rope=rope,
            max_position_embeddings=max_position_embeddings,
            tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
            eos_token_ids=eos_token_ids(folder, values),
            has_qkv_bias=family.has_qkv_bias or has_attention_bias,
            has_output_bias=has_attention_bias and not family.has_qkv_bias,
            has_mlp_bias=bool(values.get("mlp_bias")),
            has_qk_norm=family.has_qk_norm,
            layer_ropes=() if sliding_rope == rope else tuple(sliding_rope if one else rope for one in windows),
            has_gelu=family.is_gemma,
            has_norms_after=family.is_gemma,
            has_unit_norms=family.is_gemma,
            has_fused_projections=family.has_fused_projections,
            embedding_scale=math.sqrt(hidden_size) if family.is_gemma else 1.0,
            query_scale=math.sqrt(head_dim / values.get("query_pre_attn_scalar", head_dim)),
            mask_token_id=None if values.get("pard_token") is None else int(values["pard_token"]),
            stored_format=StoredFormat.of(quantization)
            if (quantization := values.get("quantization_config"))
            else None,
            sliding_windows=tuple(window or max_position_embeddings for window in windows) if any(windows) else (),
        )


def _no_window(values: Values, layer: int) -> None:
    return None


def _same_window(values: Values, layer: int) -> int | None:
    window: int | None = values["sliding_window"]
    return window


def _window_of_last(values: Values, layer: int) -> int | None:
    if not values.get("use_sliding_window"):
        return None
    return _window_by_type(values, layer, has_window=layer >= values["max_window_layers"])


def _window_but_of_every_nth(values: Values, layer: int) -> int | None:
    return _window_by_type(values, layer, has_window=(layer + 1) % values["sliding_window_pattern"] != 0)


def _window_by_type(values: Values, layer: int, *, has_window: bool) -> int | None:
    """Returns the window of `layer`. `has_window`: whether it has one in old folders, which have no `layer_types`."""
    if types := values.get("layer_types"):
        supported = get_args(LayerKind)
        if types[layer] not in supported:
            raise ValueError(f"layer type {types[layer]!r} is not supported; supported: {', '.join(supported)}")
        has_window = types[layer] == "sliding_attention"
    return _same_window(values, layer) if has_window else None


@dataclass(frozen=True, slots=True)
class Family:
    """Differences of an architecture from Llama."""

    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    has_fused_projections: bool = False
    is_gemma: bool = False  # GELU, norms after as well as before, their weights plus 1, scaled embeddings
    bias_options: tuple[str, ...] = ()  # keys of config.json that switch biases on
    sliding_window: Callable[[Values, int], int | None] = _no_window  # window of a layer
    defaults: Mapping[str, Any] = field(default_factory=dict)  # transformers' values of keys that may be missing


_QWEN_DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256,
    "eos_token_id": 1,
}

FAMILIES = {
    "LlamaForCausalLM": Family(bias_options=("attention_bias", "mlp_bias")),
    "MistralForCausalLM": Family(
        sliding_window=_same_window, defaults={"num_key_value_heads": 8, "sliding_window": 4096}
    ),
    "Qwen2ForCausalLM": Family(has_qkv_bias=True, sliding_window=_window_of_last, defaults=_QWEN_DEFAULTS),
    "Qwen3ForCausalLM": Family(
        has_qk_norm=True,
        bias_options=("attention_bias",),
        sliding_window=_window_of_last,
        defaults={**_QWEN_DEFAULTS, "head_dim": 128},
    ),
    "MiMoForCausalLM": Family(
        has_qkv_bias=True,
        bias_options=("attention_bias",),  # only of query, keys and values, as in Qwen2
        sliding_window=_window_of_last,
        defaults=_QWEN_DEFAULTS,
    ),
    "Phi3ForCausalLM": Family(  # Phi-4 and Phi-4-mini, too
        has_fused_projections=True, sliding_window=_same_window, defaults={"sliding_window": None}
    ),
    "Gemma3ForCausalLM": Family(
        has_qk_norm=True, is_gemma=True, sliding_window=_window_but_of_every_nth, defaults=_GEMMA_DEFAULTS
    ),
}


_TEXT_MODELS = {  # architectures by `model_type` of a `text_config`
    "gemma3_text": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def _refuse_unsupported_options(family: Family, values: Values) -> None:
    """Raises ValueError if an option of the model is not supported."""
    supported = {
        "hidden_act": "silu",
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "mlp_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
    }
    for key, value in supported.items():
        if key not in family.bias_options and values.get(key, value) != value:
            raise ValueError(f"{key} {values[key]!r} is not supported; supported: {value!r}")


def read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigurationError(f"{path} contains a {type(values).__name__} instead of an object")
    return values


def eos_token_ids(folder: Path, values: Values | None = None) -> tuple[int, ...]:
    """Returns the tokens that end a sequence. `values`: contents of `config.json`; None: read them.

    Combines the tokens of all configuration files, because fine-tunes often change only that of the tokenizer. Raises
    ConfigurationError if a file cannot be read.
    """
    values = read_json(folder / "config.json") if values is None else values
    generation = _read_json_if_any(folder / "generation_config.json")
    found: dict[int, None] = {}  # in order, without duplicates
    for eos in (values.get("eos_token_id"), generation.get("eos_token_id"), _tokenizers_eos(folder)):
        if eos is not None:
            found |= dict.fromkeys(map(int, eos) if isinstance(eos, list) else [int(eos)])
    return tuple(found)


def _tokenizers_eos(folder: Path) -> int | None:
    """Returns the ID of the `eos_token` of `tokenizer_config.json`; None if there is none."""
    config = _read_json_if_any(folder / "tokenizer_config.json")
    eos = config.get("eos_token")
    content = eos.get("content") if isinstance(eos, dict) else eos
    if not content:
        return None
    for token_id, token in (config.get("added_tokens_decoder") or {}).items():
        if token.get("content") == content:
            return int(token_id)
    added = _read_json_if_any(folder / "tokenizer.json").get("added_tokens") or ()
    return next((int(token["id"]) for token in added if token["content"] == content), None)


def _read_json_if_any(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
