"""Versions of a draft on the workers of a Ray cluster, under load."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.fault_load import Answers, Question, under_load
from bench.fault_ray import RayFaultCluster
from cluster.config import Config
from cluster.model_folder import resolve_model_folder
from services import cli
from tests.soak import only_in_soak


@only_in_soak
def test_no_request_fails_and_a_worker_that_joins_has_the_promoted_version(
    cluster: RayFaultCluster,
    questions: list[Question],
    expected: Answers,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    new = tmp_path / "new"
    shutil.copytree(resolve_model_folder(Config().draft.model), new)
    weights = {
        name: tensor + 0.05 * torch.randn_like(tensor) for name, tensor in load_file(new / "model.safetensors").items()
    }
    save_file(weights, new / "model.safetensors", metadata={"format": "pt"})
    versions: list[list[str]] = []

    def drafts(*action: str) -> None:
        for arguments in (action, ("list",)):
            capsys.readouterr()
            assert cli.main(["drafts", *arguments, "--url", cluster.urls[0]]) == 0, capsys.readouterr()
        lines = capsys.readouterr().out.splitlines()
        versions.append([line.partition(": ")[2].partition(",")[0] for line in lines])

    def change() -> str:
        drafts("list")
        drafts("load", "new", "--share", "0.3")
        drafts("promote", "new")
        cluster.scale(4)
        drafts("list")
        drafts("rollback")
        return ""

    cluster.roll(
        "draft.drafter=model",
        "draft.threads=1",
        "draft.replicas=3",
        "ray.draft.max_replicas=4",
        f"draft.load_root={tmp_path}",
    )
    tally, _ = under_load(cluster.urls, questions, expected, change, 1.0)
    assert (tally.num_failed, tally.num_different_tokens) == (0, 0), tally.errors
    assert tally.num_sent > len(questions), "the load ended before the versions changed"
    old, latest = versions[0][0], versions[2][0]
    assert old != latest
    assert versions[0] == [old] * 3
    assert sorted(versions[1]) == sorted([old, old, latest])
    assert versions[2:] == [[latest] * 3, [latest] * 4, [old] * 4]
