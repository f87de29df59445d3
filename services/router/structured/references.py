"""Resolves the references within a schema, and bounds the work of comparing its parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from services.router.structured.errors import SchemaError

MAX_SCHEMAS = 8192  # in all schemas of a request
MAX_STEPS = 50_000


class SchemaWork:
    """Counts the work on all schemas of one request, which share its limits."""

    def __init__(self) -> None:
        self._num_schemas = 0
        self._num_steps = 0

    def begin_schema(self) -> None:
        """Counts a schema. Raises SchemaError after MAX_SCHEMAS."""
        self._num_schemas += 1
        if self._num_schemas > MAX_SCHEMAS:
            raise SchemaError("", f"has more than {MAX_SCHEMAS} schemas within it, those before it included")

    def spend(self, num_steps: int = 1) -> None:
        """Counts steps of comparing parts of a schema. Raises SchemaError after MAX_STEPS."""
        self._num_steps += num_steps
        if self._num_steps > MAX_STEPS:
            raise SchemaError("", "takes too long to check: make it simpler")


class References:
    """Resolves the `$ref`s within one schema. `spend` counts steps of comparing its parts."""

    def __init__(self, root: object, work: SchemaWork | None = None) -> None:
        self._root = root
        self.spend = (work or SchemaWork()).spend

    def look_up(self, reference: Any, path: str) -> Any:
        """Returns the schema that the `$ref` at `path` refers to. Raises SchemaError."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            got = f"(got {str(reference)[:80]!r})"
            raise SchemaError(path, f"should be # or begin with #/: it can only refer to a place in this schema {got}")
        found = self._root
        for part in reference.split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdecimal() and len(key) < 6 and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, Mapping) and key in found:
                found = found[key]
            else:
                raise SchemaError(path, f"refers to {reference[:80]!r}, which is not in the schema")
        return found

    def resolve(self, schema: Any) -> Any:
        """Returns `schema`, or its target if it is a reference; {} if the references form a cycle."""
        seen = set()
        self.spend()
        while isinstance(schema, Mapping) and "$ref" in schema:
            reference = str(schema["$ref"])
            if reference in seen:
                return {}
            seen.add(reference)
            schema = self.look_up(schema["$ref"], "")
            self.spend()
        return schema
