"""Architectures that vLLM runs on a CPU: drafts, right and wrong, change no token."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.model_folder import ASSETS
from cluster.tokenization import Tokenizer
from services.launch.child import EXIT_CONFIGURATION
from tests.background_loop import BackgroundLoop
from tests.cluster.vllm_plugin.knowing_draft import KnowingDraft
from tests.soak import IS_SOAK, length, only_in_soak
from tests.system.cases import sampled_cases
from tests.system.client import Case, complete_all
from tests.system.vllm.architectures import ARCHITECTURES, REFUSED, VOCAB_SIZE, save_checkpoint
from tests.system.vllm.programs import Programs
from tests.system.vllm.test_exactness import drafted
from tests.waiting import WAIT_S

RESULTS = Path("bench/results/architectures.json")
IN_CI = ("Gemma 3", "Qwen3-MoE")
NUM_CASES, MAX_TOKENS = length(20, 110), length(24, 200)
SETTINGS = {
    "speculation.draft_timeout_ms": 5000,
    "target.engine": "vllm",
    "target.engine_args": "{enforce_eager: true}",
    "target.max_num_seqs": 8,
    "target.max_model_len": 640,
    "target.kv_cache_bytes": 16 * 2**20,
    "target.drain_seconds": 0.2,
}


@pytest.fixture(params=[name for name in ARCHITECTURES if name not in REFUSED] if IS_SOAK else IN_CI)
def architecture(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def served(architecture: str, tmp_path: Path) -> Iterator[Programs]:
    model = save_checkpoint(architecture, tmp_path / "model")
    programs = Programs(tmp_path, **SETTINGS, **{"target.model": model})
    try:
        programs.start_target("only")
        programs.wait_ready()
        yield programs
    finally:
        programs.stop()


@only_in_soak
@pytest.mark.parametrize("name", REFUSED)
def test_a_model_of_which_vllm_verifies_no_drafts_is_refused(name: str, tmp_path: Path) -> None:
    model = save_checkpoint(name, tmp_path / "model")
    given = SETTINGS | {"target.model": model, "target.listen": "127.0.0.1:0"}
    settings = [f"{key}={value}" for key, value in given.items()]
    command = [sys.executable, "-m", "services.cli", "target", *(part for one in settings for part in ("--set", one))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == EXIT_CONFIGURATION
    assert "set speculation.num_speculative_tokens to 0" in done.stderr


def test_drafts_change_no_token(architecture: str, served: Programs, loop: BackgroundLoop) -> None:
    """Most drafts are right, as the draft worker knows the answers: a random model's would be wrong."""
    cases = [
        Case(case.prompt, case.seed, MAX_TOKENS, case.fields | {"ignore_eos": True})
        for case in sampled_cases(NUM_CASES)
    ]
    expected = complete_all(served.url, cases, num_speculative_tokens=0)
    draft = KnowingDraft(loop, VOCAB_SIZE, Tokenizer(ASSETS / "outrider-target-12m").fingerprint())
    draft.worker.truths = [[*case.prompt, *answer] for case, answer in zip(cases, expected, strict=True)]
    served.draft_addresses["knowing"] = draft.address
    served.use("knowing")
    try:
        answers = complete_all(served.url, cases, num_speculative_tokens=6)
    finally:
        draft.stop()
    num_drafted, num_accepted = drafted(served)
    different = [a != b for pair in zip(answers, expected, strict=True) for a, b in zip(*pair, strict=True)]
    row = {
        "num_tokens": len(different),
        "num_different_tokens": sum(different),
        "num_drafts": int(num_drafted),
        "num_accepted_drafts": int(num_accepted),
    }
    print(f"{architecture}: {row}")
    if IS_SOAK:
        rows = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
        RESULTS.write_text(json.dumps(rows | {architecture: row}, indent=2) + "\n", encoding="utf-8")
    assert not any(different)
    assert num_drafted > num_accepted > 0.4 * num_drafted
