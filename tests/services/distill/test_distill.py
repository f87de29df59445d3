"""The whole command on the bundled pair, with few prompts."""

from __future__ import annotations

import argparse
import json
import shutil
import stat
import statistics
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from cluster.config.file import load_config
from cluster.config.workers import TargetConfig
from cluster.drafters.base import DraftSequence
from cluster.engine.cpu_kernels import has_kernels
from cluster.engine.model_config import ModelConfig
from cluster.errors import ConfigurationError, InvalidRequestError
from cluster.factories.drafters import make_drafter
from cluster.model_folder import resolve_model_folder
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.targets.base import GenerationRequest
from cluster.tokenization import Tokenizer
from services.cli import main
from services.distill.answers import ask
from services.distill.drafter_training import TrainingTask, make_training
from services.training.eagle import load_head
from services.training.parallel import mask_rows, parallel_states
from services.training.recipe import Recipe
from services.training.teaching import NUM_LIKELIEST, Lesson, teach
from services.training.traffic import AnswersFile, RecordedAnswer, is_held_out, read_answers, read_prompts
from services.training.traffic_acceptance import NUM_POSITIONS, TrafficAcceptance, choices, measure_traffic_acceptance
from services.training.traffic_draft import DraftShape, answer_logits, load_draft, new_draft, train_draft
from tests.cluster.targets.test_heads import Answers, new_target
from tests.services.distill.sql_prompts import prompts
from tests.soak import length, only_in_soak

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
    answers = read_answers(distilled / "answers.jsonl")
    return teach(TargetConfig(model=TARGET, dtype="float32"), answers, 0, lambda: None)


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
    card = (distilled / "README.md").read_text(encoding="utf-8")
    for old, new in zip(report["before"], report["after"], strict=True):
        assert f"| {old['temperature']:g} | {old['rate']:.3f} | {new['rate']:.3f} |" in card
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


def test_drawn_tokens_stand_for_all_the_others(distilled: Path) -> None:
    """The cross entropy with the label is that with the whole distribution: the means over all places are within four
    standard errors, which is wrong once in 16,000 times, and the draws are of one seed."""
    target, draft = (load_draft(resolve_model_folder(model)) for model in (TARGET, DRAFT))
    differences: list[float] = []
    for lesson in lessons_of(distilled):
        with torch.no_grad():
            whole = answer_logits(target, [lesson]).softmax(dim=-1)
            own = answer_logits(draft, [lesson]).log_softmax(dim=-1)
        likeliest, drawn = (torch.from_numpy(ids).long() for ids in (lesson.likeliest, lesson.drawn))
        rest = 1 - torch.from_numpy(lesson.probabilities).sum(dim=-1)
        assert not (drawn[:, :, None] == likeliest[:, None, :])[rest > 1e-3].any()
        estimate = (whole.gather(1, likeliest) * own.gather(1, likeliest)).sum(dim=-1)
        estimate += rest * own.gather(1, drawn).mean(dim=-1)
        differences += (estimate - (whole * own).sum(dim=-1)).tolist()
    error = statistics.stdev(differences) / len(differences) ** 0.5
    assert abs(statistics.fmean(differences)) < 4 * error
    assert error < 0.01


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


