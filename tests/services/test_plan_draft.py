"""`outrider plan draft`: which models fit a target, and what is wrong with the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.model_folder import ASSETS
from services import cli

TARGET = "outrider-target-12m"


def folder_with(path: Path, tokenizer_of: str, **values: object) -> Path:
    """A folder as it is before its weights are there."""
    path.mkdir()
    config = json.loads((ASSETS / tokenizer_of / "config.json").read_text()) | values
    (path / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).symlink_to(ASSETS / tokenizer_of / name)
    return path


def test_bundled_models_fit_by_their_tokens_and_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    drafts = ["outrider-draft-smollm2-135m", "outrider-draft-2m", "outrider-eagle-12m", TARGET]
    assert cli.main(["plan", "draft", TARGET, *drafts]) == 0
    printed = capsys.readouterr().out
    assert "fits: outrider-draft-2m, 0.00182B parameters, 100% of the tokens\n" in printed
    assert "--draft.model outrider-eagle-12m --draft.drafter eagle\n" in printed
    assert printed.index("draft-2m, ") < printed.index("draft-smollm2-135m, ")
    assert f"not:  {TARGET}\n      it has 0.0119B parameters, the target 0.0119B\n" in printed


def test_other_architectures_and_what_is_no_draft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = folder_with(tmp_path / "target", TARGET, hidden_size=768)
    other = folder_with(tmp_path / "other", TARGET, architectures=["GraniteForCausalLM"])
    empty, packed = tmp_path / "empty", tmp_path / "packed"
    for folder in (empty, packed):
        folder.mkdir()
    (packed / "model.gguf").touch()
    drafts = [str(folder) for folder in (other, empty, packed, packed / "model.gguf")]
    assert cli.main(["plan", "draft", str(target), *drafts, "nobody/here", "outrider-eagle-12m"]) == 0
    printed = capsys.readouterr().out
    assert f"fits: {other}, 100% of the tokens\n      --draft.model {other} --draft.drafter vllm\n" in printed
    assert f"not:  {empty}\n      {str(empty)!r} is not a model: it has no config.json" in printed
    assert printed.count("is in llama.cpp's format") == 2
    assert "not:  nobody/here\n      'nobody/here' is not on this machine" in printed
    assert "it is a head for states of 384 values, the target's have 768" in printed


def test_the_models_at_hand_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.scan_cache_dir", lambda: type("Cache", (), {"repos": ()})())
    target = folder_with(tmp_path / "target", TARGET)
    folder_with(tmp_path / "near", "outrider-draft-2m")
    assert cli.main(["plan", "draft", str(target)]) == 0
    printed = capsys.readouterr().out
    assert f"fits: {tmp_path / 'near'}, " in printed
    assert "fits: outrider-draft-2m, " in printed
    assert f"{target}\n" not in printed


def test_nothing_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "draft", TARGET, str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith("not:  ")
