"""Every setting by its name, with its possible values, for pages and for `--help`."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.config import Config
from cluster.config.file import nearest_name
from cluster.config.retired import RETIRED


class AppendOverride(argparse.Action):
    """`--section.key VALUE`, or an option like `--log-level VALUE`, kept as `--set section.key=VALUE` is.

    `const`: the settings. `nargs=0`: the option has no value and sets them to true.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        settings: Sequence[str] = self.const
        value = "true" if self.nargs == 0 else values
        added = [f"{setting}={value}" for setting in settings]
        setattr(namespace, self.dest, [*getattr(namespace, self.dest), *added])


def settings_parser() -> argparse.ArgumentParser:
    """Returns a parent parser for argparse, with an option for each setting."""
    schema = _schema()
    parser = argparse.ArgumentParser(add_help=False)
    for section, described in schema["properties"].items():
        group = parser.add_argument_group(f"settings of {section}", _help(described["description"]))
        for name, setting in properties_of(schema, section).items():
            _add_setting(group, f"{section}.{name}", setting)
    for key in RETIRED:
        _add_option(parser, key, argparse.SUPPRESS)
    return parser


@functools.cache  # parsers of several commands are made at every start
def _schema() -> dict[str, Any]:
    return Config.model_json_schema()


def add_settings(group: argparse._ArgumentGroup, keys: Sequence[str]) -> None:
    """Adds those settings as options to a command that takes no others in this way."""
    schema = _schema()
    for key in keys:
        section, _, name = key.partition(".")
        _add_setting(group, key, properties_of(schema, section)[name])


def known_options(unknown: str, parser: argparse.ArgumentParser) -> list[str]:
    """Returns the options of `parser` that a user may have meant by `unknown`, which it does not have.

    These are the settings of that name in any section, by their short option if there is one, or the option whose
    spelling is nearest.
    """
    flags: dict[str, str] = {}  # by setting; short options are added after those of the settings' own names
    for action in parser._actions:
        if isinstance(action, AppendOverride) and len(action.const) == 1:
            flags[action.const[0]] = action.option_strings[0]
    name = unknown.removeprefix("--").replace("-", "_")
    if meant := [flag for setting, flag in flags.items() if setting.rpartition(".")[2] == name]:
        return meant
    nearest = nearest_name(unknown, [option for action in parser._actions for option in action.option_strings])
    return [] if nearest is None else [nearest]


def _add_setting(group: argparse._ArgumentGroup, key: str, setting: Mapping[str, Any]) -> None:
    _add_option(
        group, key, _help(f"{setting['description']} [{kind_of(setting)}; default {plain(setting['default'])}]")
    )


def _add_option(group: argparse._ActionsContainer, key: str, description: str) -> None:
    group.add_argument(
        f"--{key}", action=AppendOverride, dest="overrides", const=(key,), default=[], metavar="VALUE", help=description
    )


def _help(text: str) -> str:
    return text.replace("`", "").replace("%", "%%")


def properties_of(schema: Mapping[str, Any], section: str) -> dict[str, Any]:
    """Returns the settings of `section` in the configuration's JSON schema; those of its parts as `part.name`."""
    reference: str = schema["properties"][section]["$ref"]
    return _flat(schema, schema["$defs"][reference.rpartition("/")[2]]["properties"])


def _flat(schema: Mapping[str, Any], properties: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns `properties`, with those of a part of the section as `part.name`."""
    flat: dict[str, Any] = {}
    for name, setting in properties.items():
        if (reference := setting.get("$ref")) is None:
            flat[prefix + name] = setting
        else:
            part = schema["$defs"][reference.rpartition("/")[2]]["properties"]
            flat |= _flat(schema, part, f"{prefix}{name}.")
    return flat


def plain(value: object) -> str:
    """Returns a default as a user writes it."""
    return value if isinstance(value, str) else json.dumps(value)


def kind_of(schema: Mapping[str, Any]) -> str:
    """Returns the values that this JSON schema allows, in words."""
    if "anyOf" in schema:
        return " or ".join(kind_of(choice) for choice in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema["type"] == "array":
        return _kind_of_list(schema)
    names = {
        "integer": "whole number",
        "number": "number",
        "boolean": "`true`, `false`",
        "null": "`null`",
        "object": "mapping",
    }
    if "://" in schema.get("pattern", ""):
        return "URL"
    if "pattern" in schema:
        return "`host:port`, `dns:name:port` or `file:path`" if "dns:" in schema["pattern"] else "`host:port`"
    return f"{names.get(schema['type'], 'text')}{_bounds(schema)}"


def _kind_of_list(schema: Mapping[str, Any]) -> str:
    if "prefixItems" in schema:
        return f"[{', '.join(kind_of(item) for item in schema['prefixItems'])}]"
    items = kind_of(schema["items"])
    return f"list of {items if items.startswith('[') else items.replace('number', 'numbers', 1)}"


def _bounds(schema: Mapping[str, Any]) -> str:
    lower, upper = schema.get("minimum"), schema.get("maximum")
    above = schema.get("exclusiveMinimum")
    if lower is not None and upper is not None:
        return f" {lower} to {upper}"
    bounds = [(above, "above"), (lower, "at least"), (upper, "at most")]
    return " and".join(f" {word} {bound}" for bound, word in bounds if bound is not None)
