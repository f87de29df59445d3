"""The files of a training in its output folder, each written as a whole or not at all."""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.factory.corpus import Document
from bench.factory.tokens import TokenArray


@dataclass(frozen=True)
class Workspace:
    """The paths under one output folder."""

    root: Path

    @property
    def corpus_facts(self) -> Path:
        return self.root / "corpus" / "corpus.json"

    def documents(self, split: str) -> Path:
        return self.root / "corpus" / f"{split}.jsonl"

    @property
    def tokenizer(self) -> Path:
        return self.root / "tokenizer"

    @property
    def token_facts(self) -> Path:
        return self.root / "tokens" / "tokens.json"

    def stream(self, split: str) -> Path:
        return self.root / "tokens" / f"{split}.npy"

    @property
    def samples(self) -> Path:
        return self.root / "samples.npy"

    def training(self, name: str) -> Path:
        """Returns the folder of one model's checkpoint."""
        return self.root / name

    def training_facts(self, name: str) -> Path:
        return self.training(name) / "training.json"

    def model(self, name: str) -> Path:
        """Returns the folder of one trained model in its exported form."""
        return self.training(name) / "model"

    @property
    def evaluation(self) -> Path:
        return self.root / "evaluation.json"

    @property
    def head_evaluation(self) -> Path:
        return self.training("eagle") / "evaluation.json"

    def export(self, name: str) -> Path:
        return self.root / "export" / name

    @property
    def log(self) -> Path:
        return self.root / "log.jsonl"


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call ``write`` on a neighbouring path, then rename it, so that ``path`` is never half written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    write(temporary)
    os.replace(temporary, path)


def write_json(path: Path, value: object) -> None:
    content = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(content, encoding="utf-8"))


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def write_documents(path: Path, documents: Iterable[Document]) -> None:
    def write(temporary: Path) -> None:
        with temporary.open("w", encoding="utf-8") as file:
            for document in documents:
                file.write(json.dumps(asdict(document)) + "\n")

    write_atomically(path, write)


def read_documents(path: Path) -> list[Document]:
    with path.open(encoding="utf-8") as file:
        return [Document(**json.loads(line)) for line in file]


def write_array(path: Path, array: TokenArray) -> None:
    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            np.save(file, array)

    write_atomically(path, write)


def read_array(path: Path) -> TokenArray:
    array: TokenArray = np.load(path)
    return array
