"""SchemaError, the error of a schema that cannot be enforced, and `at`, which builds the path of its faulty part."""

from __future__ import annotations


class SchemaError(ValueError):
    """A schema that cannot be enforced, with the path of the part that prevents it."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path} {reason}".strip())
        self.path = path  # such as ".properties.age.multipleOf"; "": the schema itself
        self.reason = reason


def at(path: str, *keys: str | int) -> str:
    """Returns `path` extended by names and list positions."""
    return path + "".join(f"[{key}]" if isinstance(key, int) else f".{key[:64]}" for key in keys)
