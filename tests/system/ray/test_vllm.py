"""A tensor-parallel vLLM target under Ray."""

from __future__ import annotations

from pathlib import Path

from tests.soak import only_in_soak
from tests.system.ray.launched import answer, end_and_check, launched

SETTINGS = {
    "target.engine": "vllm",
    "target.tensor_parallel_size": "2",
    "target.engine_args": "{enforce_eager: true}",
    "target.dtype": "float32",
    "target.kv_cache_bytes": str(32 * 2**20),
    "target.max_model_len": "1024",
    # Three processes may share two cores: drafts are neither given up as late nor given up as too dear.
    "speculation.controller": "fixed",
    "speculation.draft_timeout_ms": "60000",
}


# Two ranks, a draft and Ray start in minutes. vllm/test_exactness.py and test_launcher.py have the parts.
@only_in_soak
def test_it_is_drafted_for_from_the_pool_and_leaves_nothing_behind(folder: Path) -> None:
    with launched(folder, *[a for name, value in SETTINGS.items() for a in ("--set", f"{name}={value}")]) as launcher:
        launcher.wait_ready()
        plain, drafted = answer(launcher, 0), answer(launcher, 4)
        assert drafted[0] == plain[0]
        assert (plain[1], drafted[1] > 0) == (0, True)
        end_and_check(launcher, folder)
