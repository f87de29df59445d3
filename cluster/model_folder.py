"""Resolves the name of a model to its folder. Imports no torch: the router needs the tokenizer."""

from __future__ import annotations

from pathlib import Path

from cluster.errors import ConfigurationError

ASSETS = Path(__file__).parent / "assets"
_USED_FILES = ["*.json", "*.safetensors", "*.jinja"]
_UNUSED_FILES = ["consolidated*", "original/*"]  # duplicates of the weights, in the original authors' format


def resolve_model_folder(model: str) -> Path:
    """Returns the folder of `model`: a bundled model's name, a Hugging Face folder, or a name on the hub (downloaded).

    Raises ConfigurationError if there is none; the message lists the places that were searched.
    """
    bundled = ASSETS / model
    folder = Path(model).expanduser()
    for candidate in (folder, bundled):
        if (candidate / "config.json").is_file():
            return candidate.resolve()
    if folder.exists():
        raise ConfigurationError(f"{model!r} is not a model: it has no config.json; give a Hugging Face folder")
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        names = sorted(path.parent.name for path in ASSETS.glob("*/config.json"))
        raise ConfigurationError(
            f"there is no model {model!r}: give a Hugging Face folder, a hub name (owner/name) "
            f"or a bundled model ({', '.join(names)})"
        )
    return _download(model)


def _download(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=_USED_FILES, ignore_patterns=_UNUSED_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigurationError(f"cannot download {model!r} from the hub: {reason}") from error
