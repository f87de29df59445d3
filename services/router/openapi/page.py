"""The OpenAPI document as one self-contained HTML page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

Schema = Mapping[str, Any]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1c1c1c; }
code { font: 13px/1.4 ui-monospace, monospace; }
details { border: 1px solid #ccc; border-radius: 4px; margin: .5rem 0; padding: .3rem .8rem; }
summary { cursor: pointer; }
summary b { display: inline-block; min-width: 4.5rem; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0; }
th, td { border-bottom: 1px solid #ddd; padding: .25rem .5rem .25rem 0; text-align: left; vertical-align: top; }
@media (prefers-color-scheme: dark) { body { background: #161616; color: #ddd; } a { color: #8ab4f8; }
details { border-color: #444; } th, td { border-color: #333; } }
"""


def docs_page(document: Mapping[str, Any]) -> str:
    info = document["info"]
    title = f"{info['title']} {info['version']}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{_prose(info['description'])}</p>",
        '<p>The same for programs: <a href="openapi.json">openapi.json</a>.</p>',
        "<h2>Routes</h2>",
        *(
            _operation(method, path, operation)
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
        ),
        "<h2>Objects</h2>",
        *(_object(name, schema) for name, schema in sorted(document["components"]["schemas"].items())),
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n<body>\n'
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> str:
    rows = [f"<summary><b>{method.upper()}</b> <code>{escape(path)}</code> {escape(operation['summary'])}</summary>"]
    if "requestBody" in operation:
        content = operation["requestBody"]["content"]
        rows.append(f"<p>Takes {_contents(content)}.</p>")
    rows.append("<table><tr><th>status</th><th>answer</th><th></th></tr>")
    for status, response in operation["responses"].items():
        contents = _contents(response.get("content", {}))
        rows.append(f"<tr><td>{status}</td><td>{contents}</td><td>{_prose(response['description'])}</td></tr>")
    return f"<details>{''.join(rows)}</table></details>"


def _contents(content: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{_kind(described.get('schema', {}))} as <code>{escape(media_type)}</code>"
        for media_type, described in content.items()
    )


def _object(name: str, schema: Schema) -> str:
    rows = "".join(_fields(schema))
    return (
        f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>'
        f"<table><tr><th>field</th><th>type</th><th>default</th><th></th></tr>{rows}</table></details>"
    )


def _fields(schema: Schema) -> Iterator[str]:
    required = set(schema.get("required", ()))
    for name, field in schema.get("properties", {}).items():
        default = f"<code>{escape(json.dumps(field['default']))}</code>" if "default" in field else ""
        mark = " (required)" if name in required else ""
        yield (
            f"<tr><td><code>{escape(name)}</code>{mark}</td><td>{_kind(field)}</td><td>{default}</td>"
            f"<td>{_prose(field.get('description', ''))}</td></tr>"
        )


def _kind(schema: Schema) -> str:
    """Returns the type of `schema` in words, as HTML."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(map(_kind, schema["anyOf"]))
    if "const" in schema:
        return f"<code>{escape(json.dumps(schema['const']))}</code>"
    if "enum" in schema:
        return " or ".join(f"<code>{escape(json.dumps(value))}</code>" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return escape(schema.get("type", "anything")) + _bounds(schema)


def _bounds(schema: Schema) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {schema[name]}" for name, sign in signs.items() if name in schema]
    return escape(f" {', '.join(bounds)}") if bounds else ""


def _prose(text: str) -> str:
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text, quote=False))
