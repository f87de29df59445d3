"""Traits: the properties of a worker that its answers depend on. Workers of one pool have equal traits."""

from __future__ import annotations

import time
from collections.abc import Collection

Traits = tuple[tuple[str, str], ...]
"""Names and values, sorted: workers with equal ones give equal answers. (): unknown."""

PATIENCE_S = 10.0
_LONGEST_VALUE = 64
_MIX = "to mix processors, set OUTRIDER_CPU_ISA=portable and the same target.dtype on every target,"


class Reference:
    """The traits that workers of a pool must have: those of the first usable worker.

    They stay while a usable worker has them, and for another `PATIENCE_S` seconds, because a worker may be restarting.
    If no listed worker has them any more, they end at once. Then the next worker that can be used sets them.
    """

    def __init__(self) -> None:
        self._traits: Traits | None = None
        self._held_at = 0.0  # when a usable worker last had them

    def objection(self, traits: Traits, *, usable: Collection[Traits], listed: Collection[Traits]) -> str | None:
        """Returns why a worker with `traits` cannot be used; None if it can.

        `usable`, `listed`: traits of the other workers that are usable, or listed.
        """
        now = time.monotonic()
        if self._traits in usable:
            self._held_at = now
        elif self._traits not in listed or now > self._held_at + PATIENCE_S:
            self._traits = traits
        if traits != self._traits:
            return difference(traits, self._traits or ())
        self._held_at = now
        return None


def difference(traits: Traits, reference: Traits) -> str:
    """Returns each differing trait with both values, in words."""
    if not traits:
        return "it does not report what its answers depend on, unlike the pool: its version is older"
    own, others = dict(traits), dict(reference)
    differing = [name for name in sorted(own.keys() | others.keys()) if own.get(name) != others.get(name)]
    verbs = {name: "are" if name.endswith("s") else "is" for name in differing}
    said = [
        f"its {name} {verbs[name]} {_value(own, name)}, the pool's {verbs[name]} {_value(others, name)}"
        for name in differing
    ]
    are_cpus = all(traits.get("kernels", "").startswith("CpuModel") for traits in (own, others))
    advice = f": {_MIX} or" if are_cpus and {"kernels", "processor"} & {*differing} else ":"
    return "; ".join(said) + f"{advice} see router.allow_different_targets"


def _value(traits: dict[str, str], name: str) -> str:
    return traits.get(name, "unknown")[:_LONGEST_VALUE] or "empty"
