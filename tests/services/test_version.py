"""`outrider --version`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.wire.version import WIRE_VERSION
from services import version
from services.cli import main


def test_the_version_line_has_commit_wire_and_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    kernels = ", ".join(version.built_kernels()) or "none"
    form = rf"outrider \d+\.\d+\.\d+ \(commit \S+, wire {WIRE_VERSION}, kernels built: {kernels}\)\n"
    assert re.fullmatch(form, shown), shown


def test_the_version_is_shown_without_pytorch() -> None:
    program = "import sys; from services.cli import main; sys.modules['torch'] = None; main(['--version'])"
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_the_commit_is_the_recorded_one_outside_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "_ROOT", tmp_path)
    assert version.commit() is None
    (tmp_path / "services").mkdir()
    (tmp_path / version.COMMIT_FILE).write_text("abc1234\n", encoding="utf-8")
    assert version.commit() == "abc1234"


@pytest.mark.parametrize("program", ["no-such-git", "false"])
def test_the_commit_is_unknown_without_git(program: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".git").touch()
    monkeypatch.setattr(version, "_ROOT", tmp_path)
    monkeypatch.setattr(version, "_DESCRIBE", (program,))
    assert version.commit() is None
    assert "(commit unknown, " in version.version_line()
