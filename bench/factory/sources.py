"""Sources of training text: the standard library and, on request, the installed packages."""

import platform
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath

from services import held_out
from services.held_out import LIBRARY_SUFFIXES, NOT_IN_LIBRARY, source_paths

_LICENCE_FIELDS = ("License-Expression", "License")
_SITE_DIRECTORY_NAMES = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class Package:
    """One distribution that contributes text; ``licence`` is as its metadata declares it."""

    name: str
    version: str
    licence: str

    @property
    def is_proprietary(self) -> bool:
        """True if the licence is called proprietary or is NVIDIA's, as in every CUDA build."""
        licence = self.licence.lower()
        return "proprietary" in licence or "nvidia" in licence


@dataclass(frozen=True)
class SourceRoot:
    """A folder to collect from. Relative paths in it are the same on every machine."""

    directory: Path
    suffixes: frozenset[str]
    skipped_top_level: frozenset[str]
    packages: dict[str, Package]  # by top-level name
    default_package: Package | None

    def relative_paths(self) -> list[str]:
        """Return the POSIX paths of the candidate files, sorted."""
        return [path for path in source_paths(self.directory, self.skipped_top_level) if self._is_candidate(path)]

    def package_of(self, relative_path: str) -> Package | None:
        """Return the package that a file belongs to; None if no distribution claims it."""
        return self.packages.get(top_level_name(relative_path), self.default_package)

    def _is_candidate(self, relative_path: str) -> bool:
        if is_package_metadata(relative_path):
            return ".md" in self.suffixes
        return PurePosixPath(relative_path).suffix in self.suffixes


def is_package_metadata(relative_path: str) -> bool:
    """True for a distribution's METADATA file, whose body is the project's description."""
    path = PurePosixPath(relative_path)
    return path.name == "METADATA" and path.parent.suffix == ".dist-info"


def top_level_name(relative_path: str) -> str:
    """Return the first part of a path, without the suffix of a single-module package."""
    return PurePosixPath(relative_path).parts[0].removesuffix(".py").removesuffix(".pyi")


def standard_library() -> SourceRoot:
    """Return the running interpreter's standard library."""
    package = Package("python", platform.python_version(), "PSF-2.0")
    return SourceRoot(
        directory=held_out.standard_library(),
        suffixes=LIBRARY_SUFFIXES,
        skipped_top_level=NOT_IN_LIBRARY,
        packages={},
        default_package=package,
    )


def installed_packages() -> list[SourceRoot]:
    """Return every package folder on the running interpreter's path."""
    directories = dict.fromkeys(Path(entry).resolve() for entry in sys.path if entry)
    return [
        package_root(directory)
        for directory in directories
        if directory.name in _SITE_DIRECTORY_NAMES and directory.is_dir()
    ]


def package_root(directory: Path) -> SourceRoot:
    """Describe one folder of installed packages, with the distribution behind each top-level name."""
    packages: dict[str, Package] = {}
    for distribution in metadata.distributions(path=[str(directory)]):
        package = _describe(distribution)
        for file in distribution.files or ():
            if file.parts[0] not in ("..", "__pycache__"):
                packages.setdefault(top_level_name(file.as_posix()), package)
    return SourceRoot(
        directory=directory,
        suffixes=frozenset({".py", ".pyi", ".md", ".rst"}),
        skipped_top_level=frozenset(),
        packages=packages,
        default_package=None,
    )


def _describe(distribution: metadata.Distribution) -> Package:
    fields = distribution.metadata
    declared = [field for name in _LICENCE_FIELDS for field in fields.get_all(name) or ()]
    classifiers = [
        value.rpartition(" :: ")[2] for value in fields.get_all("Classifier") or () if value.startswith("License ::")
    ]
    # Old metadata holds the whole licence text; its first line names the licence.
    licences = dict.fromkeys([*(text.strip().partition("\n")[0][:80] for text in declared), *classifiers])
    licence = ", ".join(filter(None, licences)) or "not declared"
    return Package(str(fields["Name"]), distribution.version, licence)
