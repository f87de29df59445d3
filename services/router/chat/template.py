"""The chat template of a model folder, which converts messages to a prompt's text.

A template is a program by the model's author. It runs in a sandbox, with the functions and settings that Hugging Face
provides to templates.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.parser
import jinja2.sandbox
from jinja2 import nodes

from cluster.errors import ConfigurationError, InvalidRequestError

_DEFAULT, _FOR_TOOLS = "default", "tool_use"  # names of templates in transformers


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    takes_parts: bool  # whether it iterates over the parts of a content
    takes_text: bool  # whether it accepts a string as content
    knows_tools: bool

    @classmethod
    def of(cls, template: nodes.Template) -> TemplateTraits:
        takes_parts = _goes_through_contents(template)
        asks_for_text = any(test.name == "string" for test in template.find_all(nodes.Test))
        return cls(
            takes_parts=takes_parts,
            takes_text=asks_for_text or not takes_parts,
            knows_tools=any(name.name == "tools" for name in template.find_all(nodes.Name)),
        )


class ChatTemplate:
    def __init__(
        self, source: str, special_tokens: Mapping[str, str] | None = None, with_tools: ChatTemplate | None = None
    ) -> None:
        """Raises ConfigurationError if `source` is not a valid template.

        `special_tokens`: tokens by name, such as `bos_token`. `with_tools`: a separate template for requests with
        tools; None if they use this one.
        """
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self.traits = TemplateTraits.of(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ConfigurationError(f"the model's chat template is broken: {error}") from error
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._with_tools = with_tools or self

    def of_request(self, *, has_tools: bool) -> ChatTemplate:
        """Returns the template for a request with or without tools."""
        return self._with_tools if has_tools else self

    @classmethod
    def from_folder(cls, folder: Path, source: str | None = None) -> ChatTemplate | None:
        """Returns the template of a model folder, or that in `source` with the folder's tokens; None if it has none.

        Reads `chat_template.jinja`, or else `tokenizer_config.json`; either may come with a second one for tools. If
        there is none, reads `chat_template.json`, which multimodal models have for their processor.
        """
        config = _read_object(folder / "tokenizer_config.json")
        tokens = _special_tokens(config)
        sources = _templates_in(_read_object(folder / "chat_template.json")) | _templates_in(config)
        if source is not None:
            return cls(source, tokens)
        for name, path in ((_DEFAULT, "chat_template.jinja"), (_FOR_TOOLS, "additional_chat_templates/tool_use.jinja")):
            file = folder / path
            if file.is_file():
                sources[name] = file.read_text(encoding="utf-8")
        with_tools = cls(sources[_FOR_TOOLS], tokens) if _FOR_TOOLS in sources else None
        return cls(sources[_DEFAULT], tokens, with_tools) if _DEFAULT in sources else with_tools

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        more: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the text of the prompt. `more`: additional variables of the template.

        Raises InvalidRequestError if the template raises any exception for these messages.
        """
        variables = {
            **self._special_tokens,
            "documents": None,
            **(more or {}),
            "messages": messages,
            "tools": tools or None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(variables)
        except Exception as error:  # any exception of a program that was not written for these messages
            raise InvalidRequestError(
                f"messages do not fit the model's chat template: {error or type(error).__name__}", param="messages"
            ) from error


def _read_object(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; an empty one if there is none."""
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigurationError(f"{path} is not JSON: {error}") from error
    return config if isinstance(config, dict) else {}


def _templates_in(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the sources of the templates in `config`, by name."""
    template = config.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return {_DEFAULT: template} if isinstance(template, str) else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns `bos_token`, `eos_token` and so on, by name.

    The file has a token as a string, or as an object with the string in `content`.
    """
    tokens = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token")
    }
    return {name: token for name, token in tokens.items() if isinstance(token, str)}


class _GenerationBlocks(jinja2.ext.Extension):
    """Renders the contents of `{% generation %}` blocks, which mark the assistant's text for trainers."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlocks, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Converts `value` to JSON.

    Unlike Jinja's filter it does not escape characters for HTML, because a model reads the text, not a browser.
    """
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _goes_through_contents(template: nodes.Template) -> bool:
    """Returns whether `template` loops over `message.content`, or over a variable that holds it."""
    names = {"content"}  # name of the content as an argument of macros
    for assignment in template.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and _is_content(assignment.node, names):
            names.add(assignment.target.name)
    return any(_is_content(loop.iter, names) for loop in template.find_all(nodes.For))


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    match node:
        case nodes.Getattr(attr="content") | nodes.Getitem(arg=nodes.Const(value="content")):
            return True
        case nodes.Name(name=name):
            return name in names
        case nodes.Filter(node=nodes.Node() as inner) | nodes.Getitem(node=inner, arg=nodes.Slice()):
            return _is_content(inner, names)
    return False
