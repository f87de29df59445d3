"""Samples text from the target to train drafts on: acceptance is measured on such text."""

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaForCausalLM

from bench.factory.continuation import continue_prompts, gumbel_noise
from bench.factory.tokens import TokenArray
from services.training.recipe import random_numbers
from services.training.traffic import TEMPERATURES

PROMPT_LENGTH = 64
NEW_TOKENS = 256


def sample_rows(
    model: LlamaForCausalLM,
    stream: Tensor,
    num_rows: int,
    batch_size: int,
    seed: int,
    prompt_length: int = PROMPT_LENGTH,
    num_new_tokens: int = NEW_TOKENS,
) -> TokenArray:
    """Continue random pieces of the training stream, a third of the rows at each temperature.

    Returns [num_rows, prompt_length + num_new_tokens]. The rows depend on the batch size.
    """
    device = stream.device
    offsets = torch.arange(prompt_length, device=device)
    pieces: list[TokenArray] = []
    progress = tqdm(total=num_rows, desc="samples", unit=" rows", mininterval=5)
    for first_row in range(0, num_rows, batch_size):
        size = min(batch_size, num_rows - first_row)
        starts = random_numbers(seed, first_row).integers(len(stream) - prompt_length, size=size)
        prompts = stream[torch.from_numpy(starts).to(device)[:, None] + offsets].long()
        temperatures = torch.tensor(TEMPERATURES, device=device).repeat(-(-size // 3))[:size]
        shape = (size, model.config.vocab_size)

        def noise(index: int, shape: tuple[int, int] = shape, first_row: int = first_row) -> Tensor:
            return gumbel_noise(shape, device, seed, first_row, index)

        rows = continue_prompts(model, prompts, num_new_tokens, temperatures, noise)
        pieces.append(rows.cpu().numpy().astype(np.uint16))
        progress.update(size)
    progress.close()
    return np.concatenate(pieces)
