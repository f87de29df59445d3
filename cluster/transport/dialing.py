"""Channels to the workers of one pool."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from cluster.config.tls import TlsConfig
from cluster.transport.certificates import Certificates
from cluster.transport.token_file import TokenFile

Options = Sequence[tuple[str, Any]]

KEEPALIVE: Options = (
    # A silent worker is detected within four seconds; without `ping_timeout_ms` it could take a minute.
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.ping_timeout_ms", 2000),
)
_OPTIONS: Options = (
    ("grpc.enable_http_proxy", 0),
    # By default gRPC may take minutes to reconnect to a worker that was away for minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 300),
    ("grpc.min_reconnect_backoff_ms", 1000),  # limit of an attempt: TLS takes three round trips, and a busy host longer
)
_MAX_REASON_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class PageDialing:
    """Credentials for workers' metrics pages over HTTPS. `server_name` as in `Dialer`."""

    context: ssl.SSLContext
    server_name: str | None
    token: str | None  # the shared token


class Dialer:
    """Makes channels with the current certificates. `version` changes with the certificates."""

    def __init__(
        self,
        certificates: Certificates | None = None,
        token: TokenFile | None = None,
        server_name: str | None = None,
    ) -> None:
        """`server_name`: name in the workers' certificates; None: the dialled host."""
        self._certificates = certificates
        self._token = token
        self._server_name = server_name
        self._reading: tuple[int, ssl.SSLContext] | None = (
            None  # version of the certificates, and the SSL context made with it
        )

    @classmethod
    def of(cls, tls: TlsConfig, program: str, server_name: str | None = None) -> Dialer:
        """Makes the dialer of `program`. Raises ConfigurationError if a file cannot be used."""
        tls = tls.of(program)
        if not tls.is_on:
            return PLAIN
        token = None if tls.token_file is None else TokenFile(tls.token_file, "tls.token_file")
        return cls(Certificates(tls), token, server_name)

    @property
    def version(self) -> int:
        return 0 if self._certificates is None else self._certificates.current().version

    def channel(self, address: str, options: Options = ()) -> grpc.aio.Channel:
        if self._certificates is None:
            return grpc.aio.insecure_channel(address, options=self._with_own(options))
        return grpc.aio.secure_channel(address, self._credentials(self._certificates), options=self._with_own(options))

    def blocking_channel(self, address: str, options: Options = ()) -> grpc.Channel:
        """Returns a channel for callers without an event loop."""
        if self._certificates is None:
            return grpc.insecure_channel(address, options=self._with_own(options))
        return grpc.secure_channel(address, self._credentials(self._certificates), options=self._with_own(options))

    def page_dialing(self) -> PageDialing | None:
        """Returns credentials from the current files; None if the workers' pages are in plaintext.

        Raises ConfigurationError if a file is unusable.
        """
        if self._certificates is None:
            return None
        version = self._certificates.current().version
        if self._reading is None or self._reading[0] != version:
            self._reading = version, self._certificates.reader_context()
        token = None if self._token is None else self._token.current()
        return PageDialing(self._reading[1], self._server_name, token)

    def explain(self, error: grpc.RpcError) -> str | None:
        """Returns the reason, for the log, if authentication or TLS made the call fail; otherwise None."""
        if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
            return None
        code, details = error.code(), error.details() or ""
        if code is grpc.StatusCode.UNAUTHENTICATED:
            return f"it refuses our certificate or token: {details[:_MAX_REASON_CHARACTERS]}"
        if code is not grpc.StatusCode.UNAVAILABLE or self._certificates is None:
            return None
        for sign in ("CERTIFICATE_", "Verification Check", "handshake failed", "WRONG_VERSION_NUMBER"):
            if sign in details:
                return f"TLS fails: {details.rpartition('SSL routines:')[2][-_MAX_REASON_CHARACTERS:]}"
        if "Socket closed" in details:
            return "it closes the connection: if that persists, it may refuse our certificate, or not support TLS"
        return None

    def _credentials(self, certificates: Certificates) -> grpc.ChannelCredentials:
        pems = certificates.current()
        credentials = grpc.ssl_channel_credentials(pems.ca, pems.key, pems.certificate)
        if self._token is None:
            return credentials
        return grpc.composite_channel_credentials(credentials, grpc.metadata_call_credentials(_Sender(self._token)))

    def _with_own(self, options: Options) -> Options:
        name = () if self._server_name is None else (("grpc.ssl_target_name_override", self._server_name),)
        return (*_OPTIONS, *options, *name)


PLAIN = Dialer()


class _Sender(grpc.AuthMetadataPlugin):
    """Adds the current token to each call. gRPC uses this plugin only on encrypted connections."""

    def __init__(self, token: TokenFile) -> None:
        self._token = token

    def __call__(self, context: grpc.AuthMetadataContext, callback: grpc.AuthMetadataPluginCallback) -> None:
        callback((("authorization", f"Bearer {self._token.current()}"),), None)
