"""A tensor-parallel vLLM target under Ray."""

from __future__ import annotations

from pathlib import Path

from tests.system.ray.launched import answer, end_and_check, launched

SETTINGS = {
    "target.engine": "vllm",
    "target.tensor_parallel_size": "2",
    "target.engine_args": "{enforce_eager: true}",
    "target.dtype": "float32",
    "target.kv_cache_bytes": str(32 * 2**20),
    "target.max_model_len": "1024",
}
NUM_ANSWERS = 4  # where three processes share two cores, the proposals for one may all be late


def test_it_is_drafted_for_from_the_pool_and_leaves_nothing_behind(folder: Path) -> None:
    with launched(folder, *[a for name, value in SETTINGS.items() for a in ("--set", f"{name}={value}")]) as launcher:
        launcher.wait_ready()
        token_ids, num_accepted = answer(launcher, 0)
        assert num_accepted == 0
        for _ in range(NUM_ANSWERS):
            drafted, accepted = answer(launcher, 4)
            assert drafted == token_ids
            num_accepted += accepted
        assert num_accepted > 0
        end_and_check(launcher, folder)
