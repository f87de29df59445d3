"""A shared token in a file, between programs or for a metrics scraper.

The first line is the token that a program sends. A program accepts the tokens of all lines, so that an operator can
replace the token in one program after the other. Blank lines and lines that begin with # are ignored.
"""

from __future__ import annotations

import hmac
import logging
from pathlib import Path

from cluster.errors import ConfigurationError
from cluster.transport.file_watch import FileWatch

logger = logging.getLogger(__name__)

_MIN_CHARACTERS = 16


class TokenFile:
    """A token file. Thread-safe.

    A changed file is read when a token is next needed. If the new file is unusable, the previous tokens stay in use.
    """

    def __init__(self, path: str, setting: str) -> None:
        """Reads the file. Raises ConfigurationError, with the name of `setting`, if the file is unusable."""
        self._path = path
        self._setting = setting
        self._watch = FileWatch([path])
        self._tokens = _read(path, setting)

    def current(self) -> str:
        """Returns the token to send."""
        self._follow()
        return self._tokens[0].decode()

    def accepts(self, token: bytes) -> bool:
        """Returns True if `token` is accepted. Compares in constant time."""
        self._follow()
        return sum(hmac.compare_digest(token, known) for known in self._tokens) > 0  # compared with all, always

    def _follow(self) -> None:
        if not self._watch.has_changed():
            return
        try:
            self._tokens = _read(self._path, self._setting)
            logger.info("%s: reloaded the tokens in %s", self._setting, self._path)
        except ConfigurationError as error:
            logger.warning("%s; the previous tokens stay in use", error)


def _read(path: str, setting: str) -> tuple[bytes, ...]:
    """Returns the tokens in the file. Raises ConfigurationError, which never quotes a token."""
    try:
        lines = Path(path).read_text(encoding="ascii").splitlines()
    except OSError as error:
        raise ConfigurationError(f"{setting}: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigurationError(f"{setting}: {path} is not ASCII text") from None
    tokens = [token for line in lines if (token := line.strip()) and not token.startswith("#")]
    if not tokens:
        raise ConfigurationError(
            f"{setting}: {path} has no token: write one into it, such as the output of `openssl rand -hex 32`"
        )
    for token in tokens:
        if len(token) < _MIN_CHARACTERS or not token.isprintable() or " " in token:
            raise ConfigurationError(
                f"{setting}: a token in {path} is not {_MIN_CHARACTERS} or more printable characters without spaces"
            )
    return tuple(token.encode() for token in tokens)
