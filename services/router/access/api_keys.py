"""The keys of clients, in a file that may change while the router runs.

    # name:key, or name:sha256:hex, so that the file does not contain the key itself; then attributes of the name
    alice:sk-5f1d...
    oncall:sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08 priority=all output_token_ms=40

A name may have several keys, for example an old and a new one during a rotation; they share the limits of the name.
Only the SHA-256 of each key is kept in memory, and no message quotes a key.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cluster.errors import ConfigurationError
from cluster.transport.file_watch import FileWatch

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.5
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_KEY = re.compile(r"[!-~]{1,512}")
_SHA256 = re.compile(r"sha256:([0-9a-fA-F]{64})")
_MS = re.compile(r"0*[1-9][0-9]*(\.[0-9]+)?|0*\.0*[1-9][0-9]*")
_SHORT_KEY = 16  # characters; a shorter one can be guessed


@dataclass(frozen=True, slots=True)
class KeyAttributes:
    """Attributes of the keys of one name."""

    # own: `priority` orders the requests of the name; all: it orders them among those of all names.
    priority: Literal["own", "all"] = "own"
    # Limit of mean milliseconds per output token of requests without their own; None: the target's.
    output_token_ms: float | None = None

    @classmethod
    def parse(cls, words: Sequence[str]) -> KeyAttributes:
        """Raises ValueError unless each of `words` is attribute=value."""
        given: dict[str, Any] = {}
        for word in words:
            name, _, value = word.partition("=")
            if not (
                (name == "priority" and value in ("own", "all")) or (name == "output_token_ms" and _MS.fullmatch(value))
            ):
                raise ValueError(  # without the word, which may be part of a key
                    "after the key only attributes may follow: priority=own or all; output_token_ms=MILLISECONDS"
                )
            if name in given:
                raise ValueError(f"{name} is given twice")
            given[name] = value if name == "priority" else float(value)
        return cls(**given)


class ApiKeys:
    def __init__(self, path: str, setting: str) -> None:
        """Reads the file at `path`. Raises ConfigurationError, which names `setting`."""
        self._path = path
        self._setting = setting
        self._watch = FileWatch([path], settles=True)
        try:
            self._names, self._attributes = _read(path)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{setting}: {_explain(path, error)}") from error

    def name_of(self, key: bytes) -> str | None:
        """Returns the name of `key`; None if it is unknown.

        Takes the same time for every wrong key: the table is keyed by the first bytes of the digest, which a caller
        cannot choose, and candidates are compared in constant time.
        """
        digest = hashlib.sha256(key).digest()
        for known, name in self._names.get(digest[:8], ()):
            if hmac.compare_digest(known, digest):
                return name
        return None

    def attributes_of(self, name: str) -> KeyAttributes:
        return self._attributes[name]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for entries in self._names.values() for _, name in entries)

    async def follow(self) -> None:
        """Reads the file again whenever it has changed, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            self.look()

    def look(self) -> None:
        """Reads the file if it has changed. A broken file leaves the keys unchanged, and is reported once."""
        if not self._watch.has_changed():
            return
        try:
            names, attributes = _read(self._path)
        except (OSError, ValueError) as error:
            logger.warning("%s: %s; the previous keys stay in use", self._setting, _explain(self._path, error))
            return
        self._names, self._attributes = names, attributes
        logger.info("%s: reloaded %s, keys of %d names", self._setting, self._path, len(self.names))


def parse_keys(text: str) -> tuple[dict[bytes, str], dict[str, KeyAttributes]]:
    """Returns names by the SHA-256 of their keys, and attributes by name.

    Raises ValueError naming the line, but never a key.
    """
    names: dict[bytes, str] = {}
    attributes: dict[str, KeyAttributes] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        entry = line.strip()
        if not entry or entry.startswith("#"):
            continue
        entry, *words = entry.split()
        name, _, key = entry.partition(":")
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"line {number}: write name:key or name:sha256:hex, the name of letters, digits and . _ - @"
            )
        if key.startswith("sha256:"):
            found = _SHA256.fullmatch(key)
            if found is None:
                raise ValueError(f"line {number}: after sha256: write 64 hexadecimal digits")
            digest = bytes.fromhex(found[1])
        elif _KEY.fullmatch(key):
            digest = hashlib.sha256(key.encode()).digest()
            if len(key) < _SHORT_KEY:
                logger.warning("the key of %r has fewer than %d characters and can be guessed", name, _SHORT_KEY)
        else:
            raise ValueError(f"line {number}: a key has 1 to 512 printable characters and no spaces")
        if names.get(digest, name) != name:
            raise ValueError(f"line {number}: {name} has the same key as {names[digest]}")
        names[digest] = name
        try:
            found_attributes = KeyAttributes.parse(words)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
        if attributes.setdefault(name, found_attributes) != found_attributes:
            raise ValueError(f"line {number}: {name} has other attributes than in an earlier line")
    if not names:
        raise ValueError("the file has no key, so that all requests would be refused")
    return names, attributes


def _read(path: str) -> tuple[dict[bytes, list[tuple[bytes, str]]], dict[str, KeyAttributes]]:
    """Returns names by the beginnings of their digests, and attributes by name."""
    names, attributes = parse_keys(Path(path).read_text(encoding="utf-8"))
    table: dict[bytes, list[tuple[bytes, str]]] = {}
    for digest, name in names.items():
        table.setdefault(digest[:8], []).append((digest, name))
    return table, attributes


def _explain(path: str, error: OSError | ValueError) -> str:
    if isinstance(error, OSError):
        return f"cannot read {path}: {error.strerror}"
    return f"{path} is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else f"{path}: {error}"
