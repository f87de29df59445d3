"""Tests of reading `config.json`: as published models and transformers 5 write it, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.engine.model_config import ModelConfig
from cluster.engine.rope import rotary_table
from cluster.engine.rope_config import LinearScaling, Llama3Scaling, LongRopeScaling, RopeConfig, YarnScaling
from cluster.errors import ConfigurationError

from .checkpoints import LLAMA3_ROPE, YARN_ROPE

ARCHITECTURES = "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"

LLAMA_2_7B = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
LLAMA_3_2_1B = LLAMA_2_7B | {
    "attention_bias": False,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}
MISTRAL_7B = LLAMA_2_7B | {
    "architectures": ["MistralForCausalLM"],
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 8,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
}
QWEN_2_5_7B = LLAMA_2_7B | {
    "architectures": ["Qwen2ForCausalLM"],
    "eos_token_id": 151645,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN_3_4B = QWEN_2_5_7B | {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}

GEMMA_3_1B = LLAMA_2_7B | {
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_act": ...,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": ...,
    "vocab_size": 262144,
}
GEMMA_3_27B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "text_config": {
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "model_type": "gemma3_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152},
}
PHI_4_MINI = LLAMA_2_7B | {
    "architectures": ["Phi3ForCausalLM"],
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {"long_factor": [2.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "vocab_size": 200064,
}


def read(folder: Path, values: dict[str, Any]) -> ModelConfig:
    """Keys that are set to ... are left out."""
    (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))
    return ModelConfig.from_folder(folder)


class TestPublishedModels:
    def test_gemma_3(self, tmp_path: Path) -> None:
        config = read(tmp_path, GEMMA_3_1B)
        assert [config.attention_span(layer) for layer in range(4, 7)] == [512, 32768, 512]
        assert [config.rope_of(layer).theta for layer in range(4, 7)] == [1e4, 1e6, 1e4]
        assert (config.query_scale, config.has_own_head, config.eos_token_ids) == (1.0, True, (1, 106))
        assert config.tie_word_embeddings
        assert config.embedding_scale == 1152**0.5

    def test_the_text_half_of_gemma_3(self, tmp_path: Path) -> None:
        config = read(tmp_path, GEMMA_3_27B)
        assert (config.vocab_size, config.max_position_embeddings, config.num_kv_heads) == (262_208, 131_072, 16)
        assert config.rope_of(5) == RopeConfig(1e6, LinearScaling(8.0))
        assert config.rope_of(0) == RopeConfig(1e4)
        assert config.query_scale == (128 / 168) ** 0.5
        assert config.eos_token_ids == (1, 106)

    def test_phi_4_mini(self, tmp_path: Path) -> None:
        config = read(tmp_path, PHI_4_MINI)
        assert config.rope == RopeConfig(1e4, LongRopeScaling((2.0,) * 48, 1.1902380714238083), 0.75)
        assert config.rope.num_rotated(config.head_dim) == 96
        assert config.attention_span(0) > config.max_position_embeddings

    def test_llama_2(self, tmp_path: Path) -> None:
        config = read(tmp_path, LLAMA_2_7B)
        assert (config.head_dim, config.num_kv_heads, config.rope) == (128, 32, RopeConfig(1e4))
        assert not config.has_qkv_bias
        assert not config.has_qk_norm
        assert config.attention_span(0) == 4096

    def test_llama_3_2(self, tmp_path: Path) -> None:
        config = read(tmp_path, LLAMA_3_2_1B)
        assert config.rope == RopeConfig(5e5, Llama3Scaling(32.0, 1.0, 4.0, 8192))
        assert (config.head_dim, config.tie_word_embeddings) == (64, True)
        assert config.eos_token_ids == (128001, 128008, 128009)

    @pytest.mark.parametrize(("window", "windows"), [(4096, (4096,) * 32), (None, ()), (..., (4096,) * 32)])
    def test_mistral(self, tmp_path: Path, window: Any, windows: tuple[int, ...]) -> None:
        config = read(tmp_path, MISTRAL_7B | {"sliding_window": window})
        assert config.sliding_windows == windows
        assert config.attention_span(31) == (windows[31] if windows else 32768)

    def test_qwen_2_5(self, tmp_path: Path) -> None:
        config = read(tmp_path, QWEN_2_5_7B)
        assert (config.has_qkv_bias, config.has_output_bias, config.has_mlp_bias) == (True, False, False)
        assert not config.sliding_windows
        assert not config.has_qk_norm

    @pytest.mark.parametrize("attention_bias", [True, False, ...])
    def test_mimo_has_the_biases_of_qwen_2(self, tmp_path: Path, attention_bias: Any) -> None:
        changes = {"architectures": ["MiMoForCausalLM"], "attention_bias": attention_bias}
        assert read(tmp_path, QWEN_2_5_7B | changes) == read(tmp_path, QWEN_2_5_7B)

    def test_qwen_3(self, tmp_path: Path) -> None:
        config = read(tmp_path, QWEN_3_4B)
        assert (config.has_qk_norm, config.has_qkv_bias, config.head_dim) == (True, False, 128)
        assert read(tmp_path, QWEN_3_4B | {"head_dim": ...}).head_dim == 128  # not hidden_size / num_heads

    @pytest.mark.parametrize(
        ("values", "windows"),
        [
            ({"max_window_layers": 21}, (32768,) * 21 + (512,) * 7),
            ({"layer_types": ["full_attention"] * 27 + ["sliding_attention"]}, (32768,) * 27 + (512,)),
            ({"max_window_layers": 28}, ()),
        ],
    )
    def test_qwens_windows_by_layer(self, tmp_path: Path, values: dict[str, Any], windows: tuple[int, ...]) -> None:
        values = QWEN_2_5_7B | {"use_sliding_window": True, "sliding_window": 512} | values
        assert read(tmp_path, values).sliding_windows == windows


class TestEndTokens:
    """The tokens that end a sequence are those of all files: fine-tunes often change only the tokenizer's."""

    @pytest.mark.parametrize(
        ("tokenizer_config", "expected"),
        [
            ({"eos_token": "<|im_end|>"}, (2, 3, 5)),
            ({"eos_token": {"content": "<|im_end|>"}}, (2, 3, 5)),
            ({"eos_token": "<|im_end|>", "added_tokens_decoder": {"7": {"content": "<|im_end|>"}}}, (2, 3, 7)),
            ({"eos_token": "<|unknown|>"}, (2, 3)),
            ({"eos_token": None}, (2, 3)),
        ],
    )
    def test_of_all_files(self, tmp_path: Path, tokenizer_config: dict[str, Any], expected: tuple[int, ...]) -> None:
        files = {
            "generation_config": {"eos_token_id": [3, 2]},
            "tokenizer_config": tokenizer_config,
            "tokenizer": {"added_tokens": [{"id": 5, "content": "<|im_end|>"}, {"id": 6, "content": "</s>"}]},
        }
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        assert read(tmp_path, LLAMA_2_7B).eos_token_ids == expected


