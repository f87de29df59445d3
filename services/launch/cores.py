"""Divides a small host's cores among the workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# With at least this many cores per worker the operating system divides them well enough.
_AMPLE_CORES_PER_WORKER = 8


@dataclass(frozen=True, slots=True)
class CoreShares:
    """Cores of each target and each draft worker; None leaves a worker unpinned."""

    targets: tuple[tuple[int, ...] | None, ...]
    drafts: tuple[tuple[int, ...] | None, ...]

    @property
    def drafts_share(self) -> bool:
        """True if drafts compute on cores of a target."""
        of_targets = {cpu for cpus in self.targets for cpu in cpus or ()}
        return any(of_targets.intersection(cpus or ()) for cpus in self.drafts)


def divide_cores(
    cpus: Sequence[int], num_targets: int, num_drafts: int, *, drafts_beside_targets: bool = False
) -> CoreShares:
    """Targets get all cores in equal shares; a draft worker gets the last core, shared with a target.

    A draft worker that has filled its window sleeps, and while it drafts the target mostly waits for it. A core of
    its own would be idle for most of a round, and the target's verify step would be slower. With
    `drafts_beside_targets` every target has the same number of its own drafts, which share its last core.
    """
    if len(cpus) >= _AMPLE_CORES_PER_WORKER * (num_targets + num_drafts):
        return CoreShares((None,) * num_targets, (None,) * num_drafts)
    share = max(1, len(cpus) // num_targets)
    targets = tuple(
        tuple(cpus[(i * share) % len(cpus) :][:share]) if num_targets > 1 else tuple(cpus) for i in range(num_targets)
    )
    if drafts_beside_targets:
        drafts = tuple((own[-1],) for own in targets for _ in range(num_drafts // num_targets))
    else:
        drafts = tuple((cpus[-1 - i % len(cpus)],) for i in range(num_drafts))
    return CoreShares(targets, drafts)
