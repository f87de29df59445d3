"""Tells when files have been edited or replaced: those of keys, tokens and certificates, which change while all runs.

Files are looked at, since nothing tells of a change on every system. Kubernetes replaces a secret by turning a symbolic
link around, which is another inode behind the same path.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

_State = tuple[tuple[int, int, int] | None, ...]


class FileWatch:
    def __init__(self, paths: Iterable[str], *, settles: bool = False) -> None:
        """As they are now is how the caller knows them. `settles`: a change counts when two looks in a row see the
        same, for a caller who looks regularly and would otherwise read what somebody is still writing.
        """
        self._paths = tuple(paths)
        self._settles = settles
        self._known = self._seen = self._look()

    def has_changed(self) -> bool:
        """Returns whether the files have changed since this last returned True."""
        before, self._seen = self._seen, self._look()
        if self._seen == self._known or (self._settles and self._seen != before):
            return False
        self._known = self._seen
        return True

    def _look(self) -> _State:
        return tuple(_state(path) for path in self._paths)


def _state(path: str) -> tuple[int, int, int] | None:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
