from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cluster.config import Config
from cluster.config.file import load_config
from cluster.drafters.pairing import draft_vocabulary, spoken_fingerprint
from cluster.errors import ConfigurationError
from cluster.model_folder import resolve_model_folder
from cluster.tokenization import Tokenizer
from tests.near_pairs import DRAFT, TARGET, permuted, word_tokenizer


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return permuted(DRAFT, tmp_path / "draft", {300: 301, 301: 300})


def config_of(draft: Path, *settings: str) -> Config:
    return load_config(None, [f"draft.model={draft}", *settings])


def fingerprint_of(model: Path | str) -> str:
    return Tokenizer(resolve_model_folder(str(model))).fingerprint()


def test_a_draft_worker_speaks_its_targets_tokens(draft: Path) -> None:
    config = config_of(draft, f"target.model={TARGET}")
    assert config.names_target
    assert spoken_fingerprint(config, draft_vocabulary(config)) == fingerprint_of(TARGET) != fingerprint_of(draft)


def test_without_its_targets_model_it_speaks_its_own(draft: Path) -> None:
    config = config_of(draft)
    assert not config.names_target
    assert spoken_fingerprint(config, None) == fingerprint_of(draft)


def test_the_targets_tokenizer_is_enough(draft: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    shutil.copy(resolve_model_folder(TARGET) / "tokenizer.json", target)
    vocabulary = draft_vocabulary(config_of(draft, f"target.model={target}"))
    assert vocabulary is not None
    assert vocabulary.fingerprint == fingerprint_of(TARGET)


def test_an_unknown_target_leaves_it_its_own_tokens(draft: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(draft, "target.model=/no/such/folder")
    assert draft_vocabulary(config) is None
    assert "there is no model '/no/such/folder'" in caplog.messages[0]
    assert "only targets with the tokenizer of" in caplog.messages[0]


@pytest.mark.parametrize("drafter", ["ngram", "self-int4"])
def test_a_drafter_without_a_tokenizer_of_its_own_needs_no_map(drafter: str, draft: Path) -> None:
    assert draft_vocabulary(config_of(draft, f"draft.drafter={drafter}", f"target.model={TARGET}")) is None


@pytest.mark.parametrize("drafter", ["model", "parallel", "vllm"])
def test_a_draft_model_needs_tokens_of_the_target(drafter: str, tmp_path: Path) -> None:
    word_tokenizer(tmp_path / "target", {"∀∃": 0, "∃∀": 1})
    config = load_config(None, [f"draft.drafter={drafter}", f"target.model={tmp_path / 'target'}"])
    with pytest.raises(ConfigurationError, match=r"draft 'outrider-draft-2m' .* has none of the 2 tokens"):
        draft_vocabulary(config)
