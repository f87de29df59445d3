"""Reads the configuration: a YAML file, then single settings.

config = load_config(Path("cluster.yaml"), overrides=["speculation.num_speculative_tokens=6"])
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from cluster.config import Config
from cluster.errors import ConfigurationError


def load_config(path: Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Reads the YAML file at `path` (default: none, all defaults), then applies `overrides`.

    An override is `section.key=value`, its value read as YAML. Raises ConfigurationError naming the key.
    """
    return parse_config(read_tree(path), overrides)


def read_tree(path: Path | None) -> dict[str, Any]:
    """The sections in the YAML file at `path`, unchecked. Raises ConfigurationError."""
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigurationError(f"cannot read the configuration {path}: {error.strerror}") from error
        except yaml.YAMLError as error:
            raise ConfigurationError(f"the configuration {path} is not YAML: {error}") from error
        if loaded is not None and not isinstance(loaded, dict):
            raise ConfigurationError(f"the configuration {path} must be a mapping of sections")
        tree = loaded or {}
    return tree


def parse_config(tree: dict[str, Any], overrides: Sequence[str] = ()) -> Config:
    """The configuration of `tree`, after `overrides`, which change it. Raises ConfigurationError naming the key."""
    for override in overrides:
        _apply_override(tree, override)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigurationError(_describe(error)) from error


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    *sections, name = key.strip().split(".")
    if not separator or not sections or not name or not all(sections):
        raise ConfigurationError(f"cannot apply {override!r}: write section.key=value")
    branch = tree
    for section in sections:
        branch = branch.setdefault(section, {})
        if not isinstance(branch, dict):
            raise ConfigurationError(f"cannot apply {override!r}: {section!r} is not a section")
    try:
        branch[name] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigurationError(f"cannot apply {override!r}: its value is not YAML: {error}") from error


def _describe(error: ValidationError) -> str:
    """The first complaint, with the key it is about and, for an unknown key, the nearest known one."""
    complaint = error.errors()[0]
    location = [str(part) for part in complaint["loc"]]
    key = ".".join(location) or "configuration"
    if complaint["type"] != "extra_forbidden":
        return f"{key}: {complaint['msg']} (got {complaint['input']!r})"
    section: type[BaseModel] = Config
    for part in location[:-1]:
        annotation = section.model_fields[part].annotation
        assert isinstance(annotation, type)
        section = annotation
    known = list(section.model_fields)
    nearest = difflib.get_close_matches(location[-1], known, n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"known keys: {', '.join(known)}"
    return f"unknown key {key!r}; {hint}"
