"""The packages that images are built with: `python -m deploy.docker.constraints` writes them down as they are here.

All that Outrider and its extras need, and what these need, in the environment that the tests run in. PyPI names the
hashes of the wheels for the images' Python and processors.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import distribution, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PAGE = Path(__file__).with_name("constraints.txt")
EXTRAS = ("ray", "tracing")
BUILD = "build"  # mark of what only the build of our own wheel needs
WITHOUT_HASH = "torch"
_MACHINES = ("x86_64", "aarch64")
_GLIBCS = ("2014", *(f"_2_{minor}" for minor in range(17, 37)))  # bookworm has 2.36
_HEAD = f"""\
# Made by `make constraints` from the environment that the tests run in; images are built with these. Hashes are of the
# wheels for Python 3.11 on Linux, {" and ".join(_MACHINES)}. The mark after `#` names the extras that need a package.
# {WITHOUT_HASH} has no hash: images take the build for CPUs from PyTorch's own index, whose hashes are not PyPI's.
"""


def constraints() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Version and extras of each package by name; no extras: always needed. Raises PackageNotFoundError."""
    needed = {extra: _versions(extra) for extra in ("", *EXTRAS)}
    found = {
        name: (release, () if name in needed[""] else tuple(extra for extra in EXTRAS if name in needed[extra]))
        for versions in needed.values()
        for name, release in versions.items()
    }
    return found | {"setuptools": (version("setuptools"), (BUILD,))}


def _versions(extra: str) -> dict[str, str]:
    versions: dict[str, str] = {}
    _add("outrider", (extra,), versions)
    del versions["outrider"]
    return versions


def _add(name: str, extras: tuple[str, ...], versions: dict[str, str]) -> None:
    found = distribution(name)
    versions[canonicalize_name(name)] = found.version.partition("+")[0]  # a local build is not on any index
    for text in found.requires or ():
        requirement = Requirement(text)
        wanted = requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in ("", *extras))
        if wanted and (requirement.extras or canonicalize_name(requirement.name) not in versions):
            _add(requirement.name, tuple(requirement.extras), versions)


def hashes(pins: list[str]) -> dict[str, list[str]]:
    """SHA-256 of the wheels that pip would install for each machine, by name. Asks PyPI; downloads no wheel."""
    found: dict[str, set[str]] = {}
    for machine in _MACHINES:
        platforms = [f"--platform=manylinux{glibc}_{machine}" for glibc in _GLIBCS]
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.json")
            command = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--dry-run",
                "--no-deps",
                "--ignore-installed",
            ]
            command += ["--only-binary=:all:", "--python-version=3.11", f"--target={folder}", f"--report={report}"]
            environment = os.environ | {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
            subprocess.run([*command, *platforms, *pins], env=environment, check=True)
            for wheel in json.loads(report.read_text(encoding="utf-8"))["install"]:
                name = canonicalize_name(wheel["metadata"]["name"])
                found.setdefault(name, set()).add(wheel["download_info"]["archive_info"]["hashes"]["sha256"])
    return {name: sorted(known) for name, known in found.items()}


def to_text(found: dict[str, tuple[str, tuple[str, ...]]], known: dict[str, list[str]]) -> str:
    lines = []
    for name, (release, marks) in sorted(found.items()):
        options = "".join(f" --hash=sha256:{digest}" for digest in known.get(name, ()))
        lines.append(f"{name}=={release}{options}{'  # ' if marks else ''}{' '.join(marks)}\n")
    return _HEAD + "".join(lines)


if __name__ == "__main__":
    everything = constraints()
    pins = [f"{name}=={release}" for name, (release, _) in sorted(everything.items()) if name != WITHOUT_HASH]
    PAGE.write_text(to_text(everything, hashes(pins)), encoding="utf-8")
    sys.exit(0)
