"""Identifies the draft model of a worker, so that coordinators learn each model's acceptance separately."""

from __future__ import annotations

import hashlib
import json

from cluster.config import Config
from cluster.engine.fingerprint import architecture_fingerprint, weights_fingerprint
from cluster.model_folder import resolve_model_folder


def draft_fingerprint(config: Config) -> str:
    """Returns the hexadecimal SHA-256 of the model and settings that proposals depend on. Raises ConfigurationError.

    Proposals also depend on the processor, which is not included.
    """
    draft = config.draft
    settings = draft.model_dump(mode="json", include={"drafter", "dtype", "quantization"})
    if draft.drafter == "simulated":
        settings |= config.simulation.model_dump(mode="json", include={"acceptance", "acceptance_schedule"})
    elif draft.drafter != "ngram":
        folder = resolve_model_folder(config.draft_model)
        settings |= {"weights": weights_fingerprint(folder), "architecture": architecture_fingerprint(folder)}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
