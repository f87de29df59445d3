"""Tests of the plugin's changes to vLLM's configuration, including that it makes none unless it is enabled."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from cluster.model_folder import resolve_model_folder

from .environment import ROOT, environment

PROCESSOR = "cluster.vllm.runner.coupled_sampling:CoupledSampling"
POOL = {"draft_addresses": ["127.0.0.1:1"], "speculation": {"num_speculative_tokens": 2, "max_speculative_tokens": 3}}
SCHEDULER = "cluster.vllm_plugin.scheduler.PluginScheduler"
TRANSFER = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
MADE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing is asked for": ({}, {"processors": None, "k": None, "scheduler": None}),
    "our own target worker": ({"outrider": {"channel": "x"}}, {"processors": None, "k": None, "scheduler": None}),
    "another speculation": (
        {"settings": {"speculative_config": NGRAM}},
        {"processors": None, "k": 2, "scheduler": None},
    ),
    "a pool": ({"outrider": POOL}, {"processors": [PROCESSOR], "k": 3, "scheduler": SCHEDULER}),
    "coupled sampling alone": (
        {"outrider": {"draft_addresses": []}},
        {"processors": [PROCESSOR], "k": None, "scheduler": None},
    ),
    "other processors": (
        {"outrider": POOL, "settings": {"logits_processors": ["a:B"]}},
        {"processors": ["a:B", PROCESSOR], "k": 3, "scheduler": SCHEDULER},
    ),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "the other runner": ({"outrider": {"draft_addresses": []}, "runner": "0"}, "VLLM_USE_V2_MODEL_RUNNER=1"),
    "another speculation beside the pool": (
        {"outrider": POOL, "settings": {"speculative_config": NGRAM}},
        "--speculative-config",
    ),
    "another scheduler": ({"outrider": POOL, "settings": {"scheduler_cls": "a.B"}}, "--scheduler-cls a.B"),
    "no asynchronous scheduling": (
        {"outrider": POOL, "settings": {"async_scheduling": False}},
        "--async-scheduling False",
    ),
    "a runner in the engine core": (
        {"outrider": POOL, "settings": {"distributed_executor_backend": "uni"}},
        "--distributed-executor-backend uni",
    ),
    "pipeline parallelism": (
        {"outrider": POOL, "settings": {"pipeline_parallel_size": 2}},
        "--pipeline-parallel-size 2",
    ),
    "adapters": ({"outrider": POOL, "settings": {"enable_lora": True}}, "--enable-lora"),
    "transfer of KV": (
        {"outrider": POOL, "settings": {"kv_transfer_config": TRANSFER}},
        "--kv-transfer-config with ExampleConnector",
    ),
    "latent attention": (
        {"outrider": POOL, "model": {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}},
        "latent attention",
    ),
    "engines that share experts": (
        {
            "outrider": POOL,
            "model": {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]},
            "settings": {"data_parallel_size": 2},
        },
        "--data-parallel-size 2 for a model with experts",
    ),
    "pictures in one step": (
        {
            "outrider": POOL,
            "model": {"model_type": "idefics3", "architectures": ["Idefics3ForConditionalGeneration"]},
            "settings": {"disable_chunked_mm_input": True},
        },
        "--disable-chunked-mm-input",
    ),
    "noise in log-probabilities": (
        {"outrider": POOL, "settings": {"logprobs_mode": "processed_logprobs"}},
        "--logprobs-mode processed_logprobs",
    ),
    "an unknown key": ({"outrider": {**POOL, "k": 4}}, "outrider.k"),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Answers by the name of the configuration. One process gives all, as vLLM takes seconds to import."""
    asked = [case[0] for case in [*MADE.values(), *REFUSED.values()]]
    lines = []
    for number, case in enumerate(asked):
        model = resolve_model_folder("outrider-target-12m")
        if "model" in case:
            model = tmp_path_factory.mktemp(f"model_{number}")
            (model / "config.json").write_text(json.dumps(case["model"]))
        additional = {"outrider": case["outrider"]} if "outrider" in case else {}
        arguments = {"model": str(model), "max_model_len": 128, "additional_config": additional}
        arguments |= case.get("settings", {})
        lines.append(json.dumps({**arguments, "runner": case.get("runner", "1")}))
    done = subprocess.run(
        [sys.executable, "-m", "tests.cluster.vllm_plugin.configurations_program"],
        input="\n".join(lines),
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(tmp_path_factory.mktemp("entry_point")),
        timeout=180,
        check=True,
    )
    made = [json.loads(line) for line in done.stdout.splitlines()]
    return dict(zip([*MADE, *REFUSED], made, strict=True))


@pytest.mark.parametrize("name", MADE)
def test_made(answers: dict[str, dict[str, Any]], name: str) -> None:
    assert answers[name] == MADE[name][1]


@pytest.mark.parametrize("name", REFUSED)
def test_refused(answers: dict[str, dict[str, Any]], name: str) -> None:
    assert answers[name]["error"].startswith("ConfigurationError: ")
    assert REFUSED[name][1] in answers[name]["error"]
