"""Location of a worker, and the round trip estimated from two locations. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from cluster.config.ray import PlacementConfig
from cluster.config.types import HOST_PORT

# Estimated round trips in seconds, until one is measured.
_SAME_HOST, _SAME_ZONE, _SAME_REGION, _ELSEWHERE = 0.0002, 0.0005, 0.005, 0.030
_ENVIRONMENT = "OUTRIDER_{}"  # variables that a launcher may set, such as OUTRIDER_ZONE


@dataclass(frozen=True, slots=True)
class Place:
    """Location of a program. None: unknown."""

    host: str | None = None
    zone: str | None = None
    region: str | None = None

    @classmethod
    def own(cls, placement: PlacementConfig, environment: Mapping[str, str]) -> Place:
        """Returns this program's place. Labels of the configuration take precedence over the environment's."""
        names = [field.name for field in fields(cls)]
        return cls(*[getattr(placement, name) or environment.get(_ENVIRONMENT.format(name.upper())) for name in names])

    def round_trip_to(self, other: Place) -> float | None:
        """Returns the estimated round trip in seconds; None if the places have no label in common."""
        is_same = {
            field.name: getattr(self, field.name) == getattr(other, field.name)
            for field in fields(self)
            if getattr(self, field.name) is not None and getattr(other, field.name) is not None
        }
        if is_same.get("host"):
            return _SAME_HOST
        if is_same.get("zone"):
            return _SAME_ZONE
        if is_same.get("region"):
            return _SAME_REGION
        if "region" in is_same:
            return _ELSEWHERE
        return _SAME_REGION if "zone" in is_same else _SAME_ZONE if "host" in is_same else None


SOMEWHERE = Place()


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A line of a list of workers: `host:port`, or `host:port zone=b host=h2`."""

    address: str
    place: Place = SOMEWHERE

    @classmethod
    def parse(cls, line: str) -> Endpoint:
        """Parses `line`. Raises ValueError with the problem."""
        address, *labels = line.split()
        if not re.fullmatch(HOST_PORT, address):
            raise ValueError(f"{line[:60]!r} is not host:port")
        place, known = SOMEWHERE, {field.name for field in fields(Place)}
        for label in labels:
            key, _, value = label.partition("=")
            if key not in known or not value:
                raise ValueError(f"{label[:60]!r} is not one of {', '.join(f'{name}=...' for name in sorted(known))}")
            if getattr(place, key) is not None:
                raise ValueError(f"{key} is given twice")
            place = replace(place, **{key: value})
        return cls(address, place)

    def __str__(self) -> str:
        labels = [(field.name, getattr(self.place, field.name)) for field in fields(Place)]
        return " ".join([self.address, *(f"{name}={value}" for name, value in labels if value is not None)])
