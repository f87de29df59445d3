"""Resolves the name of a model to its folder. Imports no torch: the router needs the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cluster.errors import ConfigurationError

ASSETS = Path(__file__).parent / "assets"
_USED_FILES = ["*.json", "*.safetensors", "*.jinja"]
_TOKENIZER_FILES = ["config.json", "tokenizer*.json"]
_UNUSED_FILES = ["consolidated*", "original/*"]  # duplicates of the weights, in the original authors' format


def resolve_model_folder(model: str, *, may_download: bool = True) -> Path:
    """Returns the folder of `model`: a bundled model's name, a Hugging Face folder, or a name on the hub (downloaded).

    `may_download`: otherwise a name on the hub must be in its cache. Raises ConfigurationError if there is none; the
    message lists the places that were searched.
    """
    return _resolve(model, _USED_FILES, may_download=may_download)


def _resolve(model: str, files: Sequence[str], *, may_download: bool = True) -> Path:
    """Returns the folder of `model`. A folder from the hub has the `files` only."""
    bundled = ASSETS / model
    folder = Path(model).expanduser()
    for candidate in (folder, bundled):
        if (candidate / "config.json").is_file():
            return candidate.resolve()
    if folder.suffix == ".gguf" or any(folder.glob("*.gguf")):
        raise ConfigurationError(
            f"{model!r} is in llama.cpp's format, which no engine here reads: give the Hugging Face folder that it was "
            "made from, with target.quantization or draft.quantization int4 for as little memory"
        )
    if folder.exists():
        raise ConfigurationError(f"{model!r} is not a model: it has no config.json; give a Hugging Face folder")
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        names = sorted(path.parent.name for path in ASSETS.glob("*/config.json"))
        raise ConfigurationError(
            f"there is no model {model!r}: give a Hugging Face folder, a hub name (owner/name) "
            f"or a bundled model ({', '.join(names)})"
        )
    return _snapshot(model, files, may_download=may_download)


def resolve_tokenizer_folder(model: str) -> Path:
    """Returns a folder with the tokenizer of `model`. Downloads no weights, so the folder may lack them.

    Raises ConfigurationError as `resolve_model_folder` does.
    """
    folder = Path(model).expanduser()
    return folder.resolve() if (folder / "tokenizer.json").is_file() else _resolve(model, _TOKENIZER_FILES)


def _snapshot(model: str, files: Sequence[str], *, may_download: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                model, allow_patterns=list(files), ignore_patterns=_UNUSED_FILES, local_files_only=not may_download
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        if not may_download:
            raise ConfigurationError(f"{model!r} is not on this machine: download it, or give its folder") from error
        reason = str(error).splitlines()[0]
        raise ConfigurationError(f"cannot download {model!r} from the hub: {reason}") from error
