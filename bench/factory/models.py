"""The two models: their shapes, initial weights, saving and loading."""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from bench.factory.tokenizer import END_OF_TEXT_ID, IM_END_ID, VOCABULARY_SIZE
from services.training.attention import MASKLESS_ATTENTION

MAX_MODEL_LENGTH = 2048


@dataclass(frozen=True)
class ModelShape:
    """The sizes that differ between models; the field names are LlamaConfig's."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 64
    vocab_size: int = VOCABULARY_SIZE


TARGET_SHAPE = ModelShape(
    hidden_size=384,
    intermediate_size=1152,
    num_hidden_layers=6,
    num_attention_heads=6,
    num_key_value_heads=2,
)
DRAFT_SHAPE = ModelShape(
    hidden_size=192,
    intermediate_size=640,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=3,
)


def build_model(shape: ModelShape, seed: int) -> LlamaForCausalLM:
    """Returns a float32 model with random weights that depend on ``shape`` and ``seed`` only."""
    torch.manual_seed(seed)
    config = LlamaConfig(  # type: ignore[call-arg]
        **asdict(shape),
        max_position_embeddings=MAX_MODEL_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END_OF_TEXT_ID,
        # The end-of-text token as padding would have a zero embedding without a gradient; `save_model` sets it.
        pad_token_id=None,
        attn_implementation=MASKLESS_ATTENTION,
    )
    return LlamaForCausalLM(config)  # type: ignore[no-untyped-call]


def save_model(model: LlamaForCausalLM, directory: Path) -> None:
    """Writes a Hugging Face model folder in bfloat16. The model itself is converted, too."""
    model.to(torch.bfloat16)  # type: ignore[arg-type]
    model.config.pad_token_id = END_OF_TEXT_ID
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=None,
        # A document ends with the first, a chat turn with the second.
        eos_token_id=[END_OF_TEXT_ID, IM_END_ID],
        pad_token_id=END_OF_TEXT_ID,
    )
    model.save_pretrained(directory)


def load_model(directory: Path, device: torch.device, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Loads a saved model for inference. Its weights have the precision of the file, bfloat16."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation=MASKLESS_ATTENTION
    )
    model.requires_grad_(False)
    model.to(device)  # type: ignore[arg-type]
    model.train(False)
    return model
