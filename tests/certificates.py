"""Certificates for tests: good ones, and such as nobody must take."""

from __future__ import annotations

import shutil
import ssl
from pathlib import Path

from cluster.config.tls import TlsConfig
from deploy.certificates import Authority, write_certificates

LOCAL = ["127.0.0.1", "localhost"]


class Certs:
    """Folders of certificates of one authority, and of another that nobody knows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "certs"
        write_certificates(self.folder, [], days=2)
        write_certificates(folder / "strangers", [], days=2)
        self._authority = Authority.in_folder(self.folder)
        self._stranger = Authority.in_folder(folder / "strangers")

    def tls(self, file: str = "{program}", *, token: str | None = None, token_file: str | None = "token") -> TlsConfig:
        """With the certificate in `file`. `token`: another than the shared one; no `token_file`: none is sent."""
        if token is not None:
            token_file = f"token-{token}"
            (self.folder / token_file).write_text(f"{token}-0123456789abcdef\n")
        return TlsConfig(
            ca_file=f"{self.folder}/ca.crt",
            certificate_file=f"{self.folder}/{file}.crt",
            key_file=f"{self.folder}/{file}.key",
            token_file=None if token_file is None else f"{self.folder}/{token_file}",
        )

    def make_bad_ones(self) -> None:
        """elsewhere: of another name. expired. stranger: of an authority that nobody knows."""
        self._authority.issue(self.folder, "target", ["elsewhere.example"], 2, file="elsewhere")
        self._authority.issue(self.folder, "target", LOCAL, -1, file="expired")
        self._stranger.issue(self.folder, "target", LOCAL, 2, file="stranger")

    def context(self, file: str | None = None) -> ssl.SSLContext:
        """Returns the context of a client that trusts the authority, and has the certificate in `file` if given."""
        context = ssl.create_default_context(cafile=f"{self.folder}/ca.crt")
        if file is not None:
            context.load_cert_chain(f"{self.folder}/{file}.crt", f"{self.folder}/{file}.key")
        return context

    def copy(self, file: str, to: str) -> None:
        """Replaces the certificate and key `to` by those of `file`."""
        for ending in ("crt", "key"):
            new = self.folder / f".{to}.{ending}"
            shutil.copy(self.folder / f"{file}.{ending}", new)
            new.replace(self.folder / f"{to}.{ending}")
