"""A Python for ARM with Outrider and its dependencies, under qemu-user, from Debian's and PyPI's packages (2 GB)."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

QEMU = "qemu-aarch64-static"
# PyPI's newest build for ARM without CUDA. With portable kernels, PyTorch's version changes no result.
TORCH = "torch==2.10.0"
# Those of Debian with python3.11 and the libraries that it loads.
PACKAGES = (
    *("libc6", "libgcc-s1", "libstdc++6", "libgomp1", "zlib1g", "libbz2-1.0", "liblzma5", "libexpat1", "libffi8"),
    *("libssl3", "libcrypt1", "libuuid1", "libsqlite3-0", "libdb5.3", "libncursesw6", "libtinfo6", "libreadline8"),
    *("libnsl2", "libtirpc3", "libpython3.11-minimal", "libpython3.11-stdlib", "python3.11-minimal", "python3.11"),
)


def python_for_arm(folder: Path, wheel: Path) -> Path:
    """Makes `folder`, and returns the program in it that runs Python with `wheel` and what it needs."""
    debs, root, site, apt = (folder / name for name in ("debs", "root", "site", "apt"))
    for needed in (debs, root, site, apt / "lists" / "partial", apt / "cache" / "archives" / "partial"):
        needed.mkdir(parents=True)
    (apt / "status").touch()
    options = ("APT::Architecture=arm64", "APT::Architectures::=arm64", f"Dir::State::Lists={apt / 'lists'}")
    options = (*options, f"Dir::State::status={apt / 'status'}", f"Dir::Cache={apt / 'cache'}")
    get = ["apt-get", "-qq", *(part for option in options for part in ("-o", option))]
    subprocess.run([*get, "update"], check=True)
    subprocess.run([*get, "download", *PACKAGES], check=True, cwd=debs)
    for deb in debs.iterdir():
        subprocess.run(["dpkg", "-x", deb, root], check=True)
    tags = [f"--platform=manylinux_2_{minor}_aarch64" for minor in (36, 34, 28, 27, 26, 24, 17)]
    tags += ["--platform=manylinux2014_aarch64", "--abi=cp311", "--abi=abi3", "--abi=none"]
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--target",
        site,
        *tags,
    ]
    subprocess.run([*pip, "--python-version=3.11", TORCH, *dict.fromkeys(_dependencies("outrider"))], check=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    python = folder / "python"
    (site / "sitecustomize.py").write_text(f"import sys\nsys.executable = {str(python)!r}\n", encoding="utf-8")
    libraries = f"{root}/usr/lib/aarch64-linux-gnu:{root}/lib/aarch64-linux-gnu"
    variables = f"-E LD_LIBRARY_PATH={libraries} -E PYTHONHOME={root}/usr -E PYTHONPATH={site}"
    command = f'exec {shutil.which(QEMU)} -L {root} {variables} {root}/usr/bin/python3.11 "$@"'
    python.write_text(f"#!/bin/sh\n{command}\n", encoding="utf-8")
    python.chmod(0o755)
    return python


def _dependencies(name: str, above: tuple[str, ...] = ()) -> Iterator[str]:
    """The versions that are installed here of what `name` needs, but for PyTorch, which is another build."""
    for line in metadata.requires(name) or ():
        needed = Requirement(line)
        own = needed.name.lower().replace("_", "-")
        if own in above or (needed.marker and not needed.marker.evaluate({"extra": ""})):
            continue
        if own != "torch":
            yield f"{own}=={metadata.version(own)}"
        yield from _dependencies(own, (*above, own))
