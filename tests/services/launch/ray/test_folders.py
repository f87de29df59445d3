"""Folders of killed processes are removed by whoever comes next; those of living ones are not."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from services.launch.ray.folders import OwnedFolder, sweep


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_a_file_is_replaced_and_the_folder_removed() -> None:
    folder = OwnedFolder()
    folder.replace("targets", "a:1\n")
    assert folder.replace("targets", "b:1\n").read_text() == "b:1\n"
    assert sorted(path.name for path in folder.path.iterdir()) == ["lock", "targets"]
    folder.remove()
    assert not folder.path.exists()


def test_the_folder_of_a_living_process_stays(tmp_path: Path) -> None:
    folder = OwnedFolder()
    assert sweep()
    subprocess.run([sys.executable, "-c", "from services.launch.ray.folders import sweep; sweep()"], check=True)
    assert folder.path.exists()
    folder.remove()


def test_the_folder_of_a_dead_process_goes(tmp_path: Path) -> None:
    script = "from services.launch.ray.folders import OwnedFolder; print(OwnedFolder().path)"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert Path(done.stdout.strip()).exists()
    assert not sweep()
    assert list(tmp_path.iterdir()) == []
