"""The way of a chat request, as docs/ARCHITECTURE.md lists it."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path
from types import FrameType

from tests.background_loop import BackgroundLoop

from .conftest import Router

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "services" / "router"
MAX_MODULES, MAX_RETURNS = 14, 2


def listed() -> list[tuple[str, str]]:
    """Module and name of each row of the table."""
    page = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = page.partition("## The way of a chat request")[2].partition("\n## ")[0]
    return re.findall(r"^\| \d+ \| `(\S+)` \| `(\w+)` \|", section, re.MULTILINE)


async def observe_calls(observe: object) -> None:
    sys.setprofile(observe)  # type: ignore[arg-type]


def test_a_chat_request_takes_the_listed_way(router: Router, background: BackgroundLoop) -> None:
    """And with few returns: a reader seldom has to go back to a module that the request has left."""
    called: list[tuple[str, str]] = []
    begun: set[FrameType] = set()  # a coroutine that goes on is called again with the same frame

    def observe(frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE) and frame not in begun:
            begun.add(frame)
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
    on_the_way = [
        module
        for module, name in dict.fromkeys(called)  # replies may come one by one or together
        if any(module == one and two in name.split(".") for one, two in listed())
    ]
    stays = [module for module, _ in itertools.groupby(on_the_way)]
    assert len(set(stays)) <= MAX_MODULES
    assert len(stays) - len(set(stays)) <= MAX_RETURNS, "\n".join(stays)
