"""`outrider check-config`: the resulting configuration and its errors. It loads no model."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from cluster.config import Config
from cluster.config.types import FilePath
from services.addresses import unknown_hosts

_SECRET = re.compile(r"(?i)(token|secret|password|passwd|api_?key|authorization|credential)")
_HIDDEN = "(hidden)"


def run(config: Config) -> int:
    """Prints `config`; returns 2, with a line on stderr for each file or host in it that cannot be found."""
    print(yaml.safe_dump(shown(config), sort_keys=False, allow_unicode=True), end="")
    problems = [*_missing_files(config), *_unknown_hosts(config)]
    for problem in problems:
        print(f"outrider check-config: {problem}", file=sys.stderr)
    return 2 if problems else 0


def shown(config: Config) -> dict[str, Any]:
    """Returns the tree of `config` without secrets.

    Settings name files of secrets. But arguments that are passed on to vLLM may contain a token, and a URL a password.
    """
    sections: dict[str, Any] = config.model_dump(mode="json")
    for section, field in (("target", "engine_args"), ("draft", "engine_args"), ("draft", "speculative_config")):
        sections[section][field] = _hidden(sections[section][field])
    for further in sections["ray"]["further_drafts"].values():
        further["draft"] = _hidden(further["draft"])
    endpoint = sections["tracing"]["endpoint"]
    if endpoint is not None:
        sections["tracing"]["endpoint"] = re.sub(r"//[^/@\s]*@", f"//{_HIDDEN}@", endpoint)
    return sections


def _hidden(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key: _HIDDEN if _SECRET.search(str(key)) and isinstance(item, str) else _hidden(item)
            for key, item in value.items()
        }
    return [_hidden(item) for item in value] if isinstance(value, list) else value


def _missing_files(config: Config) -> Iterator[str]:
    sections = [("", config)]
    while sections:
        prefix, section = sections.pop(0)
        for name, field in type(section).model_fields.items():
            value: Any = getattr(section, name)
            if isinstance(value, BaseModel):
                sections.append((f"{prefix}{name}.", value))  # type: ignore[arg-type]
            elif isinstance(value, str) and FilePath in getattr(field.annotation, "__args__", (field.annotation,)):
                for path in {value.replace("{program}", program) for program in ("router", "target", "draft")}:
                    yield from _unreadable(Path(path), f"{prefix}{name}")
    for pool in ("target", "draft"):
        for address in getattr(config, pool).addresses:
            if address.startswith("file:"):
                yield from _unreadable(Path(address.removeprefix("file:")), f"{pool}.addresses")


def _unreadable(path: Path, setting: str) -> Iterator[str]:
    try:
        path.open("rb").close()
    except OSError as error:
        yield f"{setting}: cannot read {path}: {error.strerror}"


def _unknown_hosts(config: Config) -> Iterator[str]:
    for pool, worker in (("target", config.target), ("draft", config.draft)):
        for complaint in unknown_hosts(worker.addresses):
            yield f"{pool}.addresses: {complaint}"
