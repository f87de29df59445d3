"""The router's TLS certificate, which is reloaded when its files change."""

from __future__ import annotations

import asyncio
import logging
import ssl

from cluster.config.router import RouterConfig
from cluster.errors import ConfigurationError
from cluster.transport.certificates import load_certificate
from cluster.transport.file_watch import FileWatch

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 1.0
_SETTING = "router.tls_certificate_file"


class HttpsCertificate:
    """The TLS certificate of all listeners of the router.

    New connections use the current files; existing ones keep the certificate that they started with.
    """

    def __init__(self, certificate: str, key: str) -> None:
        """Raises ConfigurationError if the files cannot be used."""
        self._files = certificate, key
        self._watch = FileWatch(self._files, settles=True)
        self.context = _new_context()
        load_certificate(self.context, *self._files, _SETTING)

    @classmethod
    def of(cls, config: RouterConfig) -> HttpsCertificate | None:
        """Returns the certificate; None if the router serves plain HTTP. Raises ConfigurationError."""
        if config.tls_certificate_file is None or config.tls_key_file is None:
            return None
        return cls(config.tls_certificate_file, config.tls_key_file)

    async def follow(self) -> None:
        """Reloads the files whenever they have changed, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_INTERVAL_S)
            self.look()

    def look(self) -> None:
        if not self._watch.has_changed():
            return
        try:
            load_certificate(
                _new_context(), *self._files, _SETTING
            )  # a failure must not leave half of it in the one in use
            load_certificate(self.context, *self._files, _SETTING)
            logger.info("reloaded %s", self._files[0])
        except ConfigurationError as error:
            logger.warning("%s; the previous certificate stays in use", error)


def _new_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
