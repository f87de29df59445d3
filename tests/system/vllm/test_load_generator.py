"""vLLM's own load generator, unmodified, measures a cluster with a vLLM target, its speculation included."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from bench.workload import read_counters
from cluster.model_folder import resolve_model_folder
from tests.cluster.vllm_plugin.environment import name_vllm
from tests.system.vllm.programs import Programs

NUM_PROMPTS, NUM_TOKENS = 8, 32


def test_it_reports_acceptance(programs: Programs, tmp_path: Path) -> None:
    programs.use("right")
    model = "outrider-target-12m"
    before = read_counters(f"{programs.url}/metrics")
    command = [
        *(str(Path(sys.executable).with_name("vllm")), "bench", "serve", "--backend", "openai"),
        *("--base-url", programs.url, "--model", model, "--tokenizer", str(resolve_model_folder(model))),
        *("--dataset-name", "random", "--random-input-len", "32", "--random-output-len", str(NUM_TOKENS)),
        *("--num-prompts", str(NUM_PROMPTS), "--max-concurrency", "4", "--ignore-eos", "--disable-tqdm"),
        *("--extra-body", '{"num_speculative_tokens": 4}'),  # else what pays decides, which may be no drafts at all
        *("--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json"),
    ]
    name_vllm(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    after = read_counters(f"{programs.url}/metrics")
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (NUM_PROMPTS, 0)
    assert result["total_output_tokens"] == NUM_PROMPTS * NUM_TOKENS
    drafted, accepted = (
        after[name] - before.get(name, 0.0)
        for name in ("vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total")
    )
    assert (result["spec_decode_draft_tokens"], result["spec_decode_accepted_tokens"]) == (drafted, accepted)
    assert result["spec_decode_acceptance_rate"] > 0
    assert "Per-position acceptance" in run.stdout
