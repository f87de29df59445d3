"""Divides text into a part to train on and a part to hold out. Imports neither torch nor transformers.

A file is held out by the hash of its path relative to the folder it was found in (``json/decoder.py``). So the same
files are held out on every Python installation, whatever its version and place.
Held-out texts are never trained on: not under another path either, since duplicates are dropped by content.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from services.training.sources import (
    Package,
    SourceRoot,
    is_package_metadata,
    standard_library,
    top_level_name,
)

HELD_OUT_ONE_IN = 40
_MAX_FILE_BYTES = 400_000
_MAX_MEAN_LINE_LENGTH = 200
_UNCLAIMED = Package("not in any distribution", "", "not declared")


@dataclass(frozen=True)
class HeldOutText:
    """A text that no bundled model was trained on."""

    path: str
    text: str


@dataclass(frozen=True)
class Document:
    """One training text. A dialogue's text contains the chat markers; any other text is verbatim."""

    path: str
    text: str
    is_dialogue: bool = False


@dataclass
class Contribution:
    """The contribution of one package to the corpus."""

    package: Package
    num_files: int = 0
    num_bytes: int = 0


@dataclass
class Corpus:
    """The collected texts, in a deterministic order, and the contribution of each package."""

    train: list[Document] = field(default_factory=list)
    held_out: list[Document] = field(default_factory=list)
    contributions: dict[str, Contribution] = field(default_factory=dict)


def is_held_out(relative_path: str) -> bool:
    """Return whether a file is held out; depends on its path alone, so installations agree."""
    return _hash_number(relative_path) % HELD_OUT_ONE_IN == 0


def held_out_texts() -> list[HeldOutText]:
    """Return the held-out texts of the running interpreter's standard library, by path."""
    root = standard_library()
    texts = ((path, _read(root, path)) for path in root.relative_paths() if is_held_out(path))
    return [HeldOutText(path, text) for path, text in texts if text is not None]


def collect(roots: Sequence[SourceRoot], package_limit_bytes: int) -> Corpus:
    """Read all roots. No top-level package gives more than ``package_limit_bytes`` of training text."""
    corpus = Corpus()
    seen: set[bytes] = set()
    paths = {root.directory: root.relative_paths() for root in roots}
    # Held-out files come first: a copy of one elsewhere is then dropped as a duplicate.
    for root in roots:
        held_out = filter(is_held_out, paths[root.directory])
        for document in _unseen(_documents(root, held_out), seen):
            _record(corpus, root, document)
            corpus.held_out.append(document)
    for root in roots:
        for group in _by_top_level(paths[root.directory]).values():
            train = (path for path in group if not is_held_out(path))
            budget = package_limit_bytes
            # In hash order, so that of a package over its limit a sample is kept, and not its first files by name.
            for document in _unseen(_documents(root, sorted(train, key=_hash_number)), seen):
                budget -= len(document.text.encode())
                if budget < 0:
                    break
                _record(corpus, root, document)
                corpus.train.append(document)
    return corpus


def size_of(documents: Sequence[Document]) -> dict[str, int]:
    num_bytes = sum(len(document.text.encode()) for document in documents)
    return {"documents": len(documents), "bytes": num_bytes}


def _by_top_level(paths: Iterable[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        groups[top_level_name(path)].append(path)
    return groups


def _documents(root: SourceRoot, paths: Iterable[str]) -> Iterator[Document]:
    for path in paths:
        package = root.package_of(path)
        if package is not None and package.is_proprietary:
            continue
        text = _read(root, path)
        if text is not None:
            yield Document(path, text)


def _unseen(documents: Iterable[Document], seen: set[bytes]) -> Iterator[Document]:
    for document in documents:
        digest = hashlib.sha256(document.text.encode()).digest()
        if digest not in seen:
            seen.add(digest)
            yield document


def _record(corpus: Corpus, root: SourceRoot, document: Document) -> None:
    package = root.package_of(document.path) or _UNCLAIMED
    contribution = corpus.contributions.setdefault(package.name, Contribution(package))
    contribution.num_files += 1
    contribution.num_bytes += len(document.text.encode())


def _read(root: SourceRoot, relative_path: str) -> str | None:
    """Return the file's text; None if it isn't readable text that a person wrote."""
    try:
        content = (root.directory / relative_path).read_bytes()
    except OSError:
        return None  # a dangling link, or a file the user may not read
    if len(content) > _MAX_FILE_BYTES:
        return None
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        return None
    text = text.replace("\r\n", "\n")
    if is_package_metadata(relative_path):
        text = text.partition("\n\n")[2]
    text = text.strip("\n") + "\n"
    if not text.strip() or len(text) / text.count("\n") > _MAX_MEAN_LINE_LENGTH:
        return None
    return text


def _hash_number(relative_path: str) -> int:
    return int.from_bytes(hashlib.sha256(relative_path.encode()).digest()[:8], "big")
