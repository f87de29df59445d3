"""Foreground tasks of every launcher: count stop signals, and announce that the cluster is ready."""

from __future__ import annotations

import json
import signal
import threading
import urllib.error
import urllib.request
import webbrowser
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.config import Config
from services.http_call import pinned_context

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


def read_health(url: str, key: str | None = None, certificate_file: str | None = None) -> dict[str, Any] | None:
    """Returns the router's /health; None unless the whole path can answer. `certificate_file`: the router's own."""
    try:
        with get(f"{url}/health", _HEALTH_SECONDS, key, certificate_file) as response:
            body: dict[str, Any] = json.load(response)
            return body
    except (urllib.error.URLError, OSError):
        return None


def get(url: str, seconds: float, key: str | None, certificate_file: str | None) -> Any:
    """Returns a router's answer, without proxy. Raises OSError, or its subclass URLError."""
    context = pinned_context(certificate_file)
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}),
        *([] if context is None else [urllib.request.HTTPSHandler(context=context)]),
    )
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return opener.open(urllib.request.Request(url, headers=headers), timeout=seconds)


def announce(
    config: Config,
    urls: Sequence[str],
    seconds: float,
    programs: Mapping[str, str] | None = None,
    metrics_urls: Mapping[str, str] | None = None,
    *,
    opens_page: bool = False,
) -> None:
    """Prints that the routers at `urls` answer, and the addresses of page, programs and metrics.

    `seconds`: time since the launcher's start. `programs`: address and process ID by program.
    `opens_page`: opens the page in a browser, if there is one.
    """
    if config.target.engine == "simulated":
        print("\nTarget and draft are simulated: the generated text has no meaning.", flush=True)
    key = " \\\n    -H 'Authorization: Bearer KEY'" if config.router.api_keys_file else ""
    print(
        f"""
Outrider is ready at {", ".join(urls)} after {seconds:.1f} s. Try:

  curl {urls[0]}/v1/completions -H 'Content-Type: application/json'{key} \\
    -d '{{"prompt": "def main(", "max_tokens": 64, "temperature": 0}}'
""",
        flush=True,
    )
    if config.router.has_page:
        print(f"Open its page: {urls[0]}/\n", flush=True)
        if opens_page:
            # A browser in the terminal returns when it is closed, and others may take seconds.
            threading.Thread(target=webbrowser.open, args=(f"{urls[0]}/",), daemon=True).start()
    if programs:
        print("Programs:", *(f"  {name}: {place}" for name, place in programs.items()), "", sep="\n", flush=True)
    if metrics_urls:
        print("Metrics:", *(f"  {url} ({name})" for name, url in metrics_urls.items()), "", sep="\n", flush=True)
