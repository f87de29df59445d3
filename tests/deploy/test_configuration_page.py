"""Every setting is explained, and the page of them is as it would be written now."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cluster.config import Config
from deploy.configuration_page import PAGE, make_page
from services.cli import SERVE_OPTIONS


def settings(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """All settings of a section and its parts, with their names within it."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from settings(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def test_every_setting_has_a_description() -> None:
    for section, field in Config.model_fields.items():
        assert field.description, section
    for name, setting in settings(Config):
        assert setting.description, name


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == make_page(), "run `make docs`"


def test_the_page_has_every_setting_and_option() -> None:
    page = make_page()
    for field in Config.model_fields.values():
        assert field.annotation is not None
        for name, _ in settings(field.annotation):
            assert f"| `{name}` |" in page
    for option in SERVE_OPTIONS:
        assert f"`{option.flag} {option.metavar}`" in page
