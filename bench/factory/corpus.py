"""Divides text into a part to train on and a part to hold out, which `services.held_out` defines.

Held-out texts are never trained on: not under another path either, since duplicates are dropped by content.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from bench.factory.sources import Package, SourceRoot, is_package_metadata, top_level_name
from services.held_out import hash_number, is_held_out, read_source

_UNCLAIMED = Package("not in any distribution", "", "not declared")


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
            for document in _unseen(_documents(root, sorted(train, key=hash_number)), seen):
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
        text = read_source(root.directory / path, has_header=is_package_metadata(path))
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
