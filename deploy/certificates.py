"""An authority for development, certificates of the programs that it signs, and a shared token.

Clusters in production have an authority already, or cert-manager; this is for trying TLS in a minute.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import ipaddress
import os
import re
import secrets
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.errors import ConfigurationError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

PROGRAMS = ("router", "target", "draft")
_CLIENT = "client"  # for metrics scrapers and health checks; it serves nothing
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_AUTHORITY_DAYS = 3650
_BACKDATED = datetime.timedelta(minutes=5)  # tolerance for clocks that are slightly slow
_HOST_NAME = re.compile(
    r"(\*\.)?([A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?\.)*[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes DIR/ca.crt and ca.key (existing ones are kept), PROGRAM.crt and PROGRAM.key of router, target and "
        "draft, client.crt and client.key for metrics scrapers, and DIR/token. Run again, it renews the "
        "certificates. For development only: everyone who can read ca.key can impersonate any program."
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument(
        "--name",
        action="append",
        default=[],
        metavar="NAME",
        help="host name or address at which programs are called, in addition to localhost, this host's name and "
        "outrider-PROGRAM; may be repeated",
    )
    parser.add_argument(
        "--days", type=int, default=90, metavar="N", help="days for which certificates are valid; default 90"
    )
    parser.epilog = "example: python -m deploy.certificates certs --name gpu1.internal --name 10.0.0.1"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.certificates")
    add_arguments(parser)
    try:
        run(parser.parse_args(argv))
    except ConfigurationError as error:
        print(f"python -m deploy.certificates: {error}", file=sys.stderr)
        return 2
    return 0


def run(arguments: argparse.Namespace) -> None:
    """Raises ConfigurationError if `cryptography` is missing, or a name is invalid."""
    if importlib.util.find_spec("cryptography") is None:
        raise ConfigurationError("cryptography is not installed: pip install cryptography")
    if not 1 <= arguments.days <= _AUTHORITY_DAYS:
        raise ConfigurationError(f"--days {arguments.days} is not from 1 to {_AUTHORITY_DAYS}")
    folder: Path = arguments.folder
    write_certificates(folder, arguments.name, arguments.days)
    print(
        f"""\
Wrote {folder}: ca, {", ".join(PROGRAMS)}, {_CLIENT}, token. For all programs:

  tls:
    ca_file: {folder}/ca.crt
    certificate_file: {folder}/{{program}}.crt
    key_file: {folder}/{{program}}.key
    token_file: {folder}/token
  router:
    tls_certificate_file: {folder}/router.crt
    tls_key_file: {folder}/router.key"""
    )


def write_certificates(folder: Path, names: list[str], days: int) -> None:
    """Writes the files that `add_arguments` describes. Raises ConfigurationError."""
    for name in names:
        _check_name(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        authority = Authority.in_folder(folder)
        local = (*_LOCAL_NAMES, socket.gethostname())
        for program in PROGRAMS:
            authority.issue(folder, program, [f"outrider-{program}", *local, *names], days)
        authority.issue(folder, _CLIENT, [f"outrider-{_CLIENT}"], days, is_server=False)
        if not (folder / "token").exists():
            _write(folder / "token", f"{secrets.token_hex(32)}\n".encode(), is_secret=True)
    except OSError as error:
        raise ConfigurationError(f"cannot write {error.filename or folder}: {error.strerror}") from error


class Authority:
    """Signs certificates. Imports `cryptography`, which only this command needs, when it is made."""

    def __init__(self, certificate: x509.Certificate, key: EllipticCurvePrivateKey) -> None:
        self._certificate = certificate
        self._key = key

    @classmethod
    def in_folder(cls, folder: Path) -> Authority:
        """Returns the existing authority, or a new one. Raises ConfigurationError if the existing one is broken."""
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        certificate_file, key_file = folder / "ca.crt", folder / "ca.key"
        if not certificate_file.exists() and not key_file.exists():
            return cls._new(certificate_file, key_file)
        try:
            certificate = x509.load_pem_x509_certificate(certificate_file.read_bytes())
            key = serialization.load_pem_private_key(key_file.read_bytes(), password=None)
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"the authority in {folder} cannot be used ({error}): repair ca.crt and ca.key, or remove both"
            ) from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise ConfigurationError(f"{key_file} is not the key of {certificate_file}: remove both")
        return cls(certificate, key)

    @classmethod
    def _new(cls, certificate_file: Path, key_file: Path) -> Authority:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        name = _subject("Outrider development CA")
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _BACKDATED)
            .not_valid_after(now + datetime.timedelta(days=_AUTHORITY_DAYS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        _write_pair(certificate_file, key_file, certificate, key)
        return cls(certificate, key)

    def issue(
        self,
        folder: Path,
        program: str,
        names: list[str],
        days: float,
        *,
        is_server: bool = True,
        file: str | None = None,
    ) -> None:
        """Writes a certificate of `program` for `names`, and its key. With `days` below 0 it is expired."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID

        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        until = now + datetime.timedelta(days=days)
        purposes = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if is_server else [])]
        certificate = (
            x509.CertificateBuilder()
            .subject_name(_subject(f"outrider-{program}"))
            .issuer_name(self._certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(min(now, until) - _BACKDATED)
            .not_valid_after(until)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(x509.SubjectAlternativeName(list(map(_general_name, dict.fromkeys(names)))), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._certificate.public_key()),  # type: ignore[arg-type]
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        stem = file or program
        _write_pair(folder / f"{stem}.crt", folder / f"{stem}.key", certificate, key)


def _check_name(name: str) -> None:
    """Raises ConfigurationError if `name` is invalid."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        if len(name) > 253 or _HOST_NAME.fullmatch(name) is None:
            raise ConfigurationError(f"--name {name!r} is neither a host name nor an address") from None


def _general_name(name: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _subject(name: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _write_pair(
    certificate_file: Path, key_file: Path, certificate: x509.Certificate, key: EllipticCurvePrivateKey
) -> None:
    from cryptography.hazmat.primitives import serialization

    pem = serialization.Encoding.PEM
    pkcs8, unencrypted = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    _write(key_file, key.private_bytes(pem, pkcs8, unencrypted), is_secret=True)
    _write(certificate_file, certificate.public_bytes(pem), is_secret=False)


def _write(path: Path, content: bytes, *, is_secret: bool) -> None:
    """Writes the file atomically, so that a program that follows it never reads a part."""
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if is_secret else 0o644), "wb") as file:
        file.write(content)
    new.replace(path)


if __name__ == "__main__":
    sys.exit(main())
