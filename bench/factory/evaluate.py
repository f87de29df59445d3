"""Evaluates the models: held-out loss of the pair, acceptance of a draft or head.

Acceptance is measured on the target's own text. All models run in float32, so that the figures don't depend on the
device.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from bench.factory.continuation import choose, continue_prompts, gumbel_noise
from bench.factory.trainer import next_token_loss
from services.training.eagle import captured_states
from services.training.heads import TrainableHead
from services.training.recipe import random_numbers
from services.training.traffic_acceptance import NUM_SPECULATIVE_TOKENS, mean_committed

PROMPT_LENGTHS = (64, 128, 256)
NEW_TOKENS = 128
HEAD_SPECULATIVE_TOKENS = 3


@dataclass(frozen=True)
class HeldOutLoss:
    nats_per_token: float
    bits_per_byte: float


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of a draft at one temperature, with the same noise for draft and target.

    ``acceptance_rate`` is the share of all positions of the target's text where the draft, given the
    same prefix, proposes the target's choice. ``acceptance_length`` counts tokens committed per round
    of a chain of ``num_speculative_tokens``, bonus token included.
    """

    temperature: float
    acceptance_rate: float
    acceptance_length: float
    num_speculative_tokens: int
    num_prompts: int
    num_tokens: int


@torch.inference_mode()
def held_out_loss(model: LlamaForCausalLM, batches: Iterable[Tensor], tokens_per_byte: float) -> HeldOutLoss:
    """Returns the cross entropy over windows of held-out text."""
    losses = torch.stack([next_token_loss(model, windows) for windows in batches])
    nats = losses.mean().item()
    return HeldOutLoss(nats, nats / math.log(2) * tokens_per_byte)


def measure_acceptance(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    held_out_stream: Tensor,
    num_prompts: int,
    temperature: float,
    seed: int,
    prompt_lengths: tuple[int, ...] = PROMPT_LENGTHS,
    num_new_tokens: int = NEW_TOKENS,
) -> Acceptance:
    """Compares draft and target at every position of the target's continuations of held-out prompts."""
    matches = torch.cat(
        [
            _matches(target, draft, prompts, num_new_tokens, temperature, (seed, prompts.shape[1]))
            for prompts in _prompts(held_out_stream, num_prompts, prompt_lengths, seed)
        ]
    )
    return Acceptance(
        temperature=temperature,
        acceptance_rate=matches.float().mean().item(),
        acceptance_length=acceptance_length(matches.tolist(), NUM_SPECULATIVE_TOKENS),
        num_speculative_tokens=NUM_SPECULATIVE_TOKENS,
        num_prompts=len(matches),
        num_tokens=matches.numel(),
    )


def acceptance_length(matches: list[list[bool]], num_speculative_tokens: int) -> float:
    """Returns the mean number of tokens committed per round, over complete rounds along each row."""
    drafts = [
        [row[start : start + num_speculative_tokens] for start in range(len(row) - num_speculative_tokens)]
        for row in matches
    ]
    return mean_committed([[(*drafted, False).index(False) for drafted in row] for row in drafts])


@torch.inference_mode()
def measure_head_acceptance(
    target: LlamaForCausalLM,
    head: TrainableHead,
    held_out_stream: Tensor,
    num_prompts: int,
    seed: int,
    prompt_lengths: tuple[int, ...] = PROMPT_LENGTHS,
    num_new_tokens: int = NEW_TOKENS,
) -> Acceptance:
    """Measures the acceptance of a head, like `measure_acceptance` at temperature 0.

    The later steps of an EAGLE head read its own output.
    """
    num_drafts = HEAD_SPECULATIVE_TOKENS
    num_matches: list[Tensor] = []
    for prompts in _prompts(held_out_stream, num_prompts, prompt_lengths, seed):
        greedy = torch.zeros(len(prompts), device=prompts.device)
        tokens = continue_prompts(target, prompts, num_new_tokens, greedy, _no_noise)
        output = target.model(input_ids=tokens, use_cache=False, output_hidden_states=True)
        states = captured_states(head, output.hidden_states)
        # A round begins at the last position that the target has computed: one before the newest token.
        rounds = slice(prompts.shape[1] - 1, tokens.shape[1] - num_drafts - 1)
        steps = head.step_logits(target.model.embed_tokens(tokens), states, num_drafts, rounds)
        chosen = [logits.argmax(dim=-1) for logits in steps]
        drafts = head.target_ids[torch.stack(chosen, dim=-1)]
        truth = tokens[:, prompts.shape[1] + 1 :].unfold(1, num_drafts, 1)
        num_matches.append((drafts == truth).long().cumprod(dim=-1).sum(dim=-1))
    accepted = torch.cat(num_matches)
    return Acceptance(
        temperature=0.0,
        acceptance_rate=(accepted > 0).float().mean().item(),
        acceptance_length=mean_committed(accepted.tolist()),
        num_speculative_tokens=num_drafts,
        num_prompts=len(accepted),
        num_tokens=accepted.numel(),
    )


def _prompts(stream: Tensor, num_prompts: int, prompt_lengths: tuple[int, ...], seed: int) -> list[Tensor]:
    """Draws prompts from the stream, evenly over the lengths: a list of [rows, prompt_length]."""
    if len(stream) <= max(prompt_lengths):
        raise ValueError(f"{len(stream)} held-out tokens are too few for the prompts")
    num_rows = math.ceil(num_prompts / len(prompt_lengths))
    prompts = []
    for length in prompt_lengths:
        starts = random_numbers(seed, length).integers(len(stream) - length, size=num_rows)
        positions = torch.from_numpy(starts)[:, None] + torch.arange(length)
        prompts.append(stream[positions.to(stream.device)].long())
    return prompts


@torch.inference_mode()
def _matches(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    prompts: Tensor,
    num_new_tokens: int,
    temperature: float,
    key: tuple[int, ...],
) -> Tensor:
    """Returns where the draft's proposal equals the target's choice, bool [rows, num_new_tokens]."""
    num_rows, prompt_length = prompts.shape
    shape = (num_rows, target.config.vocab_size)
    temperatures = torch.full((num_rows,), temperature, device=prompts.device)

    def noise(index: int) -> Tensor:
        # Drawn on the CPU, whose generator gives the same numbers whatever the device.
        return gumbel_noise(shape, torch.device("cpu"), *key, index).to(prompts.device)

    tokens = continue_prompts(target, prompts, num_new_tokens, temperatures, noise)
    draft_logits = draft(input_ids=tokens[:, :-1], use_cache=False).logits[:, prompt_length - 1 :]
    matches = [
        choose(draft_logits[:, index], temperatures, noise(index)) == tokens[:, prompt_length + index]
        for index in range(num_new_tokens)
    ]
    return torch.stack(matches, dim=1)


def _no_noise(_: int) -> Tensor:
    return torch.zeros(())
