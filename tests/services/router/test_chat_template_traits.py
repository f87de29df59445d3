from __future__ import annotations

import pytest

from services.router.chat.prompt import Conversation, render
from services.router.chat.template import ChatTemplate

LOOPS = [
    "{% for m in messages %}{% for part in m['content'] %}{{ part.text }}|{% endfor %}{% endfor %}",
    "{% for m in messages %}{% for part in m.content %}{{ part.text }}|{% endfor %}{% endfor %}",
    "{% for m in messages %}{% set c = m['content'] %}{% for p in c[0:] | list %}{{ p.text }}|{% endfor %}{% endfor %}",
    "{% macro show(content) %}{% for p in content %}{{ p.text }}|{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
]
BOTH = (
    "{% for m in messages %}{% if m.content is string %}={{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}|{% endfor %}{% endif %}{% endfor %}"
)
TEXT = "{% for m in messages %}{{ m.content }}{% endfor %}"
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def written(template: str, content: object) -> str:
    return render(ChatTemplate(template), Conversation([{"role": "user", "content": content}]))


@pytest.mark.parametrize("template", LOOPS)
def test_a_template_that_goes_through_parts_gets_parts(template: str) -> None:
    assert written(template, PARTS) == "a|b|"
    assert written(template, "ab") == "ab|"
    assert written(template, "") == ""


def test_a_template_for_both_gets_what_was_sent() -> None:
    assert written(BOTH, PARTS) == "a|b|"
    assert written(BOTH, "ab") == "=ab"


def test_a_template_for_text_gets_text() -> None:
    assert written(TEXT, PARTS) == "a\nb"
    assert written(TEXT, "ab") == "ab"


@pytest.mark.parametrize(
    ("template", "knows"), [(TEXT, False), (TEXT + "{% if tools %}x{% endif %}", True), (TEXT + "{# tools #}", False)]
)
def test_whether_a_template_knows_tools(template: str, knows: bool) -> None:
    assert ChatTemplate(template).traits.knows_tools == knows
