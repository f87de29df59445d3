"""Targets that the configuration gives a drafter in their own process: every kind of drafter, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from cluster.config import Config
from cluster.config.file import load_config
from cluster.config.workers import WorkerConfig
from cluster.engine.loader import LoadedModel
from cluster.engine.model import TorchModel
from cluster.engine.model_config import ModelConfig
from cluster.engine.runner import kv_cache_budgets
from cluster.factories.targets import make_target
from cluster.model_folder import resolve_model_folder
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.targets.base import GenerationOutput, GenerationRequest
from cluster.targets.step_loop import StepLoop
from cluster.tokenization import Tokenizer

IN_PROCESS = ("draft.placement=in-process", "target.device=cpu", "speculation.draft_timeout_ms=60000")
PROMPTS = [
    "def main(arguments):\n    ",
    "import os\nimport sys\n\n\nclass Reader:\n    def __init__(self",
    "for line in",
]


def new_target(*settings: str) -> StepLoop:
    config = load_config(None, [*IN_PROCESS, *settings])
    target = make_target(config, Tokenizer(resolve_model_folder(config.target.model)).fingerprint())
    assert isinstance(target, StepLoop)
    return target


def answers(target: StepLoop, k: int) -> tuple[dict[str, list[int]], int]:
    """Runs sampled and greedy requests at once. Returns their tokens, and the number of accepted drafts."""
    tokenizer = Tokenizer(resolve_model_folder(Config().target.model))
    for temperature in (0.0, 1.0):
        for number, prompt in enumerate(PROMPTS):
            token_ids = tokenizer.encode(prompt)
            params, key = SamplingParams(temperature=temperature), NoiseKey.derive(number, 0)
            name = f"{temperature} {number}"
            target.submit(GenerationRequest(name, token_ids, len(token_ids), params, key, 40, True, k))
    tokens: dict[str, list[int]] = {}
    num_accepted = 0

    def publish(outputs: Sequence[GenerationOutput]) -> None:
        nonlocal num_accepted
        for output in outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            num_accepted += output.num_accepted_tokens

    while target.run_step(publish):
        pass
    return tokens, num_accepted


@pytest.fixture(scope="module")
def plain() -> dict[str, list[int]]:
    tokens, _ = answers(new_target("speculation.num_speculative_tokens=0"), 0)
    assert all(len(found) == 40 for found in tokens.values())
    return tokens


@pytest.mark.parametrize("threads", ["shared", "own"])
@pytest.mark.parametrize("drafter", ["model", "self-int4", "ngram"])
def test_the_same_tokens_with_every_drafter(drafter: str, threads: str, plain: dict[str, list[int]]) -> None:
    target = new_target(f"draft.drafter={drafter}", f"draft.in_process_threads={threads}")
    found, num_accepted = answers(target, 4)
    assert found == plain
    assert num_accepted > 0
    target._pool.stop()  # type: ignore[attr-defined]


def test_a_simulated_target_drafts_in_its_process_too() -> None:
    target = new_target("target.engine=simulated", "draft.drafter=simulated")
    _, num_accepted = answers(target, 4)
    assert num_accepted > 0


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (
            {"target": {"engine": "vllm"}, "draft": {"drafter": "ngram"}},
            "needs draft.drafter model with target.engine vllm",
        ),
        ({"draft": {"drafter": "vllm"}}, "cannot use vllm"),
        ({"draft": {"cpus": [1]}}, "set target.cpus, not draft.cpus"),
        ({"draft": {"drafter": "eagle", "placement": "pool"}}, "leave draft.placement out"),
        ({"draft": {"drafter": "eagle", "in_process_threads": "own"}}, "leave draft.in_process_threads out"),
        ({"draft": {"drafter": "eagle"}, "target": {"engine": "vllm"}}, "set draft.drafter engine"),
        ({"draft": {"drafter": "eagle"}, "speculation": {"acceptance": "rejection"}}, "set acceptance coupled"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, Any], why: str) -> None:
    settings["draft"] = {"placement": "in-process"} | settings.get("draft", {})
    with pytest.raises(ValueError, match=why):
        Config.model_validate(settings)


class TestMemory:
    """Tests with one GPU of 80 GB, where the weights of both models take 40 GB and caches may take 20."""

    def budgets(
        self, monkeypatch: pytest.MonkeyPatch, target: int | None, draft: int | None, draft_device: str = "cuda"
    ) -> tuple[int, int]:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40 * 10**9, 80 * 10**9))

        def loaded(model: str, device: str) -> LoadedModel:
            config = ModelConfig.from_folder(resolve_model_folder(model))
            weights = SimpleNamespace(device=torch.device(device), dtype=torch.bfloat16)
            return LoadedModel(config, cast(Any, weights), TorchModel)

        def settings(kv_cache_bytes: int | None) -> WorkerConfig:
            return WorkerConfig(model="any", kv_cache_bytes=kv_cache_bytes, memory_utilization=0.75)

        return kv_cache_budgets(
            settings(target),
            loaded("outrider-target-12m", "cuda"),
            settings(draft),
            loaded("outrider-draft-2m", draft_device),
        )

    def test_both_caches_hold_as_many_tokens(self, monkeypatch: pytest.MonkeyPatch) -> None:
        target, draft = self.budgets(monkeypatch, None, None)
        models = [
            ModelConfig.from_folder(resolve_model_folder(f"outrider-{name}")) for name in ("target-12m", "draft-2m")
        ]
        of_target, of_draft = (2 * 2 * model.num_layers * model.kv_size for model in models)
        assert target + draft == 20 * 10**9
        assert target // of_target == pytest.approx(draft // of_draft, rel=1e-6)

    def test_what_is_set_is_kept_and_counted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.budgets(monkeypatch, None, 4 * 10**9) == (16 * 10**9, 4 * 10**9)
        assert self.budgets(monkeypatch, 4 * 10**9, None) == (4 * 10**9, 16 * 10**9)
        assert self.budgets(monkeypatch, 4 * 10**9, 5 * 10**9) == (4 * 10**9, 5 * 10**9)

    def test_a_draft_elsewhere_takes_nothing_of_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.budgets(monkeypatch, None, 4 * 10**9, "cpu") == (20 * 10**9, 4 * 10**9)
