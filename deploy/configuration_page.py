"""The page of all settings, made from their declarations: `make docs`, or `python -m deploy.configuration_page`.

Writes docs/CONFIGURATION.md. A test compares the file with what would be written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cluster.config import Config
from services.cli import SERVE_OPTIONS
from services.settings import kind_of, plain, properties_of

PAGE = Path(__file__).resolve().parent.parent / "docs" / "CONFIGURATION.md"

_INTRODUCTION = """\
# Configuration

`make docs` writes this page from the declarations in `cluster/config/` and `services/cli.py`.

All programs read the same tree of settings. A setting is given in one of these ways; the later in this list wins:

1. in a YAML file, with `--config FILE`:

   ```yaml
   target:
     model: Qwen/Qwen3-8B
     dtype: bfloat16
   speculation:
     controller: fixed
   ```

2. in the environment, as `OUTRIDER_SECTION__KEY=VALUE`, with two underscores for every dot of the setting's name. The
   value is read as YAML: `OUTRIDER_ROUTER__PORT=8001`, `OUTRIDER_TARGET__CPUS=[0,1]`,
   `OUTRIDER_RAY__DRAFT__MAX_REPLICAS=8`;

3. by an option, the last one on the command line: `--SECTION.KEY VALUE` or `--set SECTION.KEY=VALUE`, the value read as
   YAML; `--log-level LEVEL` and `--log-format FORMAT`; and those of `outrider serve`, which stand for one or two
   settings:

{options}

`outrider serve` (`--launcher local`, or [`ray`](RAY.md); `--open` shows the page in a browser), `outrider router`,
`outrider target` and `outrider draft` take all of them, and list them with `--help`. `outrider check-config` prints the
resulting configuration. Its exit code is 2 if a setting is wrong, or names a file or host that cannot be found. An
unknown key and a value of another type are errors.

Variables with one underscore between words are not settings: `OUTRIDER_HOST`, `OUTRIDER_ZONE` and `OUTRIDER_REGION`
(see `placement`), [`OUTRIDER_CPU_ISA`](MODELS.md#kernels-for-cpus), and the [keys](OPERATING.md#keys)
`OUTRIDER_API_KEY`, which commands send, and `OUTRIDER_LAUNCHER_KEY_SHA256`, which a launcher sets. Example files are in
[`configs/`](../configs).
"""


def make_page() -> str:
    schema = Config.model_json_schema()
    sections = {name: properties_of(schema, name) for name in schema["properties"]}
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


def _option_table() -> str:
    rows = [
        (f"`{option.flag} {option.metavar}`", ", ".join(f"`{setting}`" for setting in option.settings), option.purpose)
        for option in SERVE_OPTIONS
    ]
    return _table(("option", "settings", ""), rows)


def _setting_table(properties: Mapping[str, Any]) -> str:
    rows = [
        (f"`{name}`", kind_of(setting), f"`{plain(setting['default'])}`", setting["description"])
        for name, setting in properties.items()
    ]
    return _table(("setting", "value", "default", ""), rows)


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def _indented(text: str) -> str:
    return "\n".join(f"   {line}" for line in text.splitlines())


if __name__ == "__main__":
    PAGE.write_text(make_page(), encoding="utf-8")
