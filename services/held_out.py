"""Source files of the standard library on which no bundled model was trained: prompts to measure with.

A file is held out by the hash of its path relative to the library's folder (`json/decoder.py`), so the same files are
held out on every Python installation, whatever its version and place.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_HELD_OUT_ONE_IN = 40
LIBRARY_SUFFIXES = frozenset({".py", ".txt"})
# The code-page tables under encodings/ are generated, and so regular that every model looks better on them.
NOT_IN_LIBRARY = frozenset({"site-packages", "dist-packages", "encodings"})
# Copies of other packages: their originals may be held out, and training on a copy would leak them.
_SKIPPED = frozenset({"__pycache__", "_vendor", "_vendored", "vendor", "vendored"})
_MAX_FILE_BYTES = 400_000
_MAX_MEAN_LINE_LENGTH = 200


@dataclass(frozen=True, slots=True)
class HeldOutText:
    path: str
    text: str


def held_out_texts() -> list[HeldOutText]:
    """Returns the held-out texts of the running interpreter's standard library, by path."""
    library = standard_library()
    paths = (path for path in source_paths(library, NOT_IN_LIBRARY) if PurePosixPath(path).suffix in LIBRARY_SUFFIXES)
    texts = ((path, read_source(library / path)) for path in paths if is_held_out(path))
    return [HeldOutText(path, text) for path, text in texts if text is not None]


def is_held_out(relative_path: str) -> bool:
    """Returns whether a file is held out; depends on its path alone, so installations agree."""
    return hash_number(relative_path) % _HELD_OUT_ONE_IN == 0


def standard_library() -> Path:
    """Returns the folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def source_paths(directory: Path, skipped_top_level: Collection[str]) -> list[str]:
    """Returns the POSIX paths of the files under `directory`, relative to it and sorted, without copied packages."""
    found: list[str] = []
    for folder, subfolders, files in os.walk(directory):
        relative = Path(folder).relative_to(directory)
        skipped = {*_SKIPPED, *(skipped_top_level if relative == Path() else ())}
        subfolders[:] = [name for name in subfolders if name not in skipped]
        found += [(relative / name).as_posix() for name in files]
    return sorted(found)


def read_source(file: Path, *, has_header: bool = False) -> str | None:
    """Returns the file's text, without its header if it has one; None if it isn't readable text that a person wrote."""
    try:
        content = file.read_bytes()
    except OSError:
        return None  # a dangling link, or a file that the user may not read
    if len(content) > _MAX_FILE_BYTES:
        return None
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        return None
    text = text.replace("\r\n", "\n")
    if has_header:
        text = text.partition("\n\n")[2]
    text = text.strip("\n") + "\n"
    if not text.strip() or len(text) / text.count("\n") > _MAX_MEAN_LINE_LENGTH:
        return None
    return text


def hash_number(relative_path: str) -> int:
    return int.from_bytes(hashlib.sha256(relative_path.encode()).digest()[:8], "big")
