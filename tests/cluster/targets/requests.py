"""Requests of many kinds for tiny models, and what came of their drafts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.targets.base import GenerationRequest

from .loopback import LoopbackTarget

# (sampling, length of the prompt, max_tokens); more requests than may run at once, prompts longer than a step.
MIXED = [
    (SamplingParams(temperature=0.0), 5, 30),
    (SamplingParams(), 1, 30),
    (SamplingParams(temperature=0.7, top_k=40, top_p=0.9), 40, 25),
    (SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.3), 17, 40),
    (SamplingParams(temperature=1.2, min_p=0.02, presence_penalty=0.5, logit_bias=((7, 2.0),)), 24, 1),
    (SamplingParams(temperature=0.5), 90, 33),
    (SamplingParams(temperature=0.9), 226, 30),  # ends at the models' longest sequence
]

_numbers = itertools.count()


def new_request(
    params: SamplingParams = MIXED[0][0], num_prompt: int = 5, max_tokens: int = 20, *, seed: int = 0, k: int | None = 4
) -> GenerationRequest:
    prompt = np.random.default_rng(num_prompt).integers(1, 512, size=num_prompt).tolist()
    key = NoiseKey.derive(seed, 0)
    name = f"request {next(_numbers)}"
    return GenerationRequest(name, prompt, num_prompt, params, key, max_tokens, True, k)


def mixed_requests(k: int | None) -> list[GenerationRequest]:
    return [new_request(*setting, seed=seed, k=k) for seed, setting in enumerate(MIXED)]


def acceptance(target: LoopbackTarget, requests: Sequence[GenerationRequest]) -> tuple[int, int]:
    """(drafted, accepted) over `requests`."""
    outputs = [output for request in requests for output in target.outputs(request)]
    return sum(o.num_draft_tokens for o in outputs), sum(o.num_accepted_tokens for o in outputs)
