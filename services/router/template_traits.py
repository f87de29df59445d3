"""What a chat template's program tells of the messages that it was written for."""

from __future__ import annotations

from dataclasses import dataclass

from jinja2 import nodes


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    takes_parts: bool  # it goes through the parts of a content that is a list
    takes_text: bool  # it takes a content that is a string
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


def _goes_through_contents(template: nodes.Template) -> bool:
    """Whether there is a loop over `message.content`, or over a variable that holds it."""
    names = {"content"}  # what macros call their argument
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
