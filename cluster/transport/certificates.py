"""A program's certificate, its key and the CA's, as currently in their files."""

from __future__ import annotations

import logging
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path

from cluster.config.tls import TlsConfig
from cluster.errors import ConfigurationError
from cluster.transport.file_watch import FileWatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pems:
    ca: bytes
    certificate: bytes
    key: bytes
    version: int  # grows with every change of the files


class Certificates:
    """Certificates that follow the changes of their files. Thread-safe.

    Changed files are read when the certificates are next needed. If the new files are unusable, such as a certificate
    whose key is not there yet, the previous certificates stay in use.
    """

    def __init__(self, tls: TlsConfig) -> None:
        """`tls` must be on. Raises ConfigurationError, with the name of the file, if a file is unusable."""
        self._ca, self._certificate, self._key = (
            path or "" for path in (tls.ca_file, tls.certificate_file, tls.key_file)
        )
        self._watch = FileWatch((self._ca, self._certificate, self._key))
        self._lock = threading.Lock()
        self._pems = self._read(version=0)

    def current(self) -> Pems:
        with self._lock:
            if self._watch.has_changed():
                try:
                    self._pems = self._read(self._pems.version + 1)
                    logger.info("reloaded %s and its key", self._certificate)
                except ConfigurationError as error:
                    logger.warning("%s; the previous certificates stay in use", error)
            return self._pems

    def page_context(self) -> ssl.SSLContext:
        """Returns the server context of a page for callers with a certificate of the same CA."""
        return _server_context(self._ca, self._certificate, self._key)

    def reader_context(self) -> ssl.SSLContext:
        """Returns the client context for a reader of such a page. Raises ConfigurationError if a file is unusable.

        The client sends its certificate only to a server with a certificate of the same CA.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # requires a certificate for the dialled name
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        load_certificate(context, self._certificate, self._key, "tls.certificate_file")
        _load_authority(context, self._ca)
        return context

    def _read(self, version: int) -> Pems:
        pems = Pems(
            _content("ca_file", self._ca),
            _content("certificate_file", self._certificate),
            _content("key_file", self._key),
            version,
        )
        _server_context(self._ca, self._certificate, self._key)  # gRPC would not report files that do not match
        return pems


def _content(setting: str, path: str) -> bytes:
    """Returns the contents of the file at `path`. Raises ConfigurationError."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"tls.{setting}: cannot read {path}: {error.strerror}") from error


def _server_context(ca: str, certificate: str, key: str) -> ssl.SSLContext:
    """Returns a server's context. Raises ConfigurationError if the files are not certificates, or do not match."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    load_certificate(context, certificate, key, "tls.certificate_file")
    _load_authority(context, ca)
    return context


def _load_authority(context: ssl.SSLContext, ca: str) -> None:
    try:
        context.load_verify_locations(ca)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"tls.ca_file: {ca} has no certificate: {error}") from error


def load_certificate(context: ssl.SSLContext, certificate: str, key: str, setting: str) -> None:
    """Makes new connections of `context` use the files.

    Raises ConfigurationError naming `setting` if they are unusable.
    """
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except (OSError, ValueError) as error:  # SSLError is a subclass of OSError
        reason = getattr(error, "strerror", None) or error
        raise ConfigurationError(f"{setting}: {certificate} and {key} cannot be used: {reason}") from error


def _no_password() -> str:
    raise ValueError("the key is encrypted, and no password can be entered")
