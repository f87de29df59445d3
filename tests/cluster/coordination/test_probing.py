"""Now and then a step is of the kind that is not the rule."""

from __future__ import annotations

from .planning import Engine, verified
from .scripted import new_sequence


def test_a_step_in_some_seconds_is_plain() -> None:
    engine = Engine()
    engine.rows_cost(0.0001)
    engine.accepts(4)
    engine.steps()
    plain = 0
    for _ in range(1000):  # 20 s
        engine.step()
        plain += engine.planner.verified_depth(engine.sequences[0]) == 0
    assert 3 <= plain <= 10


def test_fixed_depths_are_never_probed() -> None:
    engine = Engine(controller="fixed")
    for _ in range(1000):
        engine.step()
        assert engine.planner.verified_depth(engine.sequences[0]) == 4


def test_a_shadow_is_verified_now_and_then(off: Engine) -> None:
    """Else nobody would know any more what a row costs."""
    (shadow, _) = off.shadows
    off.clock.now += 10.0
    off.step()
    assert off.planner.verified_depth(shadow) > 0
    off.observe([verified(shadow, 3, 1)])
    off.step()
    assert off.planner.verified_depth(shadow) == 0


def test_while_a_shadow_is_awaited_others_have_what_they_asked_for(off: Engine) -> None:
    """Drafts that are slower than the target's steps may be long in coming."""
    asked = new_sequence(3)
    off.planner.join(asked)
    (shadow, _) = off.shadows
    off.clock.now += 10.0
    for _ in range(20):
        off.step()
        assert off.planner.verified_depth(shadow) > 0
        assert off.planner.verified_depth(asked) == 3
