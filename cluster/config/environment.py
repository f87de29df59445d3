"""Settings in the environment: `OUTRIDER_ROUTER__PORT=8001` is `router.port: 8001`.

Two underscores separate a section from its key. A name without two underscores is not a setting. Examples are
`OUTRIDER_API_KEY`, and the variables that Kubernetes sets in containers for a service called `outrider-router`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PREFIX = "OUTRIDER_"
_SEPARATOR = "__"


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable that is a setting."""

    name: str
    value: str

    @property
    def key(self) -> str:
        """The setting: `section.key`."""
        return ".".join(self.name.removeprefix(PREFIX).lower().split(_SEPARATOR))

    @property
    def override(self) -> str:
        return f"{self.key}={self.value}"


def variables_in(environment: Mapping[str, str]) -> list[Variable]:
    """Returns the variables of `environment` that are settings, by name."""
    return [Variable(name, environment[name]) for name in sorted(environment) if is_setting(name)]


def variable_of(key: str) -> str:
    """Returns the name of the variable for the setting `key`."""
    return PREFIX + _SEPARATOR.join(key.upper().split("."))


def is_setting(name: str) -> bool:
    return name.startswith(PREFIX) and _SEPARATOR in name.removeprefix(PREFIX)


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns `environment` without settings, for a program whose configuration already includes them.

    In that program the variables would override the configuration that it gets.
    """
    return {name: value for name, value in environment.items() if not is_setting(name)}
