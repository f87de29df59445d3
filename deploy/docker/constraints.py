"""The versions that images are built with: `python -m deploy.docker.constraints` writes them down as they are here.

All that Outrider and its extras need, and what these need, in the environment that the tests run in.
"""

from __future__ import annotations

import sys
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PAGE = Path(__file__).with_name("constraints.txt")
EXTRAS = ("ray", "tracing")
_HEAD = "# Made by `make constraints` from the environment that the tests run in; images are built with these.\n"


def constraints() -> dict[str, str]:
    """Version by name. Raises PackageNotFoundError where an extra is not installed."""
    versions: dict[str, str] = {}
    _add("outrider", EXTRAS, versions)
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


def to_text(versions: dict[str, str]) -> str:
    return _HEAD + "".join(f"{name}=={version}\n" for name, version in sorted(versions.items()))


if __name__ == "__main__":
    PAGE.write_text(to_text(constraints()), encoding="utf-8")
    sys.exit(0)
