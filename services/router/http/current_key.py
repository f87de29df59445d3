"""The API key of the request that the current task answers.

It is a context variable because the code that counts tokens is far below the code that reads headers.
"""

from __future__ import annotations

from contextvars import ContextVar

current_key: ContextVar[str | None] = ContextVar("current_key", default=None)
"""The name of the key; None: the router has no keys."""
