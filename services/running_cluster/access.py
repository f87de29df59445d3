"""Access of an operator's command to the programs of a running cluster: which of them get secrets.

The operator gives the router's address. The router gives those of the workers, and each worker that of its metrics
page: these two are untrusted.

- The router must show a certificate that --ca-file, --certificate or this machine vouches for. It gets the
  environment's key; for its page it gets the token of `router.metrics_token_file` instead, if that is set.
- A worker with `tls` must show a certificate of `tls.ca_file`, for `tls_server_name` or the dialled host. After it is
  verified, the worker gets our certificate, and the token of its pool's `metrics_token_file` or else the shared one.
- A worker without `tls` gets nothing, except for the token of `metrics_token_file` if the operator named the page.

With `tls` no page in plaintext is read. A page is at /metrics; redirects are not followed.
"""

from __future__ import annotations

import argparse
import os
import ssl
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urlsplit

from cluster.config import Config
from cluster.config.file import load_config
from cluster.errors import ConfigurationError
from cluster.transport.dialing import PLAIN, Dialer
from cluster.transport.token_file import TokenFile
from services.http_call import API_KEY, add_trust_arguments, pinned_context, trusted_context
from services.running_cluster.pages import MetricsPage, read_page
from services.settings import add_settings

if TYPE_CHECKING:
    from services.launch.local import LocalCluster

_PATH = "/metrics"
_ANY_HOST = ("0.0.0.0", "::")
_SETTINGS = (
    *(f"tls.{name}" for name in ("ca_file", "certificate_file", "key_file", "token_file")),
    *(f"{pool}.tls_server_name" for pool in ("target", "draft")),
    *(f"{section}.metrics_token_file" for section in ("router", "target", "draft")),
)


@dataclass(frozen=True, slots=True)
class RouterAccess:
    """`context`: trusted certificates; None: those that this machine trusts."""

    context: ssl.SSLContext | None = None
    metrics_token: TokenFile | None = None

    def read_page(self, url: str) -> MetricsPage:
        """Returns the page of the router at `url`. Raises ConfigurationError."""
        token = os.environ.get(API_KEY) if self.metrics_token is None else self.metrics_token.current()
        why = f"set {API_KEY} in the environment to one of its keys, or router.metrics_token_file"
        return read_page(f"{url}{_PATH}", self.context, token=token or None, without_token=why)


@dataclass(frozen=True, slots=True)
class PoolAccess:
    """Access to the workers of one pool, target or draft.

    `named`: URLs of metrics pages that the operator gave.
    """

    pool: str
    dialer: Dialer = PLAIN
    metrics_token: TokenFile | None = None
    named: Collection[str] = ()

    def read_page(self, url: str, address: str) -> MetricsPage:
        """Returns the page of the worker at `address` (host:port), advertised as `url`. Raises ConfigurationError."""
        parts = _checked(url)
        if parts.hostname in _ANY_HOST:  # it listens at all addresses of its host
            host, port = address.rpartition(":")[0], parts.port
            parts = parts._replace(netloc=host if port is None else f"{host}:{port}")
        url, pages = parts.geturl(), self.dialer.page_dialing()
        own = None if self.metrics_token is None else self.metrics_token.current()
        if (parts.scheme == "https") != (pages is not None):
            raise ConfigurationError(
                f"the metrics page {url!r} {_other_tls(is_ours=pages is not None)}: set tls.ca_file, "
                "tls.certificate_file and tls.key_file to those of the cluster"
            )
        setting = f"{self.pool}.metrics_token_file"
        if pages is not None:
            why = f"set {setting} or tls.token_file"
            return read_page(
                url, pages.context, server_name=pages.server_name, token=own or pages.token, without_token=why
            )
        if own is not None and url not in self.named:
            why = f"the token in {setting} is sent without TLS only to pages that you name: --metrics-page {url}"
            return read_page(url, without_token=why)
        return read_page(url, token=own, without_token=f"set {setting}")


@dataclass(frozen=True, slots=True)
class Access:
    """Access to one cluster; by default one without certificates, tokens and keys."""

    router: RouterAccess = RouterAccess()
    target: PoolAccess = field(default_factory=lambda: PoolAccess("target"))
    draft: PoolAccess = field(default_factory=lambda: PoolAccess("draft"))

    @classmethod
    def of(cls, config: Config, context: ssl.SSLContext | None = None, named: Collection[str] = ()) -> Access:
        """Returns the access with the certificates and tokens that `config` sets for a router.

        `named`: URLs of metrics pages that get a token without TLS. Raises ConfigurationError if a file cannot be used.
        """
        pools = (
            PoolAccess(
                pool,
                Dialer.of(config.tls, "router", worker.tls_server_name),
                _token(worker.metrics_token_file, pool),
                named,
            )
            for pool, worker in (("target", config.target), ("draft", config.draft))
        )
        return cls(RouterAccess(context, _token(config.router.metrics_token_file, "router")), *pools)

    @classmethod
    def to_own(cls, cluster: LocalCluster) -> Access:
        """Returns the access to a cluster that this process started, whose pages are known."""
        context = pinned_context(cluster.config.router.tls_certificate_file)
        return cls.of(cluster.config, context, frozenset(cluster.metrics_urls.values()))


def add_access_arguments(parser: argparse.ArgumentParser) -> None:
    """See `access_of`."""
    group = parser.add_argument_group(
        "certificates and tokens", "of workers and metrics pages, under their names in the configuration"
    )
    add_settings(group, _SETTINGS)
    group.add_argument(
        "--metrics-page",
        action="append",
        default=[],
        metavar="URL",
        help="address of a worker without TLS whose page requires a token: the token is sent in plaintext, and only "
        "to pages named here; may be repeated",
    )
    add_trust_arguments(parser)


def config_of(arguments: argparse.Namespace) -> Config:
    """Raises ConfigurationError."""
    config: Path | None = arguments.config
    return load_config(config, arguments.overrides, os.environ)


def access_of(arguments: argparse.Namespace, config: Config) -> Access:
    """Raises ConfigurationError."""
    return Access.of(config, trusted_context(arguments), frozenset(arguments.metrics_page))


def _token(path: str | None, section: str) -> TokenFile | None:
    return None if path is None else TokenFile(path, f"{section}.metrics_token_file")


def _checked(url: str) -> SplitResult:
    """Accepts only the URL of a metrics page from a worker. Raises ConfigurationError."""
    try:
        parts = urlsplit(url)
        is_page = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and parts.username is None
    except ValueError:
        is_page = False
    if not is_page or parts.path != _PATH or parts.query or parts.fragment:
        raise ConfigurationError(f"the metrics page {url[:200]!r} is not http[s]://host:port{_PATH}")
    return parts


def _other_tls(*, is_ours: bool) -> str:
    return "is in plaintext, and `tls` is set" if is_ours else "requires a certificate"
