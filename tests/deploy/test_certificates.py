"""Certificates for development: what the command writes can be used, and says what is wrong."""

from __future__ import annotations

import importlib.util
import stat
from pathlib import Path

import pytest

from cluster.config.tls import TlsConfig
from cluster.transport.certificates import Certificates
from deploy import certificates


def tls_of(folder: Path, program: str = "{program}") -> TlsConfig:
    return TlsConfig(
        ca_file=f"{folder}/ca.crt",
        certificate_file=f"{folder}/{program}.crt",
        key_file=f"{folder}/{program}.key",
        token_file=f"{folder}/token",
    )


def test_what_is_written_can_be_used_and_is_renewed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "certs"
    assert certificates.main([str(folder), "--name", "gpu1.internal", "--name", "10.0.0.1"]) == 0
    assert f"certificate_file: {folder}/{{program}}.crt" in capsys.readouterr().out
    before = {}
    for program in ("router", "target", "draft", "client"):
        before[program] = Certificates(tls_of(folder).of(program)).current().certificate
    for secret in (*folder.glob("*.key"), folder / "token"):
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    kept = [(folder / name).read_bytes() for name in ("ca.crt", "ca.key", "token")]
    assert certificates.main([str(folder)]) == 0
    assert [(folder / name).read_bytes() for name in ("ca.crt", "ca.key", "token")] == kept
    for program, certificate in before.items():
        assert Certificates(tls_of(folder).of(program)).current().certificate != certificate


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--name", "a b"], "--name 'a b'"),
        (["--name", ""], "--name ''"),
        (["--days", "0"], "--days 0"),
    ],
)
def test_what_cannot_be_a_name_is_refused(
    arguments: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert certificates.main([str(tmp_path / "certs"), *arguments]) == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "certs").exists()


def test_half_an_authority_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    certificates.main([str(tmp_path)])
    (tmp_path / "ca.key").unlink()
    assert certificates.main([str(tmp_path)]) == 2
    assert "repair ca.crt and ca.key" in capsys.readouterr().err


def test_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert certificates.main([str(tmp_path / "certs")]) == 2
    assert "pip install cryptography" in capsys.readouterr().err
