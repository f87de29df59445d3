"""The losses of distillation: a draft, or a head, learns the target's distribution at every position."""

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from bench.factory.trainer import LossFunction
from services.training.eagle import TrainableEagle, captured_states
from services.training.heads import coupled_loss


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


def eagle_loss(target: LlamaForCausalLM, num_steps: int) -> LossFunction[TrainableEagle]:
    """Returns the loss: the mean `coupled_loss` over `num_steps` draft steps.

    The later steps train the head on its own output, as in drafting. `target` is not changed.
    """

    def loss(head: TrainableEagle, windows: Tensor) -> Tensor:
        inputs = windows[:, :-1]
        with torch.no_grad():
            embeddings = target.model.embed_tokens(inputs)
            output = target.model(input_ids=inputs, use_cache=False, output_hidden_states=True)
            probabilities = target.lm_head(output.last_hidden_state).float().softmax(dim=-1)[..., head.target_ids]
        states = captured_states(head, output.hidden_states)
        steps = head.step_logits(embeddings, states, num_steps, slice(None))
        losses = [
            coupled_loss(logits, probabilities[:, depth : depth + logits.shape[1]])
            for depth, logits in enumerate(steps, start=1)
        ]
        return torch.stack(losses).mean()

    return loss