@pytest.fixture(scope="module")
def parallel(traffic: Path, distilled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled draft, taught on the same answers to draft all tokens of a proposal in one step."""
    out = tmp_path_factory.mktemp("parallel")
    shutil.copy(distilled / "answers.jsonl", out)
    arguments = ["--traffic", str(traffic), "--target", TARGET, "--draft", DRAFT, "--out", str(out), *SETTINGS]
    arguments += [
        "--max-tokens",
        "32",
        "--epochs",
        "12",
        "--batch-size",
        "8",
        "--learning-rate",
        "1e-3",
        "--drafter",
        "parallel",
    ]
    assert main(["distill", *arguments]) == 0
    return out


@only_in_soak
def test_a_parallel_draft_learns_to_draft_from_masks(parallel: Path, distilled: Path) -> None:
    taught = [one for one in lessons_of(distilled) if not is_held_out(one.answer.prompt_token_ids, 10)]
    draft, before = load_draft(parallel), load_draft(resolve_model_folder(DRAFT))
    before.config.pard_token = draft.config.pard_token
    (old, new) = (measure_traffic_acceptance(model, taught, is_parallel=True)[0] for model in (before, draft))
    assert len(new.by_position) == NUM_POSITIONS
    assert new.by_position[1] > old.by_position[1] + 0.1
    report = json.loads((parallel / "report.json").read_text(encoding="utf-8"))
    assert all(len(one["by_position"]) == NUM_POSITIONS for one in report["after"])
    assert "draft.drafter: parallel" in (parallel / "README.md").read_text(encoding="utf-8")


@only_in_soak
def test_the_engine_drafts_from_masks_as_it_was_taught(parallel: Path, distilled: Path) -> None:
    """The drafts after some places of an answer are the choices of the model that was trained, in float32."""
    config = load_config(
        None, [f"draft.model={parallel}", "draft.drafter=parallel", "draft.dtype=float32", f"target.model={TARGET}"]
    )
    drafter, model = make_drafter(config), load_draft(parallel)
    lesson = next(one for one in lessons_of(distilled) if one.answer.temperature == 1.0)
    answer, masks = lesson.answer, mask_rows(len(lesson.answer.token_ids), 4)
    with torch.no_grad():
        (states,) = parallel_states(model, [lesson], [masks], model.config.pard_token)
        labels = [*range(len(answer.token_ids)), *masks.labels]
        chosen = choices(model.lm_head(states), answer, labels).tolist()
    places = [*((place, 0) for place in range(len(answer.token_ids))), *zip(masks.places, masks.offsets, strict=True)]
    expected = dict(zip(places, chosen, strict=True))
    for place in (0, 7, 20):
        tokens = [*answer.prompt_token_ids, *answer.token_ids[:place]]
        key, params = NoiseKey.derive(answer.seed, 0), SamplingParams(temperature=1.0)
        sequence = DraftSequence(tokens, len(answer.prompt_token_ids), params, key, 4, window=4)
        assert drafter.admit(sequence)
        while not sequence.draft_token_ids:  # the prompt is computed in parts where steps are slow
            drafter.draft([sequence])
        assert sequence.draft_token_ids == [expected[place, offset] for offset in range(4)]
        drafter.release(sequence)


@dataclass(frozen=True)
class Heads:
    """New heads after a few training steps, and their acceptance on the training answers before and after."""

    drafter: str
    folder: Path
    answers: list[RecordedAnswer]
    before: list[TrafficAcceptance]
    after: list[TrafficAcceptance]


@pytest.fixture(scope="module", params=length(["eagle"], ["eagle", "medusa"]))
def heads(request: pytest.FixtureRequest, distilled: Path, tmp_path_factory: pytest.TempPathFactory) -> Heads:
    folder = tmp_path_factory.mktemp(request.param)
    # In the order of their prompts: the order in which they arrived would train other heads in each run.
    answers = sorted(read_answers(distilled / "answers.jsonl"), key=lambda answer: answer.seed)[:12]
    arguments = argparse.Namespace(drafter=request.param, intermediate_size=128, seed=0)
    target = TargetConfig(model=TARGET, dtype="float32")
    task = TrainingTask(arguments, target, resolve_model_folder(TARGET), None, answers, answers)
    training = make_training(task, lambda: None)
    before = training.measure(lambda: None)
    training.train(Recipe(12, 6, 32, 3e-3, seed=1), lambda loss: None)
    training.save(folder)
    return Heads(request.param, folder, answers, before, training.measure(lambda: None))


def test_heads_are_accepted_more_often_after_training(heads: Heads) -> None:
    assert sum(one.rate for one in heads.after) > sum(one.rate for one in heads.before) + 0.1
    assert all(len(one.by_position) == NUM_POSITIONS for one in heads.after)


@pytest.mark.skipif(not has_kernels(), reason="PyTorch's operators do not give the same bits at every k")
def test_served_heads_have_the_measured_acceptance(heads: Heads) -> None:
    """With one draft, the tokens equal those without drafts, and the acceptance rate equals the measured one."""
    target = new_target({"draft": {"drafter": heads.drafter, "model": str(heads.folder)}})

    def requests(k: int) -> list[GenerationRequest]:
        return [
            GenerationRequest(
                str(one.seed),
                list(one.prompt_token_ids),
                len(one.prompt_token_ids),
                SamplingParams(temperature=one.temperature),
                NoiseKey.derive(one.seed, 0),
                len(one.token_ids),
                ignore_eos=True,
                num_speculative_tokens=k,
            )
            for one in heads.answers
        ]

    plain, drafted = Answers(target, requests(0)), Answers(target, requests(1))
    assert plain.token_ids == drafted.token_ids
    num_matches = sum(one.rate * one.num_tokens for one in heads.after)
    num_places = sum(one.num_tokens for one in heads.after)
    assert drafted.num_accepted / drafted.num_drafts == pytest.approx(num_matches / num_places, abs=0.1)


def test_the_command_continues_the_training_of_saved_heads(
    heads: Heads, traffic: Path, distilled: Path, tmp_path: Path
) -> None:
    shutil.copy(distilled / "answers.jsonl", tmp_path)
    arguments = ["--traffic", str(traffic), "--target", TARGET, "--drafter", heads.drafter, *SETTINGS]
    arguments += ["--draft", str(heads.folder), "--out", str(tmp_path), "--max-tokens", "32", "--epochs", "0.2"]
    assert main(["distill", *arguments]) == 0
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert sum(one["rate"] for one in report["before"]) > 0.1
    assert f"draft.drafter: {heads.drafter}" in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_an_eagle_head_in_another_form_is_refused(
    traffic: Path, distilled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(distilled / "answers.jsonl", tmp_path)
    arguments = ["--traffic", str(traffic), "--target", TARGET, "--drafter", "eagle", "--draft", "outrider-eagle-12m"]
    assert main(["distill", *arguments, *SETTINGS, "--out", str(tmp_path), "--max-tokens", "32"]) == 2
    assert "only EAGLE-3 heads in SafeAILab's form can be trained" in capsys.readouterr().err


@pytest.mark.parametrize("heads", ["eagle"], indirect=True)
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"norm_output": True}, "norm_output"),
        ({"hidden_size": 192}, "the target's 384"),
    ],
)
def test_an_eagle_head_that_training_would_change_is_refused(
    heads: Heads, tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    folder = tmp_path / "head"
    shutil.copytree(heads.folder, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
    with pytest.raises(ConfigurationError, match=said):
        load_head(folder, ModelConfig.from_folder(resolve_model_folder(TARGET)))


def test_a_head_is_no_draft_to_start_from(heads: Heads) -> None:
    with pytest.raises(ConfigurationError, match="needs LlamaForCausalLM"):
        load_draft(heads.folder)


def test_the_target_is_not_overwritten(tmp_path: Path, traffic: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "target"
    shutil.copytree(resolve_model_folder(TARGET), target)
    arguments = ["--traffic", str(traffic), "--target", str(target), "--out", str(target), *SETTINGS]
    assert main(["distill", *arguments]) == 2
    assert "would be overwritten" in capsys.readouterr().err


def test_prompts_are_read_from_tokens_texts_and_conversations(tmp_path: Path) -> None:
    file = tmp_path / "traffic.jsonl"
    entries = [{"prompt_token_ids": [5, 6]}, {"prompt": "ab"}, {"messages": ["x"]}, {"prompt": "ab"}]
    file.write_text("\n".join(map(json.dumps, entries)), encoding="utf-8")
    assert read_prompts(file, lambda text: [len(text)], lambda messages: [9] * len(messages)) == [(5, 6), (2,), (9,)]
    file.write_text('{"prompt_token_ids": [5]}\n{"question": 1}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="line 2"):
        read_prompts(file, lambda text: [1], lambda messages: [1])
    file.write_text('{"prompt_token_ids": [5]}\n{"prompt_token_ids": [6', encoding="utf-8")  # cut off
    assert read_prompts(file, lambda text: [1], lambda messages: [1]) == [(5,)]
    file.write_text('{"messages": ["x"]}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="line 1: this model has no chat template"):
        read_prompts(file, lambda text: [1], without_template)


def without_template(messages: object) -> list[int]:
    raise InvalidRequestError("this model has no chat template")


def test_prompts_that_are_too_few_or_too_long_are_told_before_any_is_asked(
    traffic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--target", TARGET, "--out", str(tmp_path / "draft")]
    assert main(["distill", "--traffic", str(traffic), *out, "--max-tokens", "100000"]) == 2
    said = capsys.readouterr().err
    assert "40 of 40 prompts are left out, which have no room for an answer of --max-tokens 100000" in said
    assert "0 prompts are too few" in said


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--traffic", "none.jsonl", "--target", TARGET], "none.jsonl"),
        (["--traffic", "FILE", "--target", "no-such-model"], "no-such-model"),
        (["--traffic", "FILE", "--target", TARGET, "--load", "--drafter", "eagle"], "a target loads its eagle head"),
        (["--traffic", "FILE", "--target", TARGET, "--load", "--url", "http://127.0.0.1:9"], "127.0.0.1:9"),
    ],
)
def test_what_cannot_be_is_one_line(
    arguments: list[str], complaint: str, traffic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(traffic) if argument == "FILE" else argument for argument in arguments]
    assert main(["distill", *given, "--out", str(tmp_path / "out")]) == 2
    assert complaint in capsys.readouterr().err


def test_answers_are_one_to_a_prompt(distilled: Path) -> None:
    answers: list[RecordedAnswer] = read_answers(distilled / "answers.jsonl")
    assert {one.temperature for one in answers} == {0.0, 0.7, 1.0}
    assert len({one.prompt_token_ids for one in answers}) == len(answers)


def test_answers_are_kept_for_the_owner_and_used_again_for_the_same_alone(distilled: Path) -> None:
    file = distilled / "answers.jsonl"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    head = json.loads(file.read_text(encoding="utf-8").splitlines()[0])
    assert read_answers(file, head) == read_answers(file)
    assert read_answers(file, head | {"max_tokens": 33}) == []


def test_answers_of_a_run_that_failed_are_there_for_the_next(tmp_path: Path) -> None:
    file, asked = tmp_path / "answers.jsonl", {"target": "a", "max_tokens": 3}
    first, second = (RecordedAnswer((seed, 8), (7,), 0.7, seed) for seed in (4, 2))
    AnswersFile(file, asked).add(first)
    with file.open("a", encoding="utf-8") as cut_off:
        cut_off.write('{"prompt_token_ids": [1, ')
    again = AnswersFile(file, asked)
    assert again.answers == [first]
    again.add(second)
    assert read_answers(file) == [first, second]
    assert AnswersFile(file, asked | {"max_tokens": 4}).answers == []
    assert read_answers(file) == []


@pytest.mark.parametrize(
    "line", ["", "1", "[]", "{", '{"prompt_token_ids": [5]}', '{"prompt_token_ids": 5, "token_ids": [], "seed": 0}']
)
def test_a_line_of_answers_that_was_changed_is_named(line: str, tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    AnswersFile(file, {}).add(RecordedAnswer((8,), (7,), 0.7, 0))
    with file.open("a", encoding="utf-8") as changed:
        changed.write(f"{line}\n")
    with pytest.raises(ValueError, match=r"answers\.jsonl, line 3: it is not an answer .* delete the line"):
        AnswersFile(file, {})


def test_an_answer_that_fails_ends_the_asking_and_keeps_the_others(tmp_path: Path) -> None:
    """The last prompt is longer than the target takes."""
    config = load_config(None, ["router.port=0", f"target.model={TARGET}", "speculation.num_speculative_tokens=0"])
    prompts = {3: (5, 6), 4: (5,), 9: (5,) * 3000}
    file = AnswersFile(tmp_path / "answers.jsonl", {})
    answers = ask(config, prompts, max_tokens=2, num_streams=1)
    file.add(next(answers))
    file.add(next(answers))
    with pytest.raises(ConfigurationError, match="400"):
        next(answers)
    assert [answer.seed for answer in read_answers(tmp_path / "answers.jsonl")] == [3, 4]
