"""EleutherAI's evaluation harness, by the completions endpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from transformers import AutoTokenizer, LlamaForCausalLM

from cluster.model_folder import resolve_model_folder
from services.launch.local import LocalCluster

NAME = "outrider-target-12m"
CASES = [("import os\nimport", " sys\n"), ("def main(", "):\n    return 0\n"), ("x = [1, 2", ", 3]")]


@pytest.fixture
def harness(cluster: LocalCluster) -> Any:
    return LocalCompletionsAPI(
        base_url=f"{cluster.url}/v1/completions",
        model=NAME,
        tokenizer_backend="huggingface",
        tokenizer=str(resolve_model_folder(NAME)),
        tokenized_requests=True,
        batch_size=2,
        max_length=512,
    )


def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, one, index) for index, one in enumerate(arguments)]


def test_it_generates(harness: Any) -> None:
    asked = instances("generate_until", [(prompt, {"until": ["\n"], "max_gen_toks": 8}) for prompt, _ in CASES])
    answers = harness.generate_until(asked, disable_tqdm=True)
    assert len(answers) == len(CASES)
    assert all("\n" not in answer for answer in answers)


def test_its_likelihoods_are_those_of_the_model(harness: Any) -> None:
    measured = harness.loglikelihood(instances("loglikelihood", CASES), disable_tqdm=True)
    folder = resolve_model_folder(NAME)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for (context, continuation), (log_likelihood, is_greedy) in zip(CASES, measured, strict=True):
        # As the harness does it: the context by itself, and of the whole what comes behind as many tokens.
        before = tokenizer(context).input_ids
        num_context = len(before)
        token_ids = torch.tensor([before + tokenizer(context + continuation).input_ids[num_context:]])
        with torch.no_grad():
            logprobs = model(token_ids).logits[0].log_softmax(-1)  # [num_tokens, vocab_size]
        told = token_ids[0, num_context:]
        expected = logprobs[num_context - 1 : -1].gather(1, told[:, None])
        assert log_likelihood == pytest.approx(expected.sum().item(), abs=1e-2)
        assert is_greedy == bool((logprobs[num_context - 1 : -1].argmax(1) == told).all())
