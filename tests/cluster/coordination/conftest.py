from __future__ import annotations

from collections.abc import Callable

import pytest

from cluster.config.speculation import SpeculationConfig
from cluster.coordination.base import LinkState
from cluster.coordination.coordinator import Coordinator

from .planning import Engine
from .scripted import LIMITS, TIMEOUT_S, VOCAB_SIZE, Rounds, ScriptedLink, ScriptedPool


@pytest.fixture
def pool() -> ScriptedPool:
    return ScriptedPool()


@pytest.fixture
def coordinator(pool: ScriptedPool) -> Coordinator:
    config = SpeculationConfig(controller="fixed", draft_timeout_ms=TIMEOUT_S * 1000)
    return Coordinator(pool, config, VOCAB_SIZE, LIMITS, pool.clock)


@pytest.fixture
def new_link(pool: ScriptedPool) -> Callable[[str], ScriptedLink]:
    """A link that is up."""

    def make(name: str) -> ScriptedLink:
        link = ScriptedLink(name)
        pool.happens(link, LinkState.UP)
        return link

    return make


@pytest.fixture
def link(new_link: Callable[[str], ScriptedLink]) -> ScriptedLink:
    return new_link("first")


@pytest.fixture
def rounds(coordinator: Coordinator, pool: ScriptedPool, link: ScriptedLink) -> Rounds:
    return Rounds(coordinator, pool, link)


@pytest.fixture
def off() -> Engine:
    """Speculation does not pay."""
    engine = Engine(num_sequences=4)
    engine.rows_cost(0.02)
    engine.accepts(0)
    engine.steps()
    assert not engine.planner.has_drafts
    return engine
