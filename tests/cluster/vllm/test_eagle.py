"""The bundled EAGLE head in vLLM: it is loaded, and its drafts are accepted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm import LLM, RequestOutput, SamplingParams

from cluster.config.workers import TargetConfig
from cluster.model_folder import resolve_model_folder
from cluster.tokenization import Tokenizer
from cluster.vllm.engine_args import set_environment
from services.held_out import held_out_texts

TARGET = resolve_model_folder("outrider-target-12m")
HEAD = resolve_model_folder("outrider-eagle-12m")
NUM_NEW_TOKENS = 64
LOWEST_ACCEPTANCE_LENGTH = 2.4  # of at most 4; it was 2.78
NEAR_TIE = 1e-3  # logits


@pytest.fixture(scope="module")
def llm(own_environment: None) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HF_HUB_OFFLINE", "1")
        set_environment(TargetConfig())
        yield LLM(
            model=str(TARGET),
            speculative_config={"method": "eagle", "model": str(HEAD), "num_speculative_tokens": 3},
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=512,
            max_num_seqs=16,
            kv_cache_memory_bytes=64 * 2**20,
            disable_log_stats=False,
        )


@pytest.fixture(scope="module")
def answers(llm: LLM) -> list[RequestOutput]:
    """Greedy continuations of the beginnings of held-out files."""
    tokenizer = Tokenizer(TARGET)
    prompts = [tokenizer.encode(text.text)[:100] for text in held_out_texts()[:16]]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True, detokenize=False)
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


def test_its_drafts_are_accepted(llm: LLM, answers: list[RequestOutput]) -> None:
    assert {len(answer.outputs[0].token_ids) for answer in answers} == {NUM_NEW_TOKENS}
    counters = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    num_drafts = counters["vllm:spec_decode_num_drafts"]
    num_accepted = counters["vllm:spec_decode_num_accepted_tokens"]
    assert counters["vllm:spec_decode_num_draft_tokens"] == 3 * num_drafts
    assert 1 + num_accepted / num_drafts > LOWEST_ACCEPTANCE_LENGTH


@torch.inference_mode()
def test_every_token_is_the_targets_likeliest(answers: list[RequestOutput]) -> None:
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    for answer in answers:
        tokens = torch.tensor([*answer.prompt_token_ids, *answer.outputs[0].token_ids])
        logits = target(tokens[None, :-1]).logits[0, -NUM_NEW_TOKENS:]
        chosen = logits.gather(-1, tokens[-NUM_NEW_TOKENS:, None])[:, 0]
        assert (logits.amax(dim=-1) - chosen).max() < NEAR_TIE


def test_the_folder_holds_nothing_that_vllm_takes_from_the_target() -> None:
    assert (HEAD / "model.safetensors").stat().st_size < 4_000_000
    assert "temperature 0" in (HEAD / "README.md").read_text()
