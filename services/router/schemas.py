"""Checks the JSON schemas of requests that answers have to follow."""

from __future__ import annotations

import json
from typing import Any

from cluster.errors import InvalidRequestError
from cluster.json_schema.enforceable import to_enforceable
from cluster.json_schema.errors import SchemaError


def enforceable_schema(schema: object, name: str, prefix: str = "") -> dict[str, Any]:
    """Returns the schema that enforces `schema`, the field `name` of a request.

    The names of its definitions begin with `prefix`. Raises InvalidRequestError naming the path of a keyword that
    cannot be enforced.
    """
    try:
        return to_enforceable(schema, prefix)
    except SchemaError as error:
        field = name.partition(".")[0].partition("[")[0]
        raise InvalidRequestError(f"{name}{error.path} {error.reason}", param=field) from error


def schema_text(schema: object) -> str:
    """Returns `schema` as compact JSON."""
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
