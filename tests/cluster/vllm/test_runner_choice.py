"""Choice of vLLM's model runner for a target, and refusal of builds without a device."""

from __future__ import annotations

import pytest
import torch

from cluster.config.file import load_config
from cluster.errors import ConfigurationError
from cluster.vllm import engine_args
from cluster.vllm.engine_args import check_platform, wants_v2_runner


@pytest.mark.parametrize(
    ("device", "asked", "settings", "is_v2"),
    [
        ("cuda", None, [], True),
        ("cuda", "0", [], False),
        ("cpu", None, [], False),
        ("cpu", "1", [], True),
        ("cuda", None, ["target.lora_root=/adapters"], False),
        ("cuda", None, ["speculation.acceptance=engine", "draft.drafter=engine"], False),
        ("cuda", None, ["draft.drafter=engine", "draft.speculative_config={method: ngram}"], False),
        ("cuda", None, ["draft.drafter=engine", "draft.speculative_config={method: eagle}"], True),
        ("cuda", None, ["target.engine_args={nnodes: 2}"], False),
        ("cuda", None, ["target.engine_args={distributed_executor_backend: ray}"], False),
        ("cuda", None, ["target.engine_args={distributed_executor_backend: mp}"], True),
        ("cuda", "1", ["target.lora_root=/adapters"], True),  # chosen here; the target refuses the setting by name
    ],
)
def test_a_gpu_has_v2_unless_a_setting_needs_v1(
    device: str, asked: str | None, settings: list[str], is_v2: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_args, "resolve_device", lambda name: torch.device(device))
    if asked is None:
        monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    else:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", asked)
    config = load_config(None, ["target.engine=vllm", *settings])
    assert wants_v2_runner(config) is is_v2


def test_a_build_for_gpus_says_that_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    platforms = pytest.importorskip("vllm.platforms")
    interface = pytest.importorskip("vllm.platforms.interface")
    check_platform()
    monkeypatch.setattr(platforms, "current_platform", interface.UnspecifiedPlatform())
    with pytest.raises(ConfigurationError, match="there is none"):
        check_platform()
