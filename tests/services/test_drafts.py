"""`outrider drafts` without a cluster that has versions."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cluster.config.file import load_config
from cluster.drafters.simulated import SimulatedDrafter
from cluster.errors import ConfigurationError
from cluster.model_folder import resolve_model_folder
from services import cli
from services.draft.versions import Version, make_next, make_version


@pytest.fixture(scope="module")
def simulated() -> Version:
    return make_version(load_config(None, ["target.engine=simulated", "draft.drafter=simulated"]))


def test_without_a_root_nothing_is_loaded(simulated: Version) -> None:
    assert isinstance(simulated.drafter, SimulatedDrafter)
    with pytest.raises(ConfigurationError, match=r"set draft\.load_root"):
        make_next(simulated, "x")


def test_a_drafter_without_a_model_of_its_own_has_no_versions(tmp_path, simulated: Version) -> None:
    settings = [f"draft.load_root={tmp_path}", "target.engine=simulated", "draft.drafter=simulated"]
    with pytest.raises(ConfigurationError, match=r"draft\.drafter simulated has no versions"):
        make_next(make_version(load_config(None, settings)), "x")


def test_without_a_router_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["drafts", "list", "--url", "http://127.0.0.1:9"]) == 2
    assert "127.0.0.1:9" in capsys.readouterr().err


def test_a_version_that_is_served_is_recognised_without_reading_all_weights(tmp_path: Path) -> None:
    shutil.copytree(resolve_model_folder("outrider-draft-2m"), tmp_path / "new")
    settings = ["draft.model=outrider-draft-2m", f"draft.load_root={tmp_path}", "draft.max_num_seqs=2"]
    served = make_next(make_version(load_config(None, settings)), "new")
    file = tmp_path / "new" / "model.safetensors"
    with file.open("r+b") as weights:  # between the parts that a fingerprint covers
        weights.seek(200_000)
        weights.write(b"\xff" * 64)
    assert make_next(served, "new") is served
