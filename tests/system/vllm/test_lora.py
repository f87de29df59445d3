"""Tests of LoRA adapters on vLLM targets: answers depend neither on drafts nor on other requests in the batch."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch

from cluster.config.workers import TargetConfig
from cluster.engine.runner import ModelRunner
from services import cli
from services.launch.local import free_ports
from tests.lora import BASE, merge, write_adapter
from tests.soak import length, only_in_soak
from tests.system.client import Case, complete_all
from tests.system.near_ties import NearTieJudge
from tests.system.shaped_cases import Body, answer, assert_alike, one_of_each_constraint, shaped_bodies
from tests.system.vllm.conftest import SETTINGS
from tests.system.vllm.programs import Programs, two_targets
from tests.system.vllm.test_exactness import answers_through, children_of, drafted, is_running, num_moved
from tests.waiting import eventually

MODELS = (BASE, "first/lora", "second")
MAX_NEAR_TIES = 1
pytestmark = only_in_soak  # two more targets of vLLM; tests/cluster/vllm/target has the parts
LONG: Body = {"prompt": "class Reader:\n", "ignore_eos": True, "temperature": 0}
FEW, MANY = length((20, 200), (60, 600))  # tokens; one takes some 45 ms


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that targets may load adapters from."""
    folder = tmp_path_factory.mktemp("adapters")
    write_adapter(folder / "one", 1)
    write_adapter(folder / "two", 2, rank=4)
    write_adapter(folder / "later" / "three", 3, rank=16)
    return folder


@pytest.fixture(scope="module")
def admin_address() -> str:
    (port,) = free_ports(1)
    return f"127.0.0.1:{port}"


@pytest.fixture(scope="module")
def programs(
    tmp_path_factory: pytest.TempPathFactory, random_draft: Path, folder: Path, admin_address: str
) -> Iterator[Programs]:
    settings = SETTINGS | {
        # Fewer in a step than there are: some wait for others.
        "target.engine_args": "{enforce_eager: true, max_loras: 2, max_cpu_loras: 6}",
        "target.lora": f'{{"first/lora": {folder / "one"}, second: {folder / "two"}}}',
        "target.lora_root": folder,
        "router.admin_listen": admin_address,
    }
    with two_targets(tmp_path_factory.mktemp("lora"), random_draft, **settings) as programs:
        yield programs


@pytest.fixture(scope="module")
def client(programs: Programs) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=programs.url, timeout=300) as client:
        yield client


@pytest.fixture
def admin(admin_address: str, client: httpx.Client) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{admin_address}", timeout=300) as admin:
        yield admin
        for adapter in admin.get("/admin/adapters").json()["adapters"]:
            if adapter["name"] not in MODELS:
                admin.delete(f"/admin/adapters/{adapter['name']}")


@pytest.fixture(scope="module")
def lora_cases(cases: list[Case]) -> list[Case]:
    return [
        Case(case.prompt, case.seed, case.max_tokens, {**case.fields, "model": MODELS[number % len(MODELS)]})
        for number, case in enumerate(cases)
    ]


@pytest.fixture(scope="module")
def alone(programs: Programs, lora_cases: list[Case]) -> list[list[int]]:
    """Without speculation, one after the other."""
    programs.use()
    return complete_all(programs.url, lora_cases, concurrency=1, num_speculative_tokens=0)


def of_model(model: str, cases: list[Case]) -> list[int]:
    return [number for number, case in enumerate(cases) if case.fields["model"] == model]


@pytest.fixture(scope="module")
def runners(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelRunner]:
    """Our own engine with each adapter merged into the model."""
    torch.set_num_threads(1)
    merged = tmp_path_factory.mktemp("merged")
    models = {
        BASE: BASE,
        "first/lora": str(merge(folder / "one", merged / "one")),
        "second": str(merge(folder / "two", merged / "two")),
    }
    return {
        name: ModelRunner.from_config(TargetConfig(model=model, dtype="float32", device="cpu"))
        for name, model in models.items()
    }


def assert_same(cases: list[Case], answers: list[list[int]], expected: list[list[int]], runners) -> None:
    different = [number for number, answer in enumerate(answers) if answer != expected[number]]
    for number in different:
        fields = dict(cases[number].fields)
        judge = NearTieJudge(runners[fields.pop("model")])
        case = Case(cases[number].prompt, cases[number].seed, cases[number].max_tokens, fields)
        assert judge.is_near_tie(case, expected[number], answers[number]), (
            cases[number],
            expected[number],
            answers[number],
        )
    assert len(different) <= MAX_NEAR_TIES


def test_adapters_are_models(client: httpx.Client) -> None:
    models = {model["id"]: model for model in client.get("/v1/models").json()["data"]}
    assert models.keys() == set(MODELS)
    assert [models[name]["parent"] for name in MODELS] == [None, BASE, BASE]
    assert client.get("/v1/models/first/lora").json()["id"] == "first/lora"
    assert client.post("/v1/completions", json={"prompt": "x", "model": "second"}).json()["model"] == "second"


