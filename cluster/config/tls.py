"""The section `tls`: authentication between the programs of a cluster."""

from __future__ import annotations

from pydantic import Field, model_validator

from cluster.config.types import FilePath, Section


class TlsConfig(Section):
    """Paths of three certificate files: all of them, or none."""

    ca_file: FilePath | None = Field(
        None,
        description="certificates (PEM) of the authority that signs those of the programs. With the next two it "
        "turns on TLS between router, targets, drafts and metrics pages: each presents its certificate and "
        "checks the other's. `{program}` in a path stands for `router`, `target` or `draft`, and a changed file "
        "is reloaded",
    )
    certificate_file: FilePath | None = Field(
        None, description="the program's own certificate (PEM), followed by intermediate ones"
    )
    key_file: FilePath | None = Field(None, description="private key (PEM) of the certificate")
    token_file: FilePath | None = Field(
        None,
        description="token that callers send with every call and workers require, in addition to certificates; the "
        "first line is sent, each line is accepted",
    )

    @model_validator(mode="after")
    def _all_or_none(self) -> TlsConfig:
        files = {name: getattr(self, name) for name in ("ca_file", "certificate_file", "key_file")}
        missing = [name for name, value in files.items() if value is None]
        if missing and len(missing) < len(files):
            raise ValueError(f"TLS between programs needs all three files: set {', '.join(missing)} too")
        if missing and self.token_file is not None:
            raise ValueError(
                "token_file needs TLS, or the token is sent in plaintext: set ca_file, certificate_file, key_file"
            )
        return self

    @property
    def is_on(self) -> bool:
        return self.ca_file is not None

    def of(self, program: str) -> TlsConfig:
        """Returns these settings with the paths for `program`."""
        paths = {name: None if path is None else path.replace("{program}", program) for name, path in self}
        return self.model_copy(update=paths)
