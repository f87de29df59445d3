"""Tests that the next process removes the folders of killed processes, but not those of living ones."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cluster.owned_folder import OwnedFolder, sweep

PREFIX = "try-"
_MAKE = """
import time
from cluster.owned_folder import OwnedFolder
folder = OwnedFolder("try-")
print(folder.path, flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_a_file_is_replaced_and_the_folder_removed() -> None:
    folder = OwnedFolder(PREFIX)
    folder.replace("targets", "a:1\n")
    assert folder.replace("targets", "b:1\n").read_text() == "b:1\n"
    assert sorted(path.name for path in folder.path.iterdir()) == ["lock", "targets"]
    folder.remove()
    assert not folder.path.exists()


def test_the_folder_of_a_living_process_stays(tmp_path: Path) -> None:
    folder = OwnedFolder(PREFIX)
    assert sweep(PREFIX)
    subprocess.run([sys.executable, "-c", f"from cluster.owned_folder import sweep; sweep({PREFIX!r})"], check=True)
    assert folder.path.exists()
    folder.remove()


def test_the_folder_of_a_dead_process_goes(tmp_path: Path) -> None:
    script = (
        "import os; from cluster.owned_folder import OwnedFolder; "
        f"folder = OwnedFolder({PREFIX!r}); print(folder.path, flush=True); os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert Path(done.stdout.strip()).exists()
    assert not sweep(PREFIX)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_nobody_has_any_more_goes(tmp_path: Path) -> None:
    path = OwnedFolder(PREFIX).path
    assert not path.exists()
    assert list(tmp_path.iterdir()) == []


def test_whoever_is_to_remove_a_folder_has_it(tmp_path: Path) -> None:
    with contextlib.ExitStack() as ending:
        folder = OwnedFolder(PREFIX)
        path = folder.path
        ending.callback(folder.remove)
        del folder
        assert path.exists()
    assert not path.exists()


def test_those_of_processes_that_have_ended_are_removed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", _MAKE], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        others = Path(process.stdout.readline().strip())
        (others / "file").write_text("x")
        first = OwnedFolder(PREFIX)
        assert others.is_dir()
        process.kill()
    (tmp_path / "try-being-made").mkdir()
    second = OwnedFolder(PREFIX)
    assert not others.exists()
    assert first.path.is_dir()
    assert first.path != second.path
    assert (tmp_path / "try-being-made").is_dir()
    for folder in (first, second):
        folder.remove()
        assert not folder.path.exists()


def test_entries_of_others_are_skipped(tmp_path: Path) -> None:
    """Any local user may put any of these into the temporary folder."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lock").touch()
    (tmp_path / "try-file").touch()
    (tmp_path / "try-link").symlink_to(elsewhere)
    (tmp_path / "try-dangling").symlink_to(tmp_path / "none")
    (tmp_path / "try-loop").symlink_to(tmp_path / "try-loop")
    os.mkfifo(tmp_path / "try-fifo")
    (tmp_path / "try-linked-lock").mkdir()
    (tmp_path / "try-linked-lock" / "lock").symlink_to(elsewhere / "lock")
    (tmp_path / "try-folder-as-lock" / "lock").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    assert not sweep(PREFIX)
    OwnedFolder(PREFIX).remove()
    assert sorted(tmp_path.rglob("*")) == before


def test_folders_of_another_user_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = OwnedFolder(PREFIX)
    (tmp_path / "try-unowned").mkdir()
    (tmp_path / "try-unowned" / "lock").touch()
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert not sweep(PREFIX)
    assert (tmp_path / "try-unowned").is_dir()
    monkeypatch.undo()
    folder.remove()
