from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.drafting.worker import DraftWorker

from .scripted import Link, ScriptedDrafter


@pytest.fixture
def drafter() -> ScriptedDrafter:
    return ScriptedDrafter()


@pytest.fixture
def worker(drafter: ScriptedDrafter) -> Iterator[DraftWorker]:
    worker = DraftWorker(drafter)
    worker.start()
    yield worker
    drafter.let_all()
    worker.stop()


@pytest.fixture
def link(worker: DraftWorker) -> Link:
    return Link(worker)
