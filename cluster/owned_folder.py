"""Temporary folders of programs that may be killed at any time.

A folder belongs to the process that holds its lock. The kernel releases the lock when that process ends for any reason.
So a folder that can be locked has no owner, and the next such program on this machine removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import weakref
from pathlib import Path

_LOCK = "lock"


class OwnedFolder:
    """A temporary folder, removed by `remove` or with this object.

    If its process is killed, the next owner of a folder with the same `prefix` removes it.
    """

    def __init__(self, prefix: str) -> None:
        sweep(prefix)
        # It gets the name that `sweep` looks for when it is locked, not before.
        new = Path(tempfile.mkdtemp(prefix=f".{prefix}"))
        lock = os.open(new / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX)
        self.path = new.rename(new.with_name(new.name.removeprefix(".")))
        self._remover = weakref.finalize(self, _remove, self.path, lock)

    def remove(self) -> None:
        self._remover()

    def replace(self, name: str, text: str) -> Path:
        """Replaces the contents of the file `name` by `text` atomically, so that readers never see a part."""
        path = self.path / name
        new = self.path / f".{name}.new"
        new.write_text(text, encoding="utf-8")
        return new.replace(path)


def _remove(path: Path, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.close(lock)


def sweep(prefix: str) -> bool:
    """Removes this user's folders of `prefix` on this machine without an owner. Returns True if any remain."""
    are_owned = False
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # another process was faster, or it is not an owned folder
            found = folder.lstat()  # any user may put an entry with any name into the temporary folder
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            except BlockingIOError:
                are_owned = True
            finally:
                os.close(lock)
    return are_owned
