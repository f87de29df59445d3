"""What every launcher does in the foreground: count the signals that ask it to end, say that it is ready, and where."""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from cluster.config import Config

_HEALTH_SECONDS = 5.0


class StopSignals:
    """Counts SIGINT and SIGTERM from now on: the first asks to drain, the second to end at once."""

    def __init__(self) -> None:
        self.count = 0
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._note)

    def is_hurried(self) -> bool:
        return self.count > 1

    def _note(self, *_: object) -> None:
        self.count += 1


def read_health(url: str) -> dict[str, Any] | None:
    """What the router at `url` says at /health; None unless the whole path can answer."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=_HEALTH_SECONDS) as response:
            body: dict[str, Any] = json.load(response)
            return body
    except (urllib.error.URLError, OSError):
        return None


def announce(config: Config, urls: Sequence[str], seconds: float) -> None:
    """Prints that the routers at `urls` answer, `seconds` after the launcher's start."""
    if config.target.engine == "simulated":
        print("\nTarget and draft are simulated: what they generate means nothing.", flush=True)
    print(
        f"""
Outrider is ready at {", ".join(urls)} after {seconds:.1f} s. Try:

  curl {urls[0]}/v1/completions -H 'Content-Type: application/json' \\
    -d '{{"prompt": "def main(", "max_tokens": 64, "temperature": 0}}'
""",
        flush=True,
    )
