from __future__ import annotations

import pytest

from cluster.config import Config
from cluster.config.file import load_config
from cluster.diagnosis.findings import Finding
from services.tune.candidates import candidates


def tried(name: str, *settings: str) -> list[tuple[str, ...]]:
    finding = Finding(name, "", "", None)
    return [one.settings for one in candidates(load_config(None, settings), [finding])]


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("threads oversubscribed", ("target.threads=8",), [("target.threads=null",)]),
        (
            "KV cache exhausted",
            ("target.kv_cache_bytes=1000",),
            [("target.kv_cache_bytes=2000",), ("target.kv_cache_bytes=4000",)],
        ),
        ("KV cache exhausted", ("target.kv_cache_bytes=null",), [("target.memory_utilization=0.95",)]),
        ("KV cache of the draft exhausted", ("draft.kv_cache_bytes=null",), [("draft.memory_utilization=0.95",)]),
        (
            "network dominates",
            ("draft.placement=pool",),
            [("draft.placement=in-process",), ("draft.placement=sidecar",)],
        ),
        ("links down", (), []),
    ],
)
def test_each_finding_has_its_remedies(name: str, settings: tuple[str, ...], expected: list[tuple[str, ...]]) -> None:
    assert tried(name, *settings) == expected


def test_a_draft_that_does_not_suit_gives_way_to_those_that_need_no_training() -> None:
    assert tried("low acceptance") == [("draft.drafter=ngram",), ("draft.drafter=self-int4",)]
    assert tried("low acceptance", "target.engine=vllm", "draft.drafter=model") == [("draft.drafter=ngram",)]


def test_all_that_is_tried_are_settings() -> None:
    names = ("low acceptance", "draft the bottleneck", "network dominates", "threads oversubscribed")
    found = candidates(Config(), [Finding(name, "", "", None) for name in names])
    every = [one.settings for one in found]
    assert len(every) == len(set(every)) == 5
    for settings in every:
        load_config(None, settings)
