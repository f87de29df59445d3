"""Makes models whose vocabularies differ slightly from those of the bundled models, in temporary folders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from cluster.model_folder import resolve_model_folder
from cluster.tokenization import Tokenizer

TARGET, DRAFT = "outrider-target-12m", "outrider-draft-2m"
_EMBEDDING = "model.embed_tokens.weight"  # also the head, because the bundled models tie both


def padded(model: str, folder: Path, rows: Sequence[int | None]) -> Path:
    """Adds rows without tokens: copies of the tokens `rows`, or zeros."""
    copied = _copy(model, folder)
    _change_embedding(copied, lambda old: torch.cat([old, *(_row(old, row) for row in rows)]))
    return copied


def permuted(model: str, folder: Path, new_ids: Mapping[int, int]) -> Path:
    """Gives tokens other IDs, and moves their rows of the embedding accordingly."""
    copied = _copy(model, folder)

    def moved(old: torch.Tensor) -> torch.Tensor:
        new = old.clone()
        for token_id, new_id in new_ids.items():
            new[new_id] = old[token_id]
        return new

    _change_embedding(copied, moved)
    with _Json(copied / "tokenizer.json") as tokenizer:
        vocabulary = tokenizer["model"]["vocab"]
        tokenizer["model"]["vocab"] = {token: new_ids.get(number, number) for token, number in vocabulary.items()}
        for added in tokenizer["added_tokens"]:
            added["id"] = new_ids.get(added["id"], added["id"])
    return copied


def without_tokens(model: str, folder: Path, tokens: Sequence[str]) -> Path:
    """Replaces `tokens` in the tokenizer with others that no text contains, at the same IDs."""
    copied = _copy(model, folder)
    with _Json(copied / "tokenizer.json") as tokenizer:
        bpe = tokenizer["model"]
        bpe["vocab"] = {f"ZqZ{n}" if token in tokens else token: n for token, n in bpe["vocab"].items()}
        merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in bpe["merges"]]
        bpe["merges"] = [[a, b] for a, b in merges if not {a, b, a + b} & {*tokens}]
    return copied


def foreign(model: str, folder: Path, num_kept: int = 1500) -> Path:
    """Gives a model a tokenizer that cuts text at other places, and has only the first `num_kept` of its tokens.

    Like GPT-2's, it cuts line ends off the punctuation before them, and joins them with the spaces after them.
    """
    with (resolve_model_folder(model) / "tokenizer.json").open(encoding="utf-8") as file:
        vocabulary = json.load(file)["model"]["vocab"]
    cut = without_tokens(model, folder, [token for token, number in vocabulary.items() if number >= num_kept])
    with _Json(cut / "tokenizer.json") as tokenizer:
        joined = "ĊĠĠĠ"
        bpe = tokenizer["model"]
        spare = max(bpe["vocab"], key=bpe["vocab"].__getitem__)
        bpe["vocab"] = {joined if token == spare else token: number for token, number in bpe["vocab"].items()}
        bpe["merges"].append(["Ċ", "ĠĠĠ"])
        tokenizer["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        tokenizer["pre_tokenizer"]["use_regex"] = True
    return cut


def word_tokenizer(folder: Path, tokens: Mapping[str, int], special: Sequence[str] = ()) -> Tokenizer:
    """Writes a tokenizer whose tokens are whole words to `folder`."""
    added = [
        {"id": tokens[token], "content": token, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for token in special
    ]
    model = {"type": "WordLevel", "vocab": dict(tokens), "unk_token": "?"}
    parts = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding"))
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "model": model, "added_tokens": added} | parts)
    )
    return Tokenizer(folder)


def shortened(model: str, folder: Path, max_position_embeddings: int) -> Path:
    copied = _copy(model, folder)
    with _Json(copied / "config.json") as config:
        config["max_position_embeddings"] = max_position_embeddings
    return copied


def _copy(model: str, folder: Path) -> Path:
    return shutil.copytree(resolve_model_folder(model), folder)


def _row(rows: torch.Tensor, index: int | None) -> torch.Tensor:
    return torch.zeros_like(rows[:1]) if index is None else rows[index : index + 1]


def _change_embedding(folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    weights = load_file(folder / "model.safetensors")
    weights[_EMBEDDING] = change(weights[_EMBEDDING]).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with _Json(folder / "config.json") as config:
        config["vocab_size"] = len(weights[_EMBEDDING])


class _Json:
    """Yields the content of a JSON file, and writes it back when the context ends."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> dict[str, Any]:
        self._values: dict[str, Any] = json.loads(self._path.read_text(encoding="utf-8"))
        return self._values

    def __exit__(self, *error: object) -> None:
        self._path.write_text(json.dumps(self._values), encoding="utf-8")
