"""Random heads draft in vLLM, token for token, what they draft in our engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.spec_decode.medusa import MedusaProposer

from cluster.config.workers import TargetConfig
from cluster.engine.medusa import load_medusa_heads
from cluster.engine.mtp import load_mtp_head
from cluster.vllm.engine_args import set_environment
from tests.cluster.drafters.eagle_pair import FORMS, K, Pair
from tests.cluster.engine.eagle_heads import FORMATS, TARGET_LAYERS, save_head
from tests.cluster.engine.further_heads import NUM_HEADS, save_medusa_heads, save_mtp_target
from tests.cluster.engine.tokens import random_tokens
from tests.soak import IS_SOAK, length

# vLLM ignores the biases of heads.
_PUBLISHED = length(["eagle3"], [published for published in FORMATS if published != "eagle with biases"])
_NUM_TOKENS = 16

only_soak = pytest.mark.skipif(not IS_SOAK, reason="make soak")


@pytest.fixture
def proposals(own_environment: None, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Records the drafts that vLLM proposes. Sequences must run one at a time."""
    found: list[list[int]] = []
    for proposer in (SpecDecodeBaseProposer, MedusaProposer):

        def noting(self: Any, *arguments: Any, propose: Any = proposer.propose, **named: Any) -> torch.Tensor:
            drafts: torch.Tensor = propose(self, *arguments, **named)
            found.append(drafts[0].tolist())
            return drafts

        monkeypatch.setattr(proposer, "propose", noting)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    set_environment(TargetConfig())
    return found


def _check(target: Path, speculative_config: dict[str, Any], pair: Pair, proposals: list[list[int]]) -> None:
    """Compares the drafts of greedy answers. The second token of each prompt is 0."""
    k = speculative_config["num_speculative_tokens"]
    llm = LLM(
        model=str(target),
        speculative_config=speculative_config,
        skip_tokenizer_init=True,
        distributed_executor_backend="vllm.v1.executor.uniproc_executor.UniProcExecutor",
        dtype="float32",
        enforce_eager=True,
        max_model_len=200,
        max_num_seqs=4,
        kv_cache_memory_bytes=2**24,
    )
    params = SamplingParams(temperature=0.0, max_tokens=_NUM_TOKENS, ignore_eos=True, detokenize=False)
    for seed in (1, 2):
        prompt = random_tokens(seed, 23)
        prompt[1] = 0
        proposals.clear()
        (answer,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        tokens = [*prompt, *answer.outputs[0].token_ids]
        num_known = len(prompt) + 1
        assert len(proposals) > _NUM_TOKENS // (k + 1)
        for drafts in proposals:
            if num_known > len(tokens):
                break  # vLLM proposed these before it found that the answer had ended
            sequence = pair.open(tokens[:num_known], wire_id=num_known, k=k)
            assert pair.draft(sequence) == [drafts]
            pair.close(sequence)
            rest = tokens[num_known:]
            num_accepted = next((i for i, (a, b) in enumerate(zip(drafts, rest, strict=False)) if a != b), len(drafts))
            num_known += num_accepted + 1


@pytest.mark.parametrize("published", _PUBLISHED)
def test_eagle_heads_draft_the_same_tokens(
    published: str, tiny_folder: Callable[..., Path], tmp_path: Path, proposals: list[list[int]]
) -> None:
    save_head(tmp_path, published, max_len=256)  # vLLM drafts for no longer sequences than the head names
    target = tiny_folder(num_hidden_layers=TARGET_LAYERS)
    method = "eagle3" if published != "eagle" else "eagle"
    speculative_config = {"method": method, "model": str(tmp_path), "num_speculative_tokens": K}
    _check(target, speculative_config, Pair(target, tmp_path, FORMS[-1]), proposals)


@only_soak
def test_medusa_heads_draft_the_same_tokens(
    tiny_folder: Callable[..., Path], tmp_path: Path, proposals: list[list[int]]
) -> None:
    save_medusa_heads(tmp_path, "vllm")
    target = tiny_folder()
    speculative_config = {"method": "medusa", "model": str(tmp_path), "num_speculative_tokens": NUM_HEADS}
    _check(target, speculative_config, Pair(target, tmp_path, FORMS[-1], load_medusa_heads), proposals)


@only_soak
def test_mtp_modules_draft_the_same_tokens(
    tiny_folder: Callable[..., Path], tmp_path: Path, proposals: list[list[int]]
) -> None:
    # vLLM's embedding of the token at place 1 is zero. Ours is that of the token, which is 0, so it is zero here.
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}  # vLLM derives the last from the first
    save_mtp_target(tmp_path, tiny_folder(family="qwen2", num_hidden_layers=TARGET_LAYERS, **sizes))
    speculative_config = {"method": "mtp", "num_speculative_tokens": K}
    _check(tmp_path, speculative_config, Pair(tmp_path, tmp_path, FORMS[-1], load_mtp_head), proposals)