def test_each_adapter_answers_in_its_own_way(client: httpx.Client, alone: list[list[int]], lora_cases) -> None:
    prompts = [list(case.prompt) for case in lora_cases[:5]]
    answers = {
        model: [
            choice["token_ids"]
            for choice in answer(
                client,
                {"prompt": prompts, "model": model, "temperature": 0, "max_tokens": 20, "return_token_ids": True},
            )
        ]
        for model in MODELS
    }
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert sum(a != b for a, b in zip(answers[MODELS[one]], answers[MODELS[other]], strict=True)) >= 3


@pytest.mark.parametrize("draft", ["right", "random"])
def test_speculation_and_company_change_nothing(
    programs: Programs, lora_cases: list[Case], alone: list[list[int]], runners, draft: str
) -> None:
    """Base and adapters in one batch, with drafts, against each alone without any."""
    programs.use(draft)
    num_drafted, num_accepted = drafted(programs)
    assert_same(lora_cases, complete_all(programs.url, lora_cases, num_speculative_tokens=4), alone, runners)
    num_drafted, num_accepted = (
        new - old for new, old in zip(drafted(programs), (num_drafted, num_accepted), strict=True)
    )
    assert num_drafted > 100
    if draft == "right":
        assert num_accepted > num_drafted / 20


def test_what_the_merged_model_answers(lora_cases: list[Case], alone: list[list[int]], runners) -> None:
    """Compares with our own engine, token for token: the choice at each position, from the prefix alone."""
    num_near_ties = 0
    for number, case in enumerate(lora_cases):
        fields = dict(case.fields)
        judge = NearTieJudge(runners[fields.pop("model")])
        plain = Case(case.prompt, case.seed, case.max_tokens, fields)
        for position, token in enumerate(alone[number][:16]):
            best = judge.choice(plain, alone[number][:position])
            if best != token:
                num_near_ties += 1
                assert judge.is_near_tie(plain, alone[number], [*alone[number][:position], best]), (case, position)
    assert num_near_ties <= 2


def test_constraints_and_logprobs(programs: Programs, client: httpx.Client) -> None:
    programs.use("right")
    shaped = length(one_of_each_constraint(), dict(shaped_bodies()))
    bodies = [body | {"model": MODELS[number % 3]} for number, body in enumerate(shaped.values())]
    plain = [answer(client, body | {"num_speculative_tokens": 0}) for body in bodies]
    with ThreadPoolExecutor(6) as threads:
        drafted = list(threads.map(lambda body: answer(client, body | {"num_speculative_tokens": 4}), bodies))
    for one, other in zip(plain, drafted, strict=True):
        assert_alike(one, other)


def test_a_prefix_is_not_shared_between_adapters(client: httpx.Client) -> None:
    """The same long prompt again and again: KV of one model would give the others' answers away."""
    body = {"prompt": list(range(100, 400)), "max_tokens": 20, "temperature": 0, "return_token_ids": True}
    first = {model: answer(client, body | {"model": model, "cache_salt": model}) for model in MODELS}
    for _ in range(2):
        for model in MODELS:
            assert_alike(answer(client, body | {"model": model}), first[model])
    assert len({tuple(answer[0]["token_ids"]) for answer in first.values()}) == 3


def test_hot_loading(
    programs: Programs,
    client: httpx.Client,
    admin: httpx.Client,
    admin_address: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    body = LONG | {"model": "third", "max_tokens": FEW, "return_token_ids": True}
    assert client.post("/v1/completions", json=body).status_code == 404
    assert cli.main(["adapter", "load", "third", "later/three", "--admin", admin_address]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert cli.main(["adapter", "list", "--admin", admin_address]) == 0
    assert "third" in capsys.readouterr().out
    plain = answer(client, body | {"num_speculative_tokens": 0})
    # All three run at once, and vLLM takes two adapters in a step.
    bodies = [body | {"model": model} for _ in range(length(2, 4)) for model in ("third", *MODELS)]
    with ThreadPoolExecutor(len(bodies)) as threads:
        answers = list(threads.map(lambda body: answer(client, body), bodies))
    for one in answers[::4]:
        assert_alike(one, plain)

    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(answer, client, body | {"max_tokens": MANY})
        assert eventually(lambda: sum(target["running"] for target in programs.health()["targets"]) > 0)
        assert cli.main(["adapter", "unload", "third", "--admin", admin_address]) == 0
        assert client.post("/v1/completions", json=body).status_code == 404
        (choice,) = running.result()
    assert len(choice["token_ids"]) == MANY  # it ended as it began
    assert choice["token_ids"][:FEW] == plain[0]["token_ids"]
    assert cli.main(["adapter", "unload", "third", "--admin", admin_address]) == 2
    programs.assert_nothing_in_use()


def test_another_takes_the_name(folder: Path, client: httpx.Client, admin: httpx.Client) -> None:
    """With its own contents: nothing that was kept of the one before, such as KV, is used."""
    body = {"prompt": list(range(100, 300)), "max_tokens": 20, "temperature": 0, "return_token_ids": True, "model": "x"}
    shutil.copytree(folder / "one", folder / "x")
    assert admin.post("/admin/adapters", json={"name": "x", "path": "x"}).status_code == 200
    shutil.rmtree(folder / "x")  # the targets have a copy
    assert_alike(answer(client, body), answer(client, body | {"model": "first/lora"}))
    shutil.copytree(folder / "two", folder / "x")
    refused = admin.post("/admin/adapters", json={"name": "x", "path": "x"})
    assert refused.status_code == 400
    assert "other contents" in refused.json()["error"]["message"]
    done = admin.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "x", "load_inplace": True})
    assert done.status_code == 200, done.text
    assert_alike(answer(client, body), answer(client, body | {"model": "second"}))
    assert admin.post("/v1/unload_lora_adapter", json={"lora_name": "x"}).status_code == 200


