"""A model that answers otherwise rolls over the pools under load: every answer is of one model alone."""

from __future__ import annotations

import threading
from collections import Counter

import httpx

from bench.fault_load import Answers, Question
from bench.fault_ray import RayFaultCluster
from cluster.simulated_engines.tokens import token_at
from cluster.speculation.noise import NoiseKey
from tests.soak import only_in_soak
from tests.waiting import WAIT_S

NEW_VOCABULARY = 4090  # a simulated token depends on its size


@only_in_soak
def test_old_and_new_never_mix_within_an_answer(
    running: RayFaultCluster, questions: list[Question], expected: Answers
) -> None:
    """Through Serve's proxy: the routers are replaced too. Drafts may come and go meanwhile."""
    cluster = running  # with scaling as the test before left it: a roll back takes as long as this test
    new = {
        index: [
            token_at(NoiseKey.derive(question.seed, 0), len(question.prompt) + place, NEW_VOCABULARY)
            for place in range(question.max_tokens)
        ]
        for index, question in enumerate(questions)
    }
    seen: Counter[str] = Counter()
    stopping = threading.Event()

    def ask(index: int) -> None:
        with httpx.Client(timeout=WAIT_S) as client:
            while not stopping.is_set():
                body = questions[index].body | {"stream": False}
                answer = client.post(f"{cluster.nodes.proxy_url}/v1/completions", json=body)
                if answer.status_code != 200:
                    seen[f"{answer.status_code} {answer.text}"] += 1
                    continue
                token_ids = answer.json()["choices"][0]["token_ids"]
                kinds = {"old": token_ids == expected[index], "new": token_ids == new[index]}
                seen[next((kind for kind, is_it in kinds.items() if is_it), "mixed")] += 1

    asking = [threading.Thread(target=ask, args=(index,)) for index in range(len(questions))]
    for thread in asking:
        thread.start()
    try:
        cluster.roll(f"simulation.vocab_size={NEW_VOCABULARY}")
    finally:
        stopping.set()
        for thread in asking:
            thread.join()
    assert min(seen["old"], seen["new"]) > 0, seen
    assert seen.total() == seen["old"] + seen["new"], seen
