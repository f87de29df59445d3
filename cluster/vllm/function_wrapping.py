"""Wraps functions of vLLM with functions of ours."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_MARK = "_outrider_wrapper"


def wrap_function(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Makes `owner.name(...)` call `wrapper(original, ...)`. Does nothing if `owner.name` is wrapped already."""
    original = getattr(owner, name)
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        return wrapper(original, *arguments, **options)

    setattr(wrapped, _MARK, True)
    setattr(owner, name, wrapped)