def test_what_is_refused_changes_nothing(
    folder: Path, client: httpx.Client, admin: httpx.Client, tmp_path: Path
) -> None:
    bad = folder / "bad"
    write_adapter(bad / "other model", 1, hidden_size=256)
    write_adapter(bad / "high rank", 1, rank=64)
    write_adapter(bad / "unknown module", 1, modules=("self_attn.q_proj", "mlp.other_proj"))
    write_adapter(bad / "dora", 1, use_dora=True)
    write_adapter(bad / "cut off", 1)
    with (bad / "cut off" / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(50_000)
    write_adapter(bad / "no configuration", 1)
    (bad / "no configuration" / "adapter_config.json").write_text("{}")
    write_adapter(tmp_path / "outside", 1)
    (bad / "link").symlink_to(tmp_path / "outside")
    before = admin.get("/admin/adapters").json()
    for path, reason in (
        ("bad/other model", "another model"),
        ("bad/high rank", "max_lora_rank"),
        ("bad/unknown module", "other_proj"),
        ("bad/dora", "DoRA"),
        ("bad/cut off", "cut off"),
        ("bad/no configuration", "no configuration"),
        ("bad/link", "lora_root"),
        ("bad/nowhere", "lora_root"),
        (str(tmp_path / "outside"), "lora_root"),
        ("../..", "lora_root"),
        ("", "path"),
    ):
        response = admin.post("/admin/adapters", json={"name": "bad", "path": path})
        assert response.status_code == 400, (path, response.text)
        assert reason in response.json()["error"]["message"], response.text
    for name in ("", "a b", "x" * 200, "../x", BASE):
        assert admin.post("/admin/adapters", json={"name": name, "path": "one"}).status_code == 400, name
    assert admin.get("/admin/adapters").json() == before
    assert client.post("/v1/completions", json={"prompt": "x", "model": "bad"}).status_code == 404
    assert client.post("/v1/completions", json={"prompt": "x", "model": "second", "max_tokens": 3}).status_code == 200


def test_there_is_room_for_some(folder: Path, client: httpx.Client, admin: httpx.Client) -> None:
    """The limit is what vLLM keeps in memory: one adapter more would be read from disk again whenever it is used."""
    for number in range(4):
        done = admin.post("/admin/adapters", json={"name": f"more-{number}", "path": "later/three"})
        assert done.status_code == 200, done.text
    refused = admin.post("/admin/adapters", json={"name": "too-many", "path": "one"})
    assert refused.status_code == 400
    assert "max_cpu_loras" in refused.json()["error"]["message"]
    started_at = time.monotonic()
    bodies = [LONG | {"max_tokens": 20, "model": f"more-{number % 4}", "return_token_ids": True} for number in range(8)]
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda body: answer(client, body), bodies))
    assert len({tuple(choice["token_ids"]) for (choice,) in answers}) == 1
    assert time.monotonic() - started_at < 60


def test_a_request_moves_to_a_target_with_its_adapter(
    programs: Programs, lora_cases: list[Case], alone: list[list[int]], runners
) -> None:
    """Must be the last test: it removes a target, except in a soak run."""
    programs.use("right")
    victim = programs.targets["first"].pid
    processes = [victim, *children_of(victim)]
    before = num_moved(programs)
    lose = length(programs.remove_target, programs.restart)
    answers = answers_through(programs, lora_cases, lambda: lose("first"))
    assert num_moved(programs) > before
    assert_same(lora_cases, answers, alone, runners)
    assert eventually(lambda: not any(is_running(pid) for pid in processes)), "processes of the engine are left"
    programs.wait_ready()
    programs.assert_nothing_in_use()
