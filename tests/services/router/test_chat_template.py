from __future__ import annotations

import json

import pytest

from cluster.errors import ConfigurationError, InvalidRequestError
from services.router.chat.template import ChatTemplate

MESSAGES = [{"role": "user", "content": "<fox> & 🦊"}, {"role": "assistant", "content": "dog"}]


def render(source: str, *, tokens: dict[str, str] | None = None, **options: bool) -> str:
    return ChatTemplate(source, tokens).render(MESSAGES, **options)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}[{{ m['role'] }}]{{ m.content }}{% endfor %}", "[user]<fox> & 🦊[assistant]dog"),
        # Blocks take the white space before them and the line's end after them.
        ("  {% for m in messages %}\n{{ m.role }}\n  {% endfor %}\nend", "user\nassistant\nend"),
        ("{{ messages[0].content | tojson }}", '"<fox> & 🦊"'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=True) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}", "user"),
        ("{{ bos_token }}|{{ eos_token }}|{{ pad_token }}", "<s>||"),
        ("{% if tools %}tools{% elif documents is none %}none{% endif %}", "none"),
        ("{% generation %}{{ messages[1].content }}{% endgeneration %}!", "dog!"),
        ("{% if strftime_now is defined %}{{ strftime_now('%Y') | length }}{% endif %}", "4"),
    ],
)
def test_what_templates_can_say(source, expected):
    assert render(source, tokens={"bos_token": "<s>"}) == expected


def test_the_generation_prompt_is_there_unless_it_is_left_out():
    source = "{% if add_generation_prompt %}now{% endif %}"
    assert render(source) == "now"
    assert render(source, add_generation_prompt=False) == ""


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5].content.text }}", "no element 5"),
        ("{{ messages[0].content + 5 }}", "concatenate"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_messages_a_template_cannot_take_are_the_clients_error(source, reason):
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        render(source)
    assert caught.value.param == "messages"


def test_a_broken_template_is_found_at_the_start():
    with pytest.raises(ConfigurationError, match="chat template"):
        ChatTemplate("{% for m in messages %}")


def test_a_folder_without_a_template(tmp_path):
    assert ChatTemplate.from_folder(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert ChatTemplate.from_folder(tmp_path) is None


def test_the_places_of_a_template(tmp_path):
    config = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "pad_token": None,
        "add_bos_token": True,
        "chat_template": "config {{ bos_token }}{{ eos_token }}{{ pad_token }}{{ add_bos_token }}",
    }

    def rendered() -> str:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        template = ChatTemplate.from_folder(tmp_path)
        assert template is not None
        return template.render(MESSAGES)

    in_config = config.pop("chat_template")
    (tmp_path / "chat_template.json").write_text('{"chat_template": "processor {{ eos_token }}"}')
    assert rendered() == "processor </s>"
    config["chat_template"] = in_config
    assert rendered() == "config <s></s>"
    config["chat_template"] = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    assert rendered() == "yes"
    template = ChatTemplate.from_folder(tmp_path)
    assert template is not None
    assert template.of_request(has_tools=True).render(MESSAGES) == "no"
    (tmp_path / "chat_template.jinja").write_text("file {{ eos_token }}\n")
    assert rendered() == "file </s>"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    template = ChatTemplate.from_folder(tmp_path)
    assert template is not None
    assert [template.of_request(has_tools=tools).render(MESSAGES) for tools in (True, False)] == ["tools", "file </s>"]
