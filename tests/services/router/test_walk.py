"""The way of a chat request, as docs/ARCHITECTURE.md lists it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType

from tests.background_loop import BackgroundLoop

from .conftest import Router

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "services" / "router"
MAX_MODULES = 10  # to the target's stream


def listed() -> list[tuple[str, str]]:
    """Module and name of each row of the table."""
    page = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = page.partition("## The way of a chat request")[2].partition("\n## ")[0]
    return re.findall(r"^\| \d+ \| `(\S+)` \| `(\w+)` \|", section, re.MULTILINE)


async def observe_calls(observe: object) -> None:
    sys.setprofile(observe)  # type: ignore[arg-type]


def test_a_chat_request_takes_the_listed_way(router: Router, background: BackgroundLoop) -> None:
    called: list[tuple[str, str]] = []

    def observe(frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            called.append((path.relative_to(PACKAGE).as_posix(), frame.f_code.co_qualname))

    background.run(observe_calls(observe))
    response = router.chat(messages=[{"role": "user", "content": "the fox"}], max_tokens=3)
    background.run(observe_calls(None))
    assert response.status_code == 200
    position = 0
    for module, name in listed():
        found = (i for i in range(position, len(called)) if called[i][0] == module and name in called[i][1].split("."))
        position = next(found, -1)
        assert position >= 0, f"{module} {name} is not called after the rows above it"


def test_the_way_to_the_target_is_short() -> None:
    modules = [module for module, _ in listed()]
    way = modules[: modules.index("targets/call_stream.py") + 1]
    assert len(way) == len(set(way)) <= MAX_MODULES
