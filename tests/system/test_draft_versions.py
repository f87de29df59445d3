"""Versions of a draft that are loaded while it drafts: the same tokens, and a version that cannot be is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.config import Config
from cluster.model_folder import resolve_model_folder
from services import cli
from services.launch.local import LocalCluster
from tests.services.distill.sql_prompts import prompts
from tests.soak import length
from tests.waiting import wait_until

from .cases import sampled_cases
from .client import assert_nothing_in_use, complete_all
from .conftest import PATIENT, READY_TIMEOUT_SECONDS, cluster_config

NUM_SWAPS = length(3, 20)


def changed(folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Copies the bundled draft to `folder` with other weights."""
    shutil.copytree(resolve_model_folder(Config().draft.model), folder)
    file = folder / "model.safetensors"
    tensors = {name: change(tensor) for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("drafts") / "root"
    generator = torch.Generator().manual_seed(3)
    changed(root / "noisy", lambda one: one + 0.05 * torch.randn(one.shape, generator=generator).to(one.dtype))
    changed(root / "not numbers", lambda one: one * torch.nan)
    changed(root / "cut off", lambda one: one)
    with (root / "cut off" / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)
    changed(root / "wrong shape", lambda one: one)
    config = json.loads((root / "wrong shape" / "config.json").read_text())
    (root / "wrong shape" / "config.json").write_text(json.dumps(config | {"intermediate_size": 7}))
    shutil.copytree(root / "noisy", root.parent / "outside")
    return root


@pytest.fixture(scope="module")
def two_drafts(root: Path) -> Iterator[LocalCluster]:
    settings = (PATIENT, "draft.replicas=2", f"draft.load_root={root}", "speculation.suffix_bytes=100000")
    with LocalCluster(cluster_config(*settings)) as running:
        running.wait_ready(READY_TIMEOUT_SECONDS)
        yield running


def versions(cluster: LocalCluster, capsys: pytest.CaptureFixture[str]) -> list[str]:
    capsys.readouterr()
    assert cli.main(["drafts", "list", "--url", cluster.url]) == 0
    return [line.partition(": ")[2].partition(",")[0] for line in capsys.readouterr().out.splitlines()]


def test_swaps_under_load_change_no_token(two_drafts: LocalCluster, capsys: pytest.CaptureFixture[str]) -> None:
    cases = sampled_cases(12)
    expected = complete_all(two_drafts.url, cases, num_speculative_tokens=0)
    before = versions(two_drafts, capsys)
    assert len(set(before)) == 1
    with ThreadPoolExecutor(1) as thread:
        for number in range(NUM_SWAPS):
            answers = thread.submit(complete_all, two_drafts.url, cases, num_speculative_tokens=4)
            load = ["load", "noisy", "--share", "0.5"] if number % 2 == 0 else ["rollback"]
            code = cli.main(["drafts", *load, "--url", two_drafts.url])
            assert code == 0
            assert answers.result() == expected
            now = versions(two_drafts, capsys)
            assert (now == before) == (number % 2 == 1), now
    assert cli.main(["drafts", "load", "noisy", "--url", two_drafts.url]) == 0
    assert len(set(versions(two_drafts, capsys))) == 1
    wait_until(lambda: two_drafts_are_up(two_drafts))
    assert complete_all(two_drafts.url, cases, num_speculative_tokens=4) == expected
    assert cli.main(["drafts", "rollback", "--url", two_drafts.url]) == 0
    assert complete_all(two_drafts.url, cases, num_speculative_tokens=4) == expected
    assert_nothing_in_use(two_drafts)


def two_drafts_are_up(cluster: LocalCluster) -> bool:
    health = cluster.health()
    return health is not None and health["targets"][0]["num_draft_links"] == 2


def test_workers_that_start_later_have_the_promoted_version(
    two_drafts: LocalCluster, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (before,) = set(versions(two_drafts, capsys))
    assert cli.main(["drafts", "promote", "noisy", "--url", two_drafts.url]) == 0
    (promoted,) = set(versions(two_drafts, capsys))
    assert promoted != before
    restart_first(two_drafts)
    assert versions(two_drafts, capsys) == [promoted] * 2
    (root / ".promoted").write_text("cut off")
    restart_first(two_drafts)
    assert sorted(versions(two_drafts, capsys)) == sorted([before, promoted])
    assert cli.main(["drafts", "promote", "noisy", "--url", two_drafts.url]) == 0
    assert cli.main(["drafts", "rollback", "--url", two_drafts.url]) == 0
    assert set(versions(two_drafts, capsys)) == {before}
    assert not (root / ".promoted").exists()


def test_distill_loads_what_it_trained(
    two_drafts: LocalCluster, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = versions(two_drafts, capsys)
    traffic = tmp_path / "traffic.jsonl"
    traffic.write_text("".join(f"{json.dumps({'prompt': one})}\n" for one in prompts(20, seed=1)), encoding="utf-8")
    models = ["--target", Config().target.model, "--draft", Config().draft.model, "--out", str(root / "trained")]
    short = ["--max-tokens", "4", "--epochs", "0.1", "--batch-size", "2"]
    on_one = ["--load", "--share", "0.5", "--url", two_drafts.url]
    assert cli.main(["distill", "--traffic", str(traffic), *models, *short, *on_one]) == 0
    assert sorted(versions(two_drafts, capsys))[0].startswith(str(root / "trained"))
    assert cli.main(["drafts", "rollback", "--url", two_drafts.url]) == 0
    assert versions(two_drafts, capsys) == before


def restart_first(cluster: LocalCluster) -> None:
    os.kill(cluster.drafts[0].pid, signal.SIGKILL)
    wait_until(lambda: not two_drafts_are_up(cluster))
    wait_until(lambda: cluster.watch() is None and two_drafts_are_up(cluster))


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        ("not numbers", "is not finite"),
        ("cut off", "cannot read"),
        ("wrong shape", "has shape"),
        ("nowhere", "is not a folder below"),
        ("../outside", "is not a folder below"),
    ],
)
def test_a_version_that_cannot_be_served_leaves_the_old_one(
    two_drafts: LocalCluster, capsys: pytest.CaptureFixture[str], folder: str, reason: str
) -> None:
    before = versions(two_drafts, capsys)
    assert cli.main(["drafts", "load", folder, "--url", two_drafts.url]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert "failed, and keeps" in line
    assert reason in line
    assert versions(two_drafts, capsys) == before
