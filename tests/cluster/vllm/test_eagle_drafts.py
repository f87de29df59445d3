"""Random EAGLE heads draft in vLLM, token for token, what they draft in our engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from cluster.config.workers import TargetConfig
from cluster.vllm.engine_args import set_environment
from tests.cluster.drafters.eagle_pair import FORMS, K, Pair
from tests.cluster.engine.eagle_heads import FORMATS, TARGET_LAYERS, save_head
from tests.cluster.engine.tokens import random_tokens
from tests.soak import length

# vLLM ignores the biases of heads.
_PUBLISHED = length(["eagle3"], [published for published in FORMATS if published != "eagle with biases"])
_NUM_TOKENS = 16


@pytest.mark.parametrize("published", _PUBLISHED)
def test_both_engines_draft_the_same_tokens(
    published: str,
    tiny_folder: Callable[..., Path],
    tmp_path: Path,
    own_environment: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_head(tmp_path, published, max_len=256)  # vLLM drafts for no longer sequences than the head names
    target = tiny_folder(num_hidden_layers=TARGET_LAYERS)
    proposals: list[list[int]] = []
    propose = SpecDecodeBaseProposer.propose

    def noting(self: SpecDecodeBaseProposer, *arguments: Any, **named: Any) -> torch.Tensor:
        drafts = propose(self, *arguments, **named)
        proposals.append(drafts[0].tolist())
        return drafts

    monkeypatch.setattr(SpecDecodeBaseProposer, "propose", noting)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    set_environment(TargetConfig())
    method = "eagle3" if published not in ("eagle", "eagle with biases") else "eagle"
    llm = LLM(
        model=str(target),
        speculative_config={"method": method, "model": str(tmp_path), "num_speculative_tokens": K},
        skip_tokenizer_init=True,
        distributed_executor_backend="vllm.v1.executor.uniproc_executor.UniProcExecutor",
        dtype="float32",
        enforce_eager=True,
        max_model_len=200,
        max_num_seqs=4,
        kv_cache_memory_bytes=2**24,
    )
    pair = Pair(target, tmp_path, FORMS[-1])
    params = SamplingParams(temperature=0.0, max_tokens=_NUM_TOKENS, ignore_eos=True, detokenize=False)
    for seed in (1, 2):
        prompt = random_tokens(seed, 23)
        proposals.clear()
        (answer,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        tokens = [*prompt, *answer.outputs[0].token_ids]
        num_known = len(prompt) + 1
        assert len(proposals) > _NUM_TOKENS // (K + 1)
        for drafts in proposals:
            if num_known > len(tokens):
                break  # made before vLLM saw that the answer ends
            sequence = pair.open(tokens[:num_known], wire_id=num_known)
            assert pair.draft(sequence) == [drafts]
            pair.close(sequence)
            rest = tokens[num_known:]
            num_accepted = next((i for i, (a, b) in enumerate(zip(drafts, rest, strict=False)) if a != b), len(drafts))
            num_known += num_accepted + 1