class TestRope:
    def test_yarn_stretches_beyond_the_positions_of_the_config(self, tmp_path: Path) -> None:
        """As Qwen documents it: `rope_scaling` is added to a config of 32,768 positions."""
        yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
        assert read(tmp_path, QWEN_2_5_7B).max_position_embeddings == 32768
        assert read(tmp_path, QWEN_2_5_7B | {"rope_scaling": yarn}).max_position_embeddings == 131072

    @pytest.mark.parametrize(
        ("values", "rope"),
        [
            ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, RopeConfig(5e5)),
            ({"rope_theta": 2e4, "rope_scaling": None}, RopeConfig(2e4)),
            ({}, RopeConfig(1e4)),
            ({"rope_theta": 2e4, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, RopeConfig(2e4)),
            (
                {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 8192},
                RopeConfig(1e6, YarnScaling(4.0, 8192, 32.0, 1.0, True, 1.1386294361119891)),
            ),
        ],
    )
    def test_of_new_and_old_folders(self, tmp_path: Path, values: dict[str, Any], rope: RopeConfig) -> None:
        assert read(tmp_path, LLAMA_2_7B | values).rope == rope

    @pytest.mark.parametrize(
        "rope",
        [
            {"rope_type": "default", "rope_theta": 10_000.0},
            {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.5},
            {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0},
            LLAMA3_ROPE | {"rope_theta": 500_000.0, "original_max_position_embeddings": 8192},
            YARN_ROPE | {"rope_theta": 1_000_000.0, "original_max_position_embeddings": 8192},
            YARN_ROPE | {"attention_factor": 0.8, "beta_fast": 20.0, "beta_slow": 2.0, "truncate": False},
            YARN_ROPE | {"mscale": 0.707, "mscale_all_dim": 1.0},
            YARN_ROPE | {"factor": None},
        ],
        ids=lambda rope: f"{rope['rope_type']} {len(rope)}",
    )
    def test_the_table_is_that_of_transformers_but_for_roundings(self, tmp_path: Path, rope: dict[str, Any]) -> None:
        """Theirs differs between processors by one unit in the last place of frequencies, cosines and sines."""
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        length = 32768
        values = LLAMA_2_7B | {"max_position_embeddings": length, "rope_parameters": rope, "rope_scaling": ...}
        table = rotary_table(read(tmp_path, values), 0)
        embedding = LlamaRotaryEmbedding(LlamaConfig(max_position_embeddings=length, rope_parameters=dict(rope)))
        expected = embedding(torch.zeros(1), torch.arange(length)[None])
        angles = torch.outer(torch.arange(length).float(), embedding.inv_freq)
        for own, theirs in zip(table, expected, strict=True):
            assert ((own - theirs[0, :, :64]).abs() <= 1.5e-7 + 2**-23 * angles).all()


