"""What is not tried any more is still looked at, seldom: shadows."""

from __future__ import annotations

from .planning import Engine, proposes


def test_while_it_is_off_a_few_shadows_are_drafted_for(off: Engine) -> None:
    assert len(off.shadows) == 2
    for sequence in off.sequences:
        assert (off.wanted(sequence) > 0) == sequence.is_shadow


def test_a_shadow_is_drafted_for_seldom(off: Engine) -> None:
    (shadow, _) = off.shadows
    asked = 0
    for _ in range(1000):  # 20 s
        off.step()
        asked += off.wanted(shadow) > 0
    # A proposal of 3 tokens takes the draft 0.9 ms, and may be 1 % of its time.
    assert 120 <= asked <= 222


def test_a_shadow_that_would_be_confirmed_switches_it_on_again(off: Engine) -> None:
    off.rows_cost(0.0001, repeats=200)  # other sequences have gone
    off.steps()
    before = off.depths
    for _ in range(40):
        for shadow in off.shadows:
            base = len(shadow.token_ids)
            proposes(shadow, base, 7, 8, 9)
            for token in (7, 8, 9):
                shadow.token_ids.append(token)  # type: ignore[attr-defined]
                off.planner.shadows.judge_one(shadow)
            assert shadow.proposal is None
    off.steps()
    assert sum(off.depths) > sum(before)
    assert off.shadows == []


def test_a_shadow_is_judged_as_soon_as_a_token_differs(off: Engine) -> None:
    (shadow, _) = off.shadows
    proposes(shadow, 3, 7, 8, 9)
    shadow.token_ids.append(7)  # type: ignore[attr-defined]
    off.planner.shadows.judge_one(shadow)
    assert shadow.proposal is not None
    shadow.token_ids.append(1)  # type: ignore[attr-defined]
    off.planner.shadows.judge_one(shadow)
    assert shadow.proposal is None


def test_a_closed_shadow_has_a_successor(off: Engine) -> None:
    (shadow, _) = off.shadows
    off.planner.leave(shadow)
    off.sequences.remove(shadow)
    off.steps()
    assert len(off.shadows) == 2
    assert shadow not in off.shadows
