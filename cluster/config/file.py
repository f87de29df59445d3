"""Reads the configuration: a YAML file, then the environment, then single settings; later ones take precedence.

config = load_config(Path("cluster.yaml"), overrides=["speculation.num_speculative_tokens=6"], environment=os.environ)
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from cluster.config import Config
from cluster.config.environment import Variable, variable_of, variables_in
from cluster.config.retired import replace_retired
from cluster.errors import ConfigurationError

logger = logging.getLogger(__name__)

_NO_ENVIRONMENT: Mapping[str, str] = {}
_VALUE_CHARACTERS = 200


def load_config(
    path: Path | None = None, overrides: Sequence[str] = (), environment: Mapping[str, str] = _NO_ENVIRONMENT
) -> Config:
    """Returns the configuration of the YAML file at `path`, `environment` and `overrides`, applied in this order.

    Without `path`, it starts from the defaults. An override is `section.key=value`. Values of overrides and of
    `environment` are read as YAML. Raises ConfigurationError, with the name of the key, if a setting is invalid.
    """
    return parse_config(read_tree(path), overrides, environment)


def read_tree(path: Path | None) -> dict[str, Any]:
    """Returns the sections in the YAML file at `path`, unchecked. Raises ConfigurationError."""
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigurationError(f"cannot read the configuration {path}: {error.strerror}") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"the configuration {path} is not YAML: {error}") from error
        if loaded is not None and not isinstance(loaded, dict):
            raise ConfigurationError(f"the configuration {path} must be a mapping of sections")
        tree = loaded or {}
    return tree


def parse_config(
    tree: dict[str, Any], overrides: Sequence[str] = (), environment: Mapping[str, str] = _NO_ENVIRONMENT
) -> Config:
    """Returns the configuration of `tree`, `environment` and `overrides`. Changes `tree`; warns of retired settings.

    Raises ConfigurationError, with the name of the key and of the environment variable that set it, if any.
    """
    variables = variables_in(environment)
    for variable in variables:
        _apply(tree, variable.key, variable.value, variable.name)
    given = set()
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator:
            raise ConfigurationError(f"cannot apply {override!r}: write section.key=value")
        _apply(tree, key, value, override)
        given.add(key.strip())
    for warning in replace_retired(tree):
        logger.warning("%s", warning)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigurationError(_describe(error, [one for one in variables if one.key not in given])) from error


def _apply(tree: dict[str, Any], key: str, value: str, source: str) -> None:
    """Sets `key` in `tree` to `value`. `source`: origin of the setting, for messages. Raises ConfigurationError."""
    *sections, name = key.strip().split(".")
    if not sections or not name or not all(sections):
        raise ConfigurationError(f"cannot apply {source!r}: write section.key=value")
    branch = tree
    for section in sections:
        if branch.get(section) is None:  # the section is missing, or has only comments
            branch[section] = {}
        branch = branch[section]
        if not isinstance(branch, dict):
            raise ConfigurationError(f"cannot apply {source!r}: {section!r} is not a section")
    try:
        branch[name] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigurationError(f"cannot apply {source!r}: its value is not YAML: {error}") from error


def _describe(error: ValidationError, variables: Sequence[Variable]) -> str:
    """Returns the first problem, with its key and, for an unknown key, the nearest known key."""
    complaint = error.errors()[0]
    key = ".".join(map(str, complaint["loc"])) or "configuration"
    named = next((one for one in variables if f"{key}.".startswith(f"{one.key}.")), None)
    if named is None and complaint["type"] == "extra_forbidden":  # the section itself may be unknown
        named = next((one for one in variables if one.key.startswith(f"{key}.")), None)
    reason = _reason(complaint, key, named)
    return reason if named is None else f"{named.name}: {reason}"


def _reason(complaint: ErrorDetails, key: str, variable: Variable | None) -> str:
    """Returns the reason of `complaint`. `variable`: the environment variable that caused it, if any."""
    if complaint["type"] != "extra_forbidden":
        # If settings of a section contradict each other, the message names them.
        given = "" if isinstance(complaint["input"], dict | BaseModel) else f" (got {_excerpt(complaint['input'])})"
        return f"{key}: {complaint['msg']}{given}"
    *within, name = map(str, complaint["loc"])
    known = _keys(within)
    nearest = nearest_name(name, known)
    if nearest is None:
        return f"unknown key {key!r}; known keys: {', '.join(known)}"
    if variable is None:
        return f"unknown key {key!r}; did you mean {nearest!r}?"
    rest = variable.key.removeprefix(key)
    return f"unknown key {key!r}; did you mean {variable_of('.'.join((*within, nearest)) + rest)!r}?"


def nearest_name(name: str, known: Sequence[str]) -> str | None:
    """Returns the entry of `known` that is most similar to `name`; None if all differ too much."""
    return next(iter(difflib.get_close_matches(name, known, n=1)), None)


def _keys(location: Sequence[str]) -> list[str]:
    """Returns the keys that the part of the configuration at `location` may have."""
    section: type[BaseModel] = Config
    for part in location:
        field = section.model_fields.get(part)
        if field is None:  # a name chosen by the user, such as those of ray.further_drafts
            continue
        choices = (field.annotation, *getattr(field.annotation, "__args__", ()))
        sections = [choice for choice in choices if isinstance(choice, type) and issubclass(choice, BaseModel)]
        if not sections:
            return []
        section = sections[0]
    return list(section.model_fields)


def _excerpt(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _VALUE_CHARACTERS else f"{text[:_VALUE_CHARACTERS]}..."