class TestRefused:
    """In one line that says what is supported."""

    @pytest.mark.parametrize(
        ("values", "said"),
        [
            ({"architectures": ["GPT2LMHeadModel"]}, f"a GPT2LMHeadModel; supported: {ARCHITECTURES}"),
            (
                {"architectures": ["SomeVisionModel"], "text_config": {"model_type": "gpt2"}},
                f"a SomeVisionModel with a gpt2 for text; supported: {ARCHITECTURES}",
            ),
            ({"architectures": ...}, f"a none; supported: {ARCHITECTURES}"),
            ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: 'silu'"),
            (MISTRAL_7B | {"attention_bias": True}, "attention_bias True is not supported; supported: False"),
            (QWEN_3_4B | {"mlp_bias": True}, "mlp_bias True is not supported; supported: False"),
            (
                {"rope_scaling": {"type": "longrope", "factor": 2.0}},
                "config.json has no 'short_factor'",
            ),
            (
                {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 12}},
                "longrope has 12 factors for the 64 pairs of values that turn",
            ),
            ({"rope_scaling": {"type": "su"}}, "'su' is not supported; supported: default, linear, llama3, yarn, dyna"),
            ({"partial_rotary_factor": 0.18}, "partial_rotary_factor 0.18 rotates 23 of 128 values"),
            ({"rope_parameters": {"some_attention": {"rope_theta": 1e4}}}, "config.json has no 'full_attention'"),
            (GEMMA_3_1B | {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0 is not supported"),
            (
                {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
                "quantization with quant_method 'bitsandbytes', load_in_4bit True is not supported; supported: gptq",
            ),
            (
                {"quantization_config": {"quant_method": "awq", "bits": 4, "version": "gemv"}},
                "quant_method 'awq', bits 4, version 'gemv' is not supported",
            ),
            (
                QWEN_2_5_7B | {"use_sliding_window": True, "layer_types": ["chunked_attention"] * 28},
                "layer type 'chunked_attention' is not supported; supported: full_attention, sliding_attention",
            ),
        ],
    )
    def test_what_is_not_supported(self, tmp_path: Path, values: dict[str, Any], said: str) -> None:
        with pytest.raises(ConfigurationError) as refusal:
            read(tmp_path, LLAMA_2_7B | values)
        assert said in str(refusal.value)
        assert "\n" not in str(refusal.value)

    @pytest.mark.parametrize(
        ("values", "said"),
        [
            ({"vocab_size": ...}, "config.json has no 'vocab_size'"),
            ({"rms_norm_eps": ...}, "config.json has no 'rms_norm_eps'"),
            ({"rope_scaling": {"rope_type": "linear"}}, "config.json has no 'factor'"),
            ({"hidden_size": "wide"}, "config.json: invalid literal"),
        ],
    )
    def test_what_is_missing_or_no_number(self, tmp_path: Path, values: dict[str, Any], said: str) -> None:
        with pytest.raises(ConfigurationError, match=said):
            read(tmp_path, LLAMA_2_7B | values)
