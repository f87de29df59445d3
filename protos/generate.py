"""Generates the modules beside the .proto files: `make protos`, or `python -m protos.generate [FOLDER]`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MESSAGES = sorted((ROOT / "protos").rglob("*.proto"))
SERVICES = [path for path in MESSAGES if "\nservice " in path.read_text(encoding="utf-8")]


def generate(folder: Path) -> None:
    """Writes the modules under `folder`, in the layout of the project. Raises CalledProcessError."""
    plugins = Path(sys.executable).parent
    protoc = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        "-I.",
        f"--plugin={plugins / 'protoc-gen-mypy'}",
        f"--plugin={plugins / 'protoc-gen-mypy_grpc'}",
    ]

    def run(options: list[str], paths: list[Path]) -> None:
        files = [str(path.relative_to(ROOT)) for path in paths]
        subprocess.run([*protoc, *options, *files], cwd=ROOT, check=True, capture_output=True)

    run([f"--python_out={folder}", f"--mypy_out={folder}"], MESSAGES)
    run([f"--grpc_python_out={folder}", f"--mypy_grpc_out=only_async:{folder}"], SERVICES)


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
