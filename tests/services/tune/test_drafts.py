"""The drafter is recognised from the folder of the draft."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.config.file import load_config
from cluster.diagnosis.findings import Finding
from cluster.errors import ConfigurationError
from services.tune.candidates import candidates
from services.tune.drafts import draft_settings
from tests.cluster.engine.further_heads import save_bundled_target_with_mtp, save_medusa_heads

TARGET = "outrider-target-12m"


def test_each_kind_of_draft_gets_its_drafter(tmp_path: Path) -> None:
    save_medusa_heads(tmp_path, "published")
    expected = {"outrider-eagle-12m": "eagle", str(tmp_path): "medusa", "outrider-draft-2m": "model"}
    found = list(draft_settings(TARGET, list(expected)))
    assert found == [(f"draft.model={name}", f"draft.drafter={drafter}") for name, drafter in expected.items()]
    for settings in found:
        load_config(None, settings)


def test_the_module_of_the_target_is_a_draft(tmp_path: Path) -> None:
    save_bundled_target_with_mtp(tmp_path)
    assert list(draft_settings(str(tmp_path), [])) == [("draft.drafter=mtp",)]


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        list(draft_settings(TARGET, [str(tmp_path)]))


def test_drafts_are_tried_before_remedies() -> None:
    settings = ("draft.drafter=ngram",)
    found = candidates(load_config(None), [Finding("low acceptance", "", "", None)], [settings])
    assert [one.settings for one in found] == [settings, ("draft.drafter=self-int4",)]
