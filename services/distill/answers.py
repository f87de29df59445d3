"""The target's answers to prompts, from a cluster of its own on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from cluster.config import Config
from cluster.training.traffic import TEMPERATURES, Answer
from services.http_call import call
from services.launch.local import LocalCluster

_READY_SECONDS = 600.0
_ANSWER_SECONDS = 600.0


def ask(
    config: Config,
    prompts: Sequence[tuple[int, ...]],
    *,
    max_tokens: int,
    num_streams: int,
    did_one: Callable[[], object],
) -> list[Answer]:
    """One answer to each prompt, its place its seed, temperatures in turn; those without a token are left out.

    Raises ConfigurationError.
    """

    def answer(index: int) -> Answer:
        prompt, temperature = prompts[index], TEMPERATURES[index % len(TEMPERATURES)]
        body = {
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": index,
            "return_token_ids": True,
        }
        (choice,) = call(cluster.url, "POST", "/v1/completions", body, seconds=_ANSWER_SECONDS)["choices"]
        did_one()
        return Answer(prompt, tuple(choice["token_ids"]), temperature, index)

    with LocalCluster(config) as cluster, ThreadPoolExecutor(num_streams) as threads:
        cluster.wait_ready(_READY_SECONDS)
        return [one for one in threads.map(answer, range(len(prompts))) if one.token_ids]
