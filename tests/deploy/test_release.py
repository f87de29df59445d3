"""Reasons for which `make release` refuses a commit, and the version that several files have."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from deploy.release import checksums, problems, write_sbom

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("all_tags", "tags_here", "changes", "complaint"),
    [
        (["v0.1.1"], ["v0.1.1"], "", None),
        (["v0.1.1"], [], "", "the tag v0.1.1 names another commit"),
        (["v0.0.9"], [], "", None),
        (["v0.2.0"], ["v0.2.0"], "", "the tag v0.2.0 is here, and pyproject.toml has version 0.1.1"),
        ([], [], " M README.md", "not committed"),
    ],
)
def test_a_release_is_what_its_tag_names(
    all_tags: list[str], tags_here: list[str], changes: str, complaint: str | None
) -> None:
    found = problems("0.1.1", all_tags, tags_here, changes)
    assert len(found) == (complaint is not None)
    assert complaint is None or complaint in found[0]


def test_sha256sum_reads_the_checksums(tmp_path: Path) -> None:
    files = [tmp_path / "outrider-0.1.1.tar.gz", tmp_path / "outrider-0.1.1-cp311-abi3-linux_x86_64.whl"]
    for file in files:
        file.write_bytes(file.name.encode())
    (tmp_path / "SHA256SUMS").write_text(checksums(files), encoding="utf-8")
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=tmp_path, check=True, capture_output=True)


def test_the_bill_of_materials_has_the_packages_of_the_images(tmp_path: Path) -> None:
    write_sbom(tmp_path / "sbom.json")
    bill = json.loads((tmp_path / "sbom.json").read_text(encoding="utf-8"))
    assert bill["metadata"]["component"]["name"] == "outrider"
    packages = {component["name"]: component for component in bill["components"]}
    pinned = (ROOT / "deploy" / "docker" / "constraints.txt").read_text(encoding="utf-8")
    assert packages.keys() == set(re.findall(r"^([\w.-]+)==", pinned, re.MULTILINE))
    (package, *_) = packages["grpcio"]["externalReferences"]
    assert {each["alg"] for each in package["hashes"]} == {"SHA-256"}


def test_chart_images_and_changelog_have_the_version_of_the_project() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    chart = yaml.safe_load((ROOT / "deploy" / "helm" / "outrider" / "Chart.yaml").read_text(encoding="utf-8"))
    assert (chart["version"], chart["appVersion"]) == (version, version)
    for file in (ROOT / "Makefile", *(ROOT / "deploy" / "docker").glob("*Dockerfile")):
        assert set(re.findall(r"-t outrider:(\d+\.\d+\.\d+)", file.read_text(encoding="utf-8"))) == {version}
    assert set(re.findall(r"outrider:(\d+\.\d+\.\d+)", (ROOT / "README.md").read_text(encoding="utf-8"))) == {version}
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert any(version in heading for heading in headings)
