"""The parts of a build that `pyproject.toml` cannot express: the recorded commit, and the kernels of a release.

With OUTRIDER_RELEASE=1 a kernel that does not compile is an error. OUTRIDER_COMMIT names the commit if there is no git.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

sys.path.insert(0, str(Path(__file__).resolve().parent))  # a build in isolation does not have it

from services.version import COMMIT_FILE, commit


def record_commit(folder: Path) -> None:
    found = os.environ.get("OUTRIDER_COMMIT") or commit()
    if found:
        (folder / COMMIT_FILE).write_text(f"{found}\n", encoding="utf-8")


class BuildExt(build_ext):
    def finalize_options(self) -> None:
        super().finalize_options()
        for extension in self.extensions if os.environ.get("OUTRIDER_RELEASE") else ():
            extension.optional = False

    def build_extension(self, ext: Extension) -> None:
        """Compiles `ext`, or copies what an earlier installation of this folder compiled from the same files."""
        built, *path = Path(self.get_ext_fullpath(ext.name)), *ext.name.split(".")
        earlier = Path(*path[:-1], built.name)
        inputs = (*ext.sources, *ext.depends, "pyproject.toml")
        newest = max(Path(file).stat().st_mtime for file in inputs)
        if self.editable_mode and earlier.is_file() and earlier.stat().st_mtime > newest:
            built.parent.mkdir(parents=True, exist_ok=True)
            if built.resolve() != earlier.resolve():
                shutil.copy2(earlier, built)
            return
        super().build_extension(ext)


class BuildPy(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            record_commit(Path(self.build_lib))


class Sdist(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        record_commit(Path(base_dir))


setup(cmdclass={"build_ext": BuildExt, "build_py": BuildPy, "sdist": Sdist})
