"""Servers of workers, with authentication of their callers."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, cast

import grpc
from google.protobuf.message import DecodeError

from cluster.config.tls import TlsConfig
from cluster.transport.certificates import Certificates, Pems
from cluster.transport.dialing import Options
from cluster.transport.token_file import TokenFile

audit = logging.getLogger("outrider.audit")

_BEARER = b"bearer "


class Listener:
    """Makes the servers of one program, for calls by other programs of its cluster."""

    def __init__(self, certificates: Certificates | None = None, token: TokenFile | None = None) -> None:
        self._certificates = certificates
        self._token = token

    @classmethod
    def of(cls, tls: TlsConfig, program: str) -> Listener:
        """Makes the listener of `program`. Raises ConfigurationError if a file cannot be used."""
        tls = tls.of(program)
        if not tls.is_on:
            return cls()
        return cls(Certificates(tls), None if tls.token_file is None else TokenFile(tls.token_file, "tls.token_file"))

    @property
    def is_secure(self) -> bool:
        return self._certificates is not None

    def new_server(self, options: Options = ()) -> grpc.aio.Server:
        """Returns a server that requires the token, if any, in every call, including health."""
        token_checks = [] if self._token is None else [_TokenCheck(self._token)]
        return grpc.aio.server(interceptors=[*token_checks, _MessageCheck()], options=options)

    def open_port(self, server: grpc.aio.Server, address: str) -> int:
        """Opens the port. Raises RuntimeError if the server cannot listen at the address."""
        if self._certificates is None:
            return server.add_insecure_port(address)
        certificates, pems = self._certificates, self._certificates.current()
        last = pems.version

        def renew() -> Any:  # or None, which grpcio's types leave out
            """Returns the certificates for a handshake; None: unchanged."""
            nonlocal last
            pems = certificates.current()
            if pems.version == last:
                return None
            last = pems.version
            return _configuration(pems)

        credentials = grpc.dynamic_ssl_server_credentials(
            _configuration(pems), renew, require_client_authentication=True
        )
        return server.add_secure_port(address, credentials)

    def page_context(self) -> Callable[[], ssl.SSLContext] | None:
        """Returns a function that makes a metrics page's TLS context from the current files; None: plaintext."""
        if self._certificates is None:
            return None
        certificates, context, version = self._certificates, self._certificates.page_context(), 0

        def current() -> ssl.SSLContext:
            nonlocal context, version
            pems = certificates.current()
            if pems.version != version:
                context, version = certificates.page_context(), pems.version
            return context

        return current

    def accepts(self, token: bytes) -> bool:
        """Returns True if `token` is the shared one."""
        return self._token is not None and self._token.accepts(token)

    @property
    def asks_for_token(self) -> bool:
        return self._token is not None


class _TokenCheck(grpc.aio.ServerInterceptor):
    def __init__(self, token: TokenFile) -> None:
        self._token = token

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        details = handler_call_details
        given = [value for key, value in details.invocation_metadata or () if key == "authorization"]
        value = given[0].encode() if len(given) == 1 and isinstance(given[0], str) else b""
        if value[: len(_BEARER)].lower() == _BEARER and self._token.accepts(value[len(_BEARER) :]):
            return await continuation(details)
        # A handler for streams in both directions fits every method: it does not wait for the caller's messages.
        return grpc.stream_stream_rpc_method_handler(_refusal(details.method, has_token=bool(given)))


class _MessageCheck(grpc.aio.ServerInterceptor):
    """Answers INVALID_ARGUMENT if a unary request cannot be parsed.

    Without this check gRPC would answer UNKNOWN and log a traceback. Methods with streams check their messages
    themselves.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return cast("grpc.RpcMethodHandler[Any, Any] | None", handler)
        parse, answer = handler.request_deserializer, handler.unary_stream or handler.unary_unary

        def parse_or_error(data: bytes) -> Any:
            try:
                return parse(data)
            except DecodeError as error:
                return error

        async def answer_or_refuse(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            if isinstance(request, DecodeError):
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(request))
            return await answer(request, context)

        make = (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
        return make(answer_or_refuse, parse_or_error, handler.response_serializer)


def _refusal(method: str, *, has_token: bool) -> Any:
    why = "the token is not this worker's: give both the same" if has_token else "there is no token: set"
    reason = f"{why} tls.token_file"

    async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        audit.warning("audit: refused UNAUTHENTICATED: %.120r from %s: %s", method, context.peer(), reason)
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, reason)

    return refuse


def _configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.certificate)], root_certificates=pems.ca)
