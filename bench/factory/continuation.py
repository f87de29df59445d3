"""Batched generation by the Gumbel-max rule, for making samples and measuring acceptance.

The token chosen is argmax(logits / T + g) with Gumbel noise g, an exact sample at temperature T. Scaled
by T it reads argmax(logits + T * g), which includes greedy decoding as T = 0 and lets every row have its
own temperature.
"""

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

NoiseFunction = Callable[[int], Tensor]
"""Maps the index of a generated token to its Gumbel noise, [rows, vocab_size]."""


def gumbel_noise(shape: tuple[int, ...], device: torch.device, *key: object) -> Tensor:
    """Return float32 noise that depends only on its arguments."""
    seed = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "big") >> 1
    generator = torch.Generator(device).manual_seed(seed)
    return -torch.empty(shape, device=device).exponential_(generator=generator).log()


def choose(logits: Tensor, temperatures: Tensor, noise: Tensor) -> Tensor:
    """Pick a token per row. Shapes: logits and noise [rows, vocab_size], temperatures [rows]."""
    return (logits.float() + temperatures[:, None] * noise).argmax(dim=-1)


@torch.inference_mode()
def continue_prompts(
    model: LlamaForCausalLM,
    prompts: Tensor,  # [rows, prompt_length]
    num_new_tokens: int,
    temperatures: Tensor,  # [rows]
    noise: NoiseFunction,
) -> Tensor:
    """Return prompts and continuations, [rows, prompt_length + num_new_tokens].

    The end-of-text token doesn't end a row: another document follows it, as in training.
    """
    cache = DynamicCache(config=model.config)
    tokens = [prompts]
    inputs = prompts
    for index in range(num_new_tokens):
        output = model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        inputs = choose(output.logits[:, -1], temperatures, noise(index))[:, None]
        tokens.append(inputs)
    return torch.cat(tokens, dim=1)
