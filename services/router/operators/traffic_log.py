"""Logs the prompts of requests for `outrider distill`. Off by default.

Each line has the token IDs of one prompt, and nothing about who sent it. The text can be decoded from the token IDs.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
from collections.abc import Iterable, Sequence

from cluster.config.router import RouterConfig
from cluster.errors import ConfigurationError

logger = logging.getLogger(__name__)

_OWNER_ONLY = 0o600
# Another user may put a link into a shared folder, or a FIFO, which without O_NONBLOCK waits for a reader.
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FULL = "it is full"
_MAX_BYTES = 2**30  # of the file


class TrafficLog:
    """Appends prompts to a file until it has `max_bytes`.

    Several routers may share the file. Each checks its size before writing a line, so it exceeds the limit by at most
    one line per router.
    """

    def __init__(self, path: str, max_bytes: int = _MAX_BYTES) -> None:
        """Raises ConfigurationError if the file cannot be written, is a link, or belongs to another user."""
        try:
            self._file = os.open(path, _FLAGS, _OWNER_ONLY)
            found = os.fstat(self._file)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                os.close(self._file)
                raise ConfigurationError(f"router.traffic_log_file {path} is not a file of the router's user")
            os.fchmod(self._file, _OWNER_ONLY)  # an existing file may be readable by others
        except OSError as error:
            raise ConfigurationError(f"router.traffic_log_file {path} cannot be written: {error.strerror}") from error
        self._path = path
        self._max_bytes = max_bytes
        self._is_open = True
        if self._has_room(1):
            logger.warning("prompts are logged in %s, readable to everyone with access to the file", path)
        else:
            self._end(_FULL)

    @classmethod
    def of(cls, config: RouterConfig) -> TrafficLog | None:
        return None if config.traffic_log_file is None else cls(config.traffic_log_file)

    def add(self, prompts: Iterable[Sequence[int]]) -> None:
        """Appends `prompts`. A full or missing disk ends the log, but never fails a request."""
        if not self._is_open:
            return
        for prompt in prompts:
            line = json.dumps({"prompt_token_ids": list(prompt)}, separators=(",", ":")).encode() + b"\n"
            try:
                if not self._has_room(len(line)):
                    self._end(_FULL)
                    return
                self._append(line)
            except OSError as error:
                self._end(str(error.strerror))
                return

    def _append(self, line: bytes) -> None:
        """Writes `line`. Raises OSError if it cannot be written as a whole.

        A partial line is removed, unless another router has written after it.
        """
        num_written = os.write(self._file, line)
        if num_written < len(line):
            end = os.lseek(self._file, 0, os.SEEK_CUR)
            if os.fstat(self._file).st_size == end:  # otherwise another router has written after it
                os.ftruncate(self._file, end - num_written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _has_room(self, num_bytes: int) -> bool:
        return os.fstat(self._file).st_size + num_bytes <= self._max_bytes

    def _end(self, why: str) -> None:
        self._is_open = False
        logger.warning("no more prompts are logged in %s: %s", self._path, why)

    def close(self) -> None:
        os.close(self._file)
