"""The whole command on the bundled pair, with few prompts."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
import torch

from bench.distill import prompts
from cluster.config import TargetConfig
from cluster.engine.model_config import ModelConfig
from cluster.model_folder import resolve_model_folder
from cluster.tokenization import Tokenizer
from cluster.training.teaching import NUM_LIKELIEST, Lesson, teach
from cluster.training.traffic import Answer, is_held_out, read_answers, read_prompts
from cluster.training.traffic_acceptance import measure_traffic_acceptance
from cluster.training.traffic_draft import DraftShape, load_draft, new_draft, train_draft
from cluster.training.trainer import Recipe
from services.cli import main

TARGET, DRAFT = "outrider-target-12m", "outrider-draft-2m"
SETTINGS = ["--set", "target.dtype=float32", "--set", "target.max_num_seqs=8"]


@pytest.fixture(scope="module")
def traffic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("traffic") / "traffic.jsonl"
    file.write_text("".join(f"{json.dumps({'prompt': one})}\n" for one in prompts(40, seed=1)), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def distilled(traffic: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled draft, taught on it."""
    out = tmp_path_factory.mktemp("draft")
    arguments = ["--traffic", str(traffic), "--target", TARGET, "--draft", DRAFT, "--out", str(out), *SETTINGS]
    assert (
        main(["distill", *arguments, "--max-tokens", "32", "--streams", "8", "--epochs", "25", "--batch-size", "8"])
        == 0
    )
    return out


def lessons_of(distilled: Path) -> list[Lesson]:
    return teach(TargetConfig(model=TARGET, dtype="float32"), read_answers(distilled / "answers.jsonl"), lambda: None)


def test_it_leaves_a_draft_that_serves_the_target(distilled: Path) -> None:
    assert Tokenizer(distilled).fingerprint() == Tokenizer(resolve_model_folder(TARGET)).fingerprint()
    own, bundled = (ModelConfig.from_folder(folder) for folder in (distilled, resolve_model_folder(DRAFT)))
    assert own == bundled


def test_the_report_tells_acceptance_on_prompts_that_were_held_out(distilled: Path) -> None:
    report = json.loads((distilled / "report.json").read_text(encoding="utf-8"))
    answers = read_answers(distilled / "answers.jsonl")
    held_out = [one for one in answers if is_held_out(one.prompt_token_ids, 10)]
    assert (report["num_held_out"], report["num_taught"]) == (len(held_out), len(answers) - len(held_out))
    for key in ("before", "after"):
        assert sum(one["num_tokens"] for one in report[key]) == sum(len(one.token_ids) for one in held_out)
    drafts = [load_draft(folder) for folder in (resolve_model_folder(DRAFT), distilled)]
    lessons = [one for one in lessons_of(distilled) if one.answer in held_out]
    for key, draft in zip(("before", "after"), drafts, strict=True):
        measured = measure_traffic_acceptance(draft, lessons)
        assert [one.rate for one in measured] == pytest.approx([one["rate"] for one in report[key]], abs=1e-9)


def test_what_was_taught_is_learned(distilled: Path) -> None:
    drafts = [load_draft(folder) for folder in (resolve_model_folder(DRAFT), distilled)]
    taught = [one for one in lessons_of(distilled) if not is_held_out(one.answer.prompt_token_ids, 10)]
    before, after = ([one.rate for one in measure_traffic_acceptance(draft, taught)] for draft in drafts)
    assert sum(after) > sum(before) + 0.15


def test_the_target_itself_would_always_be_accepted(distilled: Path) -> None:
    """At every temperature: the same noise makes the same choices of the same logits."""
    target = load_draft(resolve_model_folder(TARGET))
    for one in measure_traffic_acceptance(target, lessons_of(distilled)):
        assert one.rate > 0.995


def test_a_label_is_the_targets_own_distribution(distilled: Path) -> None:
    target = load_draft(resolve_model_folder(TARGET))
    lesson = lessons_of(distilled)[0]
    token_ids = torch.tensor([lesson.answer.all_token_ids[:-1]])
    with torch.no_grad():
        logits = target(input_ids=token_ids).logits[0, -len(lesson.answer.token_ids) :]
    best = logits.softmax(dim=-1).topk(NUM_LIKELIEST, dim=-1)
    assert torch.allclose(torch.from_numpy(lesson.probabilities), best.values, atol=1e-3)


def test_a_new_draft_learns_from_nothing(distilled: Path) -> None:
    config = ModelConfig.from_folder(resolve_model_folder(TARGET))
    embedding = load_draft(resolve_model_folder(TARGET)).model.embed_tokens.weight.detach()
    draft = new_draft(config, embedding, DraftShape(64, 1, 128), seed=3)
    lessons = lessons_of(distilled)
    before = measure_traffic_acceptance(draft, lessons)
    losses: list[float] = []
    train_draft(draft, lessons, Recipe(100, 8, 32, 3e-3, seed=1), losses.append)
    assert losses[-1] < 0.7 * losses[0]
    assert measure_traffic_acceptance(draft, lessons)[0].rate > before[0].rate + 0.1
    with pytest.raises(ValueError, match="multiple of 32"):
        new_draft(config, embedding, DraftShape(100), seed=3)


def test_prompts_are_read_from_tokens_texts_and_conversations(tmp_path: Path) -> None:
    file = tmp_path / "traffic.jsonl"
    entries = [{"prompt_token_ids": [5, 6]}, {"prompt": "ab"}, {"messages": ["x"]}, {"prompt": "ab"}]
    file.write_text("\n".join(map(json.dumps, entries)), encoding="utf-8")
    assert read_prompts(file, lambda text: [len(text)], lambda messages: [9] * len(messages)) == [(5, 6), (2,), (9,)]
    file.write_text('{"prompt_token_ids": [5]}\n{"question": 1}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="line 2"):
        read_prompts(file, lambda text: [1], lambda messages: [1])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--traffic", "none.jsonl", "--target", TARGET], "none.jsonl"),
        (["--traffic", "FILE", "--target", "no-such-model"], "no-such-model"),
    ],
)
def test_what_cannot_be_is_one_line(
    arguments: list[str], complaint: str, traffic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(traffic) if argument == "FILE" else argument for argument in arguments]
    assert main(["distill", *given, "--out", str(tmp_path / "out")]) == 2
    assert complaint in capsys.readouterr().err


def test_answers_are_one_to_a_prompt(distilled: Path) -> None:
    answers: list[Answer] = read_answers(distilled / "answers.jsonl")
    assert {one.temperature for one in answers} == {0.0, 0.7, 1.0}
    assert len({one.prompt_token_ids for one in answers}) == len(answers)


def test_answers_are_kept_for_the_owner_and_used_again_for_the_same_alone(distilled: Path) -> None:
    file = distilled / "answers.jsonl"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    head = json.loads(file.read_text(encoding="utf-8").splitlines()[0])
    assert read_answers(file, head) == read_answers(file)
    assert read_answers(file, head | {"max_tokens": 33}) == []
