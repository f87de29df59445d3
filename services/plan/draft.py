"""The command `outrider plan draft`: which models at hand can draft for a target, by configuration and tokenizer."""

from __future__ import annotations

import argparse
import contextlib
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cluster.config.file import load_config
from cluster.engine.memory_plan import PlannedModel
from cluster.engine.model_config import read_json
from cluster.errors import ConfigurationError
from cluster.model_folder import ASSETS, resolve_model_folder


@dataclass(frozen=True, slots=True)
class DraftFit:
    """How one model can draft for the target."""

    draft: str
    drafter: str = ""
    num_parameters: int | None = None  # None: the PyTorch engine does not run it
    common_share: float | None = None  # share of the target's tokens that the draft has; None: it has no tokenizer
    remark: str = ""
    why_not: str | None = None  # None: it fits


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Reads config.json and tokenizer of each model, and no weights. Prints the settings with which it drafts, or "
        "why it cannot. The exit code is 1 when none fits."
    )
    parser.add_argument("target", metavar="TARGET", help="folder, hub name or bundled model")
    parser.add_argument(
        "drafts",
        nargs="*",
        metavar="DRAFT",
        help="models and heads; default: the folders next to TARGET, the hub's cache and the bundled models",
    )


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit code. Raises ConfigurationError if the target is not a model."""
    target = resolve_model_folder(arguments.target, may_download=False)
    names = arguments.drafts or [*dict.fromkeys(_at_hand(target))]
    fits = [fit_of(target, name) for name in names]
    good = [fit for fit in fits if fit.why_not is None]
    for fit in sorted(good, key=lambda fit: (-(fit.common_share or 1.0), fit.num_parameters or 0)):
        share = "" if fit.common_share is None else f", {fit.common_share:.0%} of the tokens"
        size = "" if fit.num_parameters is None else f", {fit.num_parameters / 1e9:.3g}B parameters"
        print(f"fits: {fit.draft}{size}{share}{fit.remark}")
        print(f"      --draft.model {shlex.quote(fit.draft)} --draft.drafter {fit.drafter}")
    for fit in fits:
        if fit.why_not is not None:
            print(f"not:  {fit.draft}\n      {fit.why_not}")
    return 0 if good else 1


def fit_of(target: Path, draft: str) -> DraftFit:
    """Returns how `draft`, a folder, hub name or bundled model, can draft for `target`."""
    from cluster.drafters.pairing import draft_vocabulary
    from services.tune.drafts import draft_settings

    try:
        folder = resolve_model_folder(draft, may_download=False)
        settings: tuple[str, ...] = (f"draft.model={folder}", "draft.drafter=vllm")
        with contextlib.suppress(ConfigurationError):  # an architecture that only vLLM runs
            settings = next(iter(draft_settings(str(target), [str(folder)])))
        config = load_config(None, [f"target.model={target}", *settings])
        if not config.draft_has_tokenizer:
            return _fit_of_head(target, draft, folder, config.draft.drafter)
        vocabulary = draft_vocabulary(config)
    except ConfigurationError as error:
        return DraftFit(draft, why_not=str(error))
    if vocabulary is None:
        return DraftFit(draft, why_not=f"the tokenizer of {str(target)!r} cannot be read: it needs a tokenizer.json")
    own, others = _num_parameters(folder), _num_parameters(target)
    if own and others and own >= others:
        return DraftFit(draft, why_not=f"it has {own / 1e9:.3g}B parameters, the target {others / 1e9:.3g}B")
    return DraftFit(draft, config.draft.drafter, own, vocabulary.num_common / vocabulary.num_target_tokens)


def _fit_of_head(target: Path, draft: str, folder: Path, drafter: str) -> DraftFit:
    values = (read_json(one / "config.json") for one in (folder, target))
    own, others = ((value.get("text_config") or value).get("hidden_size") for value in values)
    if None not in (own, others) and own != others:
        return DraftFit(draft, why_not=f"it is a head for states of {own} values, the target's have {others}")
    return DraftFit(draft, drafter, remark=", if it was trained for this target")


def _num_parameters(folder: Path) -> int | None:
    """Returns None for an architecture that only vLLM runs."""
    with contextlib.suppress(ConfigurationError):
        return PlannedModel.parse(str(folder)).num_parameters
    return None


def _at_hand(target: Path) -> Iterator[str]:
    """Yields the models next to `target`, then those in the hub's cache, then the bundled ones."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    beside = (path.parent for path in sorted(target.parent.glob("*/config.json")))
    yield from (str(folder) for folder in beside if folder != target and folder.parent != ASSETS)
    with contextlib.suppress(CacheNotFound):
        yield from sorted(repo.repo_id for repo in scan_cache_dir().repos if repo.repo_type == "model")
    yield from sorted(path.parent.name for path in ASSETS.glob("*/config.json") if path.parent != target)
