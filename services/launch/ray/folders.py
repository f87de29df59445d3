"""Temporary folders of programs that may be killed at any time.

A folder belongs to the process that holds its lock, which the kernel lets go of when that process ends, however it
does. So a folder that can be locked is nobody's, and whoever comes next on this machine removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "outrider-ray-"
_LOCK = "lock"


class OwnedFolder:
    """Removed by `remove`, or by `sweep` after the end of the process that made it."""

    def __init__(self) -> None:
        sweep()
        # It gets the name that `sweep` looks for when it is locked, not before.
        new = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}"))
        self._lock = os.open(new / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = new.rename(new.with_name(new.name.removeprefix(".")))

    def replace(self, name: str, text: str) -> Path:
        """Makes `text` the contents of the file `name` in one step, for whoever reads it meanwhile."""
        path = self.path / name
        new = self.path / f".{name}.new"
        new.write_text(text, encoding="utf-8")
        return new.replace(path)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self._lock)


def sweep() -> bool:
    """Removes the folders on this machine that nobody owns any more; returns whether there are others."""
    are_owned = False
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError, PermissionError):  # another was faster; it is another user's
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            except BlockingIOError:
                are_owned = True
            finally:
                os.close(lock)
    return are_owned
