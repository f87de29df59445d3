"""Metrics pages of a cluster's programs, read as numbers."""

from __future__ import annotations

import http.client
import ssl
import urllib.request
from collections import defaultdict
from collections.abc import Iterable

from prometheus_client.parser import text_string_to_metric_families

from cluster.errors import ConfigurationError

_SECONDS = 10.0
_MAX_BYTES = 16 * 2**20

Sample = tuple[str, frozenset[tuple[str, str]]]
"""A metric's name and labels."""


class Page:
    """What one metrics page says, at one time."""

    def __init__(self, text: str) -> None:
        self._values: dict[Sample, float] = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def sum(self, name: str, **labels: str) -> float:
        """Over all samples of `name` that have these labels; 0 where there is none."""
        wanted = labels.items()
        return sum(value for (of, has), value in self._values.items() if of == name and wanted <= set(has))

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """The values of `name` by what `label` is."""
        found: defaultdict[str, float] = defaultdict(float)
        for (of, labels), value in self._values.items():
            if of == name:
                found[dict(labels).get(label, "")] += value
        return dict(found)

    def find(self, name: str, **labels: str) -> float | None:
        """The first sample of `name` with these labels; None: there is none."""
        wanted = labels.items()
        return next((value for (of, has), value in self._values.items() if of == name and wanted <= set(has)), None)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """None: the answer is taken as it is, and is an error."""


def read_page(url: str, context: ssl.SSLContext | None = None, *, key: str | None = None) -> Page:
    """Past any proxy. `key`: of the router, for its own page: a worker says itself where its page is, and gets none.

    Raises ConfigurationError.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigurationError(f"the metrics page {url[:200]!r} is neither http:// nor https://")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({}), _NoRedirects()]
    if url.startswith("https"):
        handlers.append(urllib.request.HTTPSHandler(context=context))
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.build_opener(*handlers).open(request, timeout=_SECONDS) as answer:
            return Page(answer.read(_MAX_BYTES).decode())
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ConfigurationError(
            f"the metrics page {url} cannot be read ({error}): run this where it can be, or set metrics_host"
        ) from error


def total(pages: Iterable[Page], name: str, **labels: str) -> float:
    return sum(page.sum(name, **labels) for page in pages)
