"""Computes the logarithm of a softmax's denominator over the vocabulary, without keeping its logits.

With a vocabulary of 49,152 tokens, a step of 1,400 places would write and read 280 MB of logits about ten times. Here
the logits of a few rows at a time are computed and dropped, and computed again for the gradient (Wijmans et al. 2024,
"Cut your losses in large-vocabulary language models").
"""

from typing import Any

import torch
from torch import Tensor

from cluster.engine.cpu_kernels import InstructionSet, best_instruction_set, has_kernels

_ROWS = 128  # rows per piece


def log_partition(states: Tensor, head: Tensor) -> Tensor:
    """Returns the logsumexp of each row of `states @ head.T`, [rows].

    `states`: [rows, hidden]; `head`: [vocab_size, hidden]; both float32. On a processor with units for bfloat16, both
    are rounded to bfloat16 before they are multiplied.
    """
    result: Tensor = _LogPartition.apply(states, head)  # type: ignore[no-untyped-call]
    return result


class _LogPartition(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, head: Tensor) -> Tensor:
        has_units = has_kernels() and best_instruction_set() >= InstructionSet.AVX512_BF16
        dtype = torch.bfloat16 if has_units else torch.float32
        states, head = states.to(dtype), head.to(dtype)
        sums = torch.cat([(rows @ head.T).float().logsumexp(dim=-1) for rows in torch.split(states, _ROWS)])
        ctx.save_for_backward(states, head, sums)
        return sums

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        states, head, sums = ctx.saved_tensors
        of_states, of_head = [], torch.zeros(head.shape)
        parts = (torch.split(tensor, _ROWS) for tensor in (states, sums, gradients[0]))
        for rows, own_sums, gradient in zip(*parts, strict=True):
            logits = (rows @ head.T).float()
            shares = logits.sub_(own_sums[:, None]).exp_().mul_(gradient[:, None]).to(head.dtype)
            of_states.append((shares @ head).float())
            of_head += shares.T @ rows
        return torch.cat(of_states), of_head
