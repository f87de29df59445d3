"""Detects that files were edited or replaced: keys, tokens and certificates, which change while programs run.

Files are polled, because no notification of changes works on every system. Kubernetes replaces a secret by changing the
target of a symbolic link, so the same path has another inode.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

_State = tuple[tuple[int, int, int] | None, ...]


class FileWatch:
    def __init__(self, paths: Iterable[str], *, settles: bool = False) -> None:
        """The caller must have read the current contents.

        `settles`: a change counts only when two consecutive polls agree. This is for callers that poll regularly, and
        that might otherwise read a file while a program writes it.
        """
        self._paths = tuple(paths)
        self._settles = settles
        self._known = self._seen = self._look()

    def has_changed(self) -> bool:
        """Returns True if the files have changed since the last call that returned True."""
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
