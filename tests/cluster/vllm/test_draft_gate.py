"""Drafts reach a step that waits for them, and one that is let go on without is told so."""

from __future__ import annotations

import threading

import pytest
import torch

from cluster.vllm.draft_gate import BoundStep, DraftGate, DraftReader
from tests.waiting import WAIT_S

CPU = torch.device("cpu")


@pytest.fixture
def gate() -> DraftGate:
    return DraftGate(max_requests=4, max_drafts=3)


def test_a_step_waits_for_its_drafts(gate: DraftGate) -> None:
    step = gate.bind(["a", "b", "c"])
    reader = DraftReader(step, CPU)
    found: list[list[list[int]]] = []
    waiting = threading.Thread(target=lambda: found.append(reader.read(step).tolist()))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    assert gate.open(step, [[5, 6, 7], [8], []])
    waiting.join(WAIT_S)
    assert found == [[[5, 6, 7], [8, 8, 8], [0, 0, 0]]]  # rows are filled up


def test_every_rank_reads_the_same(gate: DraftGate) -> None:
    """Once a gate was opened, what is behind it does not change: a rank may have read it."""
    before = gate.bind(["a"])
    first, second = DraftReader(before, CPU), DraftReader(before, CPU)
    gate.open(before, [[1, 2, 3]])
    step = gate.bind(["a"])
    assert gate.open(step, None)
    read = first.read(step).tolist()
    assert not gate.open(step, [[4, 5, 6]])
    assert second.read(step).tolist() == read


def test_steps_follow_each_other(gate: DraftGate) -> None:
    steps: list[BoundStep] = [gate.bind(["a"]) for _ in range(12)]
    reader = DraftReader(steps[0], CPU)
    for number, step in enumerate(steps):
        gate.open(step, [[number, number, number]])
        assert reader.read(step).tolist() == [[number] * 3]
