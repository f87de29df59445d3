"""Logging of the programs: one line per event on stderr, with the program's name, as text or as JSON.

A record may have fields, passed as `extra={"fields": {name: value}}`. In JSON they are keys of the line's object; in
text they follow the message as `name=value`. Line ends and terminal control characters are escaped.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import re
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NamedTuple

from cluster.config.types import LogFormat, LogLevel

# Environment variable: the program's name in its log, if it is not the command's, such as `target 1`.
LOG_NAME = "OUTRIDER_LOG_NAME"

# Lowest levels of messages of libraries: lower ones do not help an operator.
_QUIET = {
    "httpx": logging.WARNING,
    "grpc": logging.WARNING,
    "asyncio": logging.WARNING,
    "torch.utils._pytree": logging.ERROR,
}
_TEXT_LINE = re.compile(r"\d\d:\d\d:\d\d (DEBUG|INFO|WARNING|ERROR|CRITICAL) (.*)")
_CONTROL = {code: repr(chr(code))[1:-1] for code in (*range(32), *range(127, 160), 0x2028, 0x2029)}
_PLAIN_VALUE = re.compile(r"[!#-<>-~]+")  # needs no quotes next to `=`


def log_name(command: str) -> str:
    """Returns the name of this program in its log: the name that its launcher set, or `command`."""
    return os.environ.get(LOG_NAME, command)


def setup_logging(program: str, level: LogLevel = "info", form: LogFormat = "text") -> None:
    """Sends the log of this process to stderr, as `time level program: message` or as JSON objects with these keys."""
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonFormatter(program) if form == "json" else _TextFormatter(program))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name, least in _QUIET.items():
        logging.getLogger(name).setLevel(least)
    sys.excepthook = _log_end if form == "json" else sys.__excepthook__


class LoggedLine(NamedTuple):
    """A line of a program's log, read by the program that started it."""

    level: int
    message: str  # includes the program's name


def read_line(line: str) -> LoggedLine | None:
    """Parses `line`. Returns None if it is not a line of the log, such as a line of a traceback."""
    if match := _TEXT_LINE.fullmatch(line):
        return LoggedLine(logging.getLevelNamesMapping()[match[1]], match[2])
    if not line.startswith('{"time": '):
        return None
    try:
        event = json.loads(line)
        level = logging.getLevelNamesMapping()[event["level"].upper()]
        message = event.get("exception", event["message"]).splitlines()[-1:]
        return LoggedLine(level, f"{event['program']}: {''.join(message)}")
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


class _TextFormatter(logging.Formatter):
    def __init__(self, program: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {program}: %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        fields = "".join(f" {name}={_text(value)}" for name, value in _fields_of(record).items())
        record.message = record.message.rstrip().translate(_CONTROL) + fields
        return super().formatMessage(record)


class _JsonFormatter(logging.Formatter):
    def __init__(self, program: str) -> None:
        super().__init__()
        self._program = program

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        event: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "program": self._program,
            "logger": record.name,
            "message": record.getMessage().rstrip(),
            **_fields_of(record),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(event, default=str)  # ASCII, so that nothing in it ends a line


def _fields_of(record: logging.LogRecord) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = getattr(record, "fields", {})
    return fields


def _text(value: object) -> str:
    """Returns `value` as JSON; plain strings have no quotes."""
    if isinstance(value, str) and _PLAIN_VALUE.fullmatch(value):
        return value
    return json.dumps(value, default=str, separators=(",", ":"))


def _log_end(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Logs the exception that ends the program, in the format of all lines."""
    logging.getLogger(__name__).critical("the program failed", exc_info=(kind, error, traceback))
