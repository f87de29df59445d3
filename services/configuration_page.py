"""The page of all settings, made from their declarations: `make docs`, or `python -m services.configuration_page`.

Writes docs/CONFIGURATION.md. A test compares the file with what would be written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cluster.config import Config
from services.cli import SERVE_OPTIONS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "CONFIGURATION.md"

_INTRODUCTION = """\
# Configuration

`make docs` writes this page from the declarations in `cluster/config.py` and `services/cli.py`.

All programs read the same tree of settings, each in a section. A setting is given in one of three ways; the later in
this list wins:

1. in a YAML file, with `--config FILE`:

   ```yaml
   target:
     model: meta-llama/Llama-2-13b-hf
     dtype: bfloat16
   speculation:
     controller: fixed
   ```

2. by an option of `outrider serve`, which stands for one or two settings:

{options}

3. with `--set SECTION.KEY=VALUE`, which may be repeated. The value is read as YAML:
   `--set target.cpus=[0,1] --set ray.draft.max_replicas=8 --set speculation.controller=fixed`.

`outrider serve`, the launcher (`--launcher local`, or [`ray`](RAY.md)), and `outrider router`, `outrider target` and
`outrider draft` all take `--config` and `--set`. An unknown key and a value of another type are errors, in one line
that names the key; for an unknown key it offers the nearest known one. The environment is only
asked where a program is (`OUTRIDER_HOST`, `OUTRIDER_ZONE`, `OUTRIDER_REGION`; see `placement`). Example files are in
[`configs/`](../configs).
"""


def make_page() -> str:
    schema = Config.model_json_schema()
    sections = {name: _properties(schema, name) for name in schema["properties"]}
    target, draft = sections["target"], sections["draft"]
    shared = {name for name in target if target[name] == draft.get(name)}
    parts = [_INTRODUCTION.format(options=_indented(_option_table()))]
    parts.append("## `target` and `draft`\n\nSettings that both sections have, each for its pool of workers.\n")
    parts.append(_setting_table({name: target[name] for name in target if name in shared}))
    for name, properties in sections.items():
        parts.append(f"## `{name}`\n\n{schema['properties'][name]['description']}\n")
        is_worker = name in ("target", "draft")
        parts.append(_setting_table({key: properties[key] for key in properties if not (is_worker and key in shared)}))
    return "\n".join(parts)


def _properties(schema: Mapping[str, Any], section: str) -> dict[str, Any]:
    reference: str = schema["properties"][section]["$ref"]
    return _flat(schema, schema["$defs"][reference.rpartition("/")[2]]["properties"])


def _flat(schema: Mapping[str, Any], properties: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`properties`, with those of a part of the section as `part.name`."""
    flat: dict[str, Any] = {}
    for name, setting in properties.items():
        if (reference := setting.get("$ref")) is None:
            flat[prefix + name] = setting
        else:
            part = schema["$defs"][reference.rpartition("/")[2]]["properties"]
            flat |= _flat(schema, part, f"{prefix}{name}.")
    return flat


def _option_table() -> str:
    rows = [
        (f"`{option.flag} {option.metavar}`", ", ".join(f"`{setting}`" for setting in option.settings), option.purpose)
        for option in SERVE_OPTIONS
    ]
    return _table(("option", "settings", ""), rows)


def _setting_table(properties: Mapping[str, Any]) -> str:
    rows = [
        (f"`{name}`", _kind_of(setting), f"`{_plain(setting['default'])}`", setting["description"])
        for name, setting in properties.items()
    ]
    return _table(("setting", "value", "default", ""), rows)


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _kind_of(schema: Mapping[str, Any]) -> str:
    """What a value of this JSON schema can be, in words."""
    if "anyOf" in schema:
        return " or ".join(_kind_of(choice) for choice in schema["anyOf"])
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
    if "http" in schema.get("pattern", ""):
        return "URL"
    if "pattern" in schema:
        return "`host:port`, `dns:name:port` or `file:path`" if "dns:" in schema["pattern"] else "`host:port`"
    return f"{names.get(schema['type'], 'text')}{_bounds(schema)}"


def _kind_of_list(schema: Mapping[str, Any]) -> str:
    if "prefixItems" in schema:
        return f"[{', '.join(_kind_of(item) for item in schema['prefixItems'])}]"
    items = _kind_of(schema["items"])
    return f"list of {items if items.startswith('[') else items.replace('number', 'numbers', 1)}"


def _bounds(schema: Mapping[str, Any]) -> str:
    lower, upper = schema.get("minimum"), schema.get("maximum")
    above = schema.get("exclusiveMinimum")
    if lower is not None and upper is not None:
        return f" {lower} to {upper}"
    bounds = [(above, "above"), (lower, "at least"), (upper, "at most")]
    return " and".join(f" {word} {bound}" for bound, word in bounds if bound is not None)


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def _indented(text: str) -> str:
    return "\n".join(f"   {line}" for line in text.splitlines())


if __name__ == "__main__":
    PAGE.write_text(make_page(), encoding="utf-8")
