"""Models with which vLLM gives other tokens when it verifies drafts are refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from cluster.errors import ConfigurationError
from cluster.vllm.engine_args import check_verifies

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("kind", ["use_mla", "has_inner_state"])
def test_latent_attention_and_states_on_a_cpu(kind: str) -> None:
    model = SimpleNamespace(model="m", use_mla=False, has_inner_state=False)
    check_verifies(model, CPU)
    setattr(model, kind, True)
    check_verifies(model, GPU)
    with pytest.raises(ConfigurationError, match=r"set speculation\.num_speculative_tokens to 0"):
        check_verifies(model, CPU)
