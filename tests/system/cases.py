"""Prompts of held-out text with every kind of sampling."""

from __future__ import annotations

import random

from cluster.config import Config
from cluster.model_folder import resolve_model_folder
from cluster.tokenization import Tokenizer
from services.held_out import held_out_texts
from tests.system.client import Case

SAMPLING: tuple[dict[str, object], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 0.7, "repetition_penalty": 1.2},
    {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.8},
    {"temperature": 0.0, "frequency_penalty": 0.5},
    {"temperature": 1.0, "logit_bias": {"30": 3.0, "200": -5.0}},
)


def sampled_cases(num_prompts: int) -> list[Case]:
    """Prompts of 1 to 300 tokens of held-out text, every kind of sampling in turn."""
    rng = random.Random(7)
    tokenizer = Tokenizer(resolve_model_folder(Config().target.model))
    texts = [text.text for text in held_out_texts()]
    prompts: list[list[int]] = []
    while len(prompts) < num_prompts:
        text = rng.choice(texts)
        start = rng.randrange(len(text))
        token_ids = tokenizer.encode(text[start : start + 3000])
        prompts.append(token_ids[: rng.choice((1, 2, 15, 16, 17, 60, 130, 300))])
    return [
        Case(
            prompt=tuple(prompt),
            seed=rng.randrange(-(2**63), 2**63),
            max_tokens=rng.choice((1, 7, 24, 48)),
            fields={**SAMPLING[i % len(SAMPLING)], "ignore_eos": i % 3 == 0},
        )
        for i, prompt in enumerate(prompts)
        if prompt
    ]
