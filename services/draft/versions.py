"""The draft model that a worker serves, and the next version of it, which is loaded while the old one drafts."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from cluster.config import Config
from cluster.drafters.base import Drafter
from cluster.drafters.pairing import draft_vocabulary, spoken_fingerprint
from cluster.drafting.worker import DraftWorker
from cluster.errors import ConfigurationError
from cluster.factories.drafters import draft_fingerprint, make_drafter
from cluster.model_folder import resolve_model_folder
from cluster.telemetry.metrics import Reading
from protos.speculation.v1 import types_pb2
from services.worker import loading, loading_progress, log_kv_cache

_LOADED = ("model", "parallel")  # drafters whose model is `draft.model` alone
_PROMOTED = ".promoted"  # file in `draft.load_root` with the name of the folder that workers start with

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Version:
    """A draft model with its loop, which the caller starts and stops."""

    config: Config
    drafter: Drafter
    worker: DraftWorker
    description: types_pb2.ModelDescription

    def readings(self) -> Iterator[Reading]:
        """Any thread."""
        yield from self.worker.readings()
        yield from self.drafter.readings()


def make_version(config: Config, needed_tokenizer: str | None = None) -> Version:
    """Loads the draft model that `config` names. Raises ConfigurationError.

    `needed_tokenizer`: fingerprint of the tokenizer whose IDs the draft must read and propose; None: any.
    """
    with loading(config.draft_model):
        vocabulary = draft_vocabulary(config) if config.names_target else None
        tokenizer = spoken_fingerprint(config, vocabulary)
        if needed_tokenizer not in (None, tokenizer):
            raise ConfigurationError(
                f"{config.draft_model!r} has the tokenizer {tokenizer[:12]}, and the target needs "
                f"{needed_tokenizer[:12]}: set target.model in the worker's configuration if the draft has most of its "
                "tokens"
            )
        drafter = make_drafter(config, loading_progress(config.draft_model), vocabulary)
    if drafter.num_blocks:
        window = config.speculation.window(config.speculation.num_speculative_tokens)
        log_kv_cache(drafter.num_blocks, drafter.block_size, config.draft.max_num_seqs, window)
    description = types_pb2.ModelDescription(
        name="simulated" if config.draft.drafter == "simulated" else config.draft_model,
        tokenizer_fingerprint=tokenizer,
        vocab_size=drafter.vocab_size,
        max_model_len=drafter.max_model_len,
        dtype=drafter.dtype,
        fingerprint=draft_fingerprint(config),
    )
    worker = DraftWorker(
        drafter,
        config.speculation.num_run_ahead_branches,
        tunes_temperature=config.speculation.tunes_draft_temperature,
    )
    return Version(config, drafter, worker, description)


def make_first(config: Config) -> Version:
    """Loads the promoted draft model, or the one that `config` names if none is or it cannot be served.

    Raises ConfigurationError if that one cannot either.
    """
    file = None if config.draft.load_root is None else Path(config.draft.load_root) / _PROMOTED
    if file is not None and file.is_file():
        try:
            promoted = _with_folder(config, file.read_text(encoding="utf-8").strip())
            _check_finite(promoted)
            return make_version(promoted)
        except (ConfigurationError, OSError, UnicodeError) as error:
            logger.error("the promoted draft cannot be served, %s drafts: %s", config.draft_model, error)
    return make_version(config)


def promote(config: Config, folder: str) -> None:
    """Makes workers with this `draft.load_root` start with the draft model in `folder`. Raises ConfigurationError."""
    root = Path(str(config.draft.load_root)).resolve()
    new = root / f"{_PROMOTED}.{os.getpid()}"
    try:
        new.write_text(str((root / folder).resolve().relative_to(root)), encoding="utf-8")
        new.replace(root / _PROMOTED)
    except OSError as error:
        raise ConfigurationError(f"{new} cannot be written, so no version can be promoted: {error}") from error


def take_back(left: Config, after: Config) -> None:
    """Promotes the draft model of `after` if that of `left` is promoted, and none if it is not below the root."""
    root = Path(str(left.draft.load_root)).resolve()
    file = root / _PROMOTED
    try:
        if file.is_file() and (root / file.read_text(encoding="utf-8").strip()).resolve() == Path(left.draft_model):
            if Path(after.draft_model).is_relative_to(root):
                promote(left, after.draft_model)
            else:  # the draft of the configuration, with which workers start if none is promoted
                file.unlink()
    except (ConfigurationError, OSError, UnicodeError) as error:
        logger.error("%s still names the draft that was taken back: %s", file, error)


def make_next(served: Version, folder: str) -> Version:
    """Loads the draft model in `folder`, below `draft.load_root`; returns `served` if it is that one.

    Raises ConfigurationError if it cannot be served.
    """
    config = _with_folder(served.config, folder)
    if draft_fingerprint(config) == served.description.fingerprint:
        return served  # without reading all weights again, as the second pass of a promotion asks for it
    _check_finite(config)
    return make_version(config, served.description.tokenizer_fingerprint)


def _with_folder(config: Config, folder: str) -> Config:
    """Returns `config` with the draft model in `folder`. Raises ConfigurationError if it cannot be served."""
    draft = config.draft
    if draft.load_root is None:
        raise ConfigurationError("no draft can be loaded at run time: set draft.load_root to the folder of all drafts")
    if draft.drafter not in _LOADED:
        raise ConfigurationError(
            f"draft.drafter {draft.drafter} has no versions to load: only {' and '.join(_LOADED)} have"
        )
    if config.speculation.acceptance == "rejection":
        raise ConfigurationError("with speculation.acceptance rejection targets verify by their copy of the old draft")
    root = Path(draft.load_root).resolve()
    path = (root / folder).resolve()
    if not path.is_relative_to(root) or not path.is_dir():
        raise ConfigurationError(f"{folder!r} is not a folder below draft.load_root {draft.load_root}")
    return config.model_copy(update={"draft": draft.model_copy(update={"model": str(path)})})


def _check_finite(config: Config) -> None:
    """Raises ConfigurationError if a weight of the draft model is not a number, or infinite."""
    folder = Path(config.draft_model)
    for file in sorted(resolve_model_folder(str(folder)).glob("*.safetensors")):
        with loading(str(folder)), safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # it is not iterable itself
                if not math.isfinite(float(tensors.get_tensor(name).float().sum())):
                    raise ConfigurationError(f"{folder.name!r}: the weight {name} of {file.name} is not finite")
