"""The target's answers to prompts, from a separate cluster on this machine."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed

from cluster.config import Config
from services.http_call import call
from services.launch.local import LocalCluster
from services.training.traffic import TEMPERATURES, RecordedAnswer

_ANSWER_SECONDS = 600.0
_MOST_BYTES_OF_AN_ANSWER, _MOST_BYTES_OF_A_TOKEN = 65_536, 1_024  # a token's number and its text, which JSON may escape


def ask(
    config: Config, prompts: Mapping[int, tuple[int, ...]], *, max_tokens: int, num_streams: int
) -> Generator[RecordedAnswer, None, None]:
    """Yields one answer per prompt, as they finish; the prompt's number is its seed, temperatures alternate.

    A caller that stops early must close the iterator; otherwise all remaining prompts are asked at the exit. Raises
    ConfigurationError at the first request that fails.
    """

    def answer(number: int) -> RecordedAnswer:
        prompt, temperature = prompts[number], TEMPERATURES[number % len(TEMPERATURES)]
        body = {
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": number,
            "return_token_ids": True,
        }
        most = _MOST_BYTES_OF_AN_ANSWER + max_tokens * _MOST_BYTES_OF_A_TOKEN
        answered = call(cluster.url, "POST", "/v1/completions", body, seconds=_ANSWER_SECONDS, max_bytes=most)
        (choice,) = answered["choices"]
        return RecordedAnswer(prompt, tuple(choice["token_ids"]), temperature, number)

    with LocalCluster(config) as cluster, ThreadPoolExecutor(num_streams) as threads:
        cluster.wait_ready()
        try:
            for done in as_completed([threads.submit(answer, number) for number in prompts]):
                yield done.result()
        finally:
            threads.shutdown(cancel_futures=True)
