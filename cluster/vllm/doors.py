"""A function of vLLM's, put behind one of ours."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_MARK = "_outrider_door"


def put_in(owner: Any, name: str, door: Callable[..., Any]) -> None:
    """From now on `owner.name(...)` is `door(original, ...)`. A second time nothing is done."""
    original = getattr(owner, name)
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def behind_door(*arguments: Any, **options: Any) -> Any:
        return door(original, *arguments, **options)

    setattr(behind_door, _MARK, True)
    setattr(owner, name, behind_door)
