"""The sampling parameters that a model's authors recommend, for requests that do not set them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from cluster.config.workers import TargetConfig
from cluster.errors import ConfigurationError, InvalidRequestError
from services.router.api.completions import CompletionRequest
from services.router.api.request import parse_request

logger = logging.getLogger(__name__)

_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # as vLLM's `--generation-config auto`


def sampling_defaults(config: TargetConfig, folder: Path) -> dict[str, Any]:
    """Returns the sampling fields that `generation_config.json` in `folder` sets, if `config` uses it.

    Raises ConfigurationError if the file or a value is invalid.
    """
    path = folder / "generation_config.json"
    if config.generation_config == "none" or not path.is_file():
        return {}
    try:
        values = json.loads(path.read_bytes())
        defaults = {name: values[name] for name in _FIELDS if values.get(name) is not None}
        parse_request(CompletionRequest, {"prompt": "a", **defaults})
    except (ValueError, AttributeError, InvalidRequestError) as error:
        raise ConfigurationError(f"{path}: {error}; set target.generation_config to none to ignore it") from error
    if defaults:
        named = ", ".join(f"{name} {value}" for name, value in defaults.items())
        logger.info("defaults of the model's generation_config.json: %s (target.generation_config: auto)", named)
    return defaults
