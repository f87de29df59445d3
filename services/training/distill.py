"""The loss of distillation: a draft learns the target's whole distribution at every position."""

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from services.training.trainer import LossFunction


def distillation_loss(target: LlamaForCausalLM) -> LossFunction[LlamaForCausalLM]:
    """Return the loss KL(target || draft) per token, in nats. ``target`` is not changed."""

    def loss(draft: LlamaForCausalLM, windows: Tensor) -> Tensor:
        inputs = windows[:, :-1]
        with torch.no_grad():
            target_logits = target(input_ids=inputs, use_cache=False).logits
            target_log_probs = target_logits.float().log_softmax(dim=-1)
        draft_logits = draft(input_ids=inputs, use_cache=False).logits
        draft_log_probs = draft_logits.float().log_softmax(dim=-1)
        divergence = target_log_probs.exp() * (target_log_probs - draft_log_probs)
        mean: Tensor = divergence.sum(dim=-1).mean()
        return mean

    return loss
