"""LoRA adapters as models: which targets a request may go to, what operators ask of them, and what clients see."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import pytest
import uvicorn

from cluster.config import Config
from cluster.errors import ConfigurationError
from services import cli
from services.router.app import create_app
from services.router.metrics import RouterMetrics
from services.router.operators.adapters import AdapterCalls
from services.router.operators.admin import create_admin_app
from services.router.operators.switch import SpeculationSwitch
from services.router.targets.replicas import ReplicaPool
from tests.services.router.test_completions import metric
from tests.services.router.test_failover import moved, settle
from tests.waiting import WAIT_S, wait_until

ONE, OTHER = "1" * 64, "2" * 64


@pytest.fixture
def pair(new_target, new_router):
    """Two targets. The first has less load; only the second has the adapter `b`."""
    first, second = new_target(), new_target()
    first.description.load.num_running = first.description.load.num_waiting = 0
    second.description.adapters["b"] = ONE
    router = new_router([first.address, second.address], max_pause_seconds=1)
    return first, second, router


def ask(router, model: str | None, **more) -> httpx.Response:
    fields = {"prompt": [70, 71], "max_tokens": 6, **more}
    return router.complete(**fields) if model is None else router.complete(model=model, **fields)


def listed(router) -> list[str]:
    return [model["id"] for model in router.client.get("/v1/models").json()["data"]]


def test_an_adapter_is_a_model(pair):
    *_, router = pair
    (base, adapter) = router.client.get("/v1/models").json()["data"]
    assert (base["id"], base["parent"]) == (router.model, None)
    assert (adapter["id"], adapter["root"], adapter["parent"]) == ("b", "b", router.model)
    assert router.client.get("/v1/models/b").json() == adapter
    assert router.client.get("/v1/models/c").status_code == 404
    assert router.client.get("/health").json()["targets"][1]["adapters"] == ["b"]


def test_requests_go_where_their_adapter_is(pair):
    first, second, router = pair
    for _ in range(3):
        assert ask(router, "b").json()["model"] == "b"
        assert ask(router, None).json()["model"] == router.model
        assert ask(router, router.model).status_code == 200
    assert [(request.adapter, request.adapter_fingerprint) for request in second.requests] == [("b", ONE)] * 3
    assert {request.adapter for request in first.requests} == {""}
    assert len(first.requests) == 6
    assert metric(router, "outrider_requests_by_adapter_total") == 3
    chat = router.chat(model="b", messages=[{"role": "user", "content": "x"}], max_tokens=3)
    assert chat.json()["model"] == "b"
    assert second.requests[-1].adapter == "b"
    assert router.client.post("/tokenize", json={"model": "b", "prompt": "x"}).status_code == 200


def test_nobody_has_it(pair):
    *_, router = pair
    error = ask(router, "c").json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_who_has_it_is_away(background, pair):
    """Which is not the same as that there is no such model: it may come back."""
    _, second, router = pair
    background.run(second.stop())
    wait_until(lambda: router.client.get("/health").json()["targets"][1]["status"] == "down")
    response = ask(router, "b")
    assert response.status_code == 503
    assert "retry-after" in response.headers
    assert ask(router, None).status_code == 200
    assert ask(router, "c").status_code == 404
    assert listed(router) == [router.model]


def test_a_request_is_moved_to_the_same_adapter_only(background, new_target, new_router):
    first, second, third = targets = [new_target() for _ in range(3)]
    for target, fingerprint in zip(targets, (ONE, OTHER, ONE), strict=True):
        target.description.adapters["a"] = fingerprint
    first.description.load.num_running = first.description.load.num_waiting = 0
    third.description.load.num_running = 50
    first.hang_after = 3
    router = new_router([target.address for target in targets])
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(ask, router, "a", return_token_ids=True)
        wait_until(lambda: first.requests)
        settle(background)
        background.run(first.stop())
        assert asked.result().json()["choices"][0]["token_ids"] == [70, 71, 70, 71, 70, 71]
    (request,) = third.requests
    assert (request.adapter, request.adapter_fingerprint, request.num_generated_tokens) == ("a", ONE, 3)
    assert not second.requests


def test_the_contents_that_most_targets_have_are_used(new_target, new_router):
    targets = [new_target() for _ in range(3)]
    for target, fingerprint in zip(targets, (OTHER, ONE, ONE), strict=True):
        target.description.adapters["a"] = fingerprint
    targets[0].description.load.num_running = targets[0].description.load.num_waiting = 0
    router = new_router([target.address for target in targets])
    assert all(ask(router, "a").status_code == 200 for _ in range(4))
    assert not targets[0].requests


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_it_was_unloaded_meanwhile(pair, is_elsewhere):
    """The router hears of it from the target's refusal, before it has asked it again."""
    first, second, router = pair
    if is_elsewhere:
        first.description.adapters["b"] = ONE
        first.description.load.num_running = 50
        wait_until(lambda: router.client.get("/health").json()["targets"][0]["adapters"] == ["b"])
    second.describe_delay_s = 1.0
    second.fail_after, second.failure = 0, (grpc.StatusCode.NOT_FOUND, "there is none")
    response = ask(router, "b")
    if is_elsewhere:
        assert response.status_code == 200
        assert moved(router) == {"unloaded": 1}
        assert first.requests[-1].adapter == "b"
    else:
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"


def test_a_name_is_the_models_or_an_adapters(model_folder):
    settings = {"model": str(model_folder), "addresses": ["a:1"], "engine": "vllm"}
    config = Config.model_validate({"target": settings | {"lora": {model_folder.name: "/x"}}})
    with pytest.raises(ConfigurationError, match="a name of the model"):
        create_app(config)


@pytest.fixture
def admin(background, new_target, tokenizer) -> Iterator[tuple[str, list]]:
    """The address of an admin server, and its two targets."""
    targets = [new_target(), new_target()]
    metrics = RouterMetrics("m")

    async def addresses():
        yield [target.address for target in targets]
        await asyncio.Event().wait()

    listener = socket.create_server(("127.0.0.1", 0))
    servers = []

    async def serve() -> None:
        async with ReplicaPool(addresses(), tokenizer.fingerprint()) as pool:
            app = create_admin_app(SpeculationSwitch(100, metrics), metrics, adapters=AdapterCalls(pool, "base"))
            servers.append(uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None)))
            await servers[0].serve(sockets=[listener])

    serving = background.start(serve())
    wait_until(lambda: servers and servers[0].started)
    yield f"127.0.0.1:{listener.getsockname()[1]}", targets
    servers[0].should_exit = True
    background.let_end(serving)


@contextlib.contextmanager
def calling(address: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{address}", timeout=WAIT_S) as client:
        yield client


def test_operators_load_and_unload(admin, capsys):
    address, targets = admin
    assert cli.main(["adapter", "load", "my/sql", "sql/v1", "--admin", address]) == 0
    assert capsys.readouterr().out == "".join(f"{target.address}: loaded, of sql/v1\n" for target in targets)
    assert cli.main(["adapter", "list", "--admin", address]) == 0
    assert capsys.readouterr().out == f"my/sql of sql/v1 on {targets[0].address}, {targets[1].address}\n"
    del targets[0].description.adapters["my/sql"]
    assert cli.main(["adapter", "unload", "my/sql", "--admin", address, "--reason", "a & b"]) == 1
    assert capsys.readouterr().out == (
        f"{targets[0].address}: failed: there is none\n"
        f"{targets[1].address}: unloaded; 2 running requests still use it\n"
    )
    assert cli.main(["adapter", "unload", "my/sql", "--admin", address]) == 2
    assert "there is none" in capsys.readouterr().err


def test_one_target_refuses(admin):
    address, targets = admin
    targets[1].adapter_error = "its rank is too high"
    with calling(address) as client:
        done = client.post("/admin/adapters", json={"name": "a", "path": "x"})
        assert done.status_code == 200
        assert [target.get("error") for target in done.json()["targets"]] == [None, "its rank is too high"]
        as_vllm = client.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "x", "unknown": 1})
        assert as_vllm.status_code == 503  # a script looks at the status
        targets[0].adapter_error = "there is no such folder"
        refused = client.post("/admin/adapters", json={"name": "b", "path": "x"})
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == f"target {targets[0].address}: there is no such folder"


def test_as_vllm(admin):
    address, targets = admin
    with calling(address) as client:
        done = client.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "x"})
        assert (done.status_code, done.text) == (200, "Success: LoRA adapter 'a' added successfully.")
        assert dict(targets[1].description.adapters) == {"a": "of x"}
        done = client.post("/v1/unload_lora_adapter", json={"lora_name": "a", "lora_int_id": 3})
        assert (done.status_code, done.text) == (200, "Success: LoRA adapter 'a' removed successfully.")
        assert client.post("/v1/unload_lora_adapter", json={"lora_name": "a"}).status_code == 404


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"path": "x"}, "name"),
        ({"name": "a"}, "path"),
        ({"name": "", "path": "x"}, "name"),
        ({"name": "a b", "path": "x"}, "name"),
        ({"name": "../a", "path": "x"}, "name"),
        ({"name": "a" * 129, "path": "x"}, "name"),
        ({"name": "base", "path": "x"}, "name"),
        ({"name": "a", "path": ""}, "path"),
        ({"name": "a", "path": "x", "replace": "yes"}, "replace"),
        ({"name": "a", "path": "x", "rank": 3}, "rank"),
    ],
)
def test_a_call_that_is_wrong_changes_nothing(admin, body, param):
    address, _ = admin
    with calling(address) as client:
        answer = client.post("/admin/adapters", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
        assert client.get("/admin/adapters").json() == {"adapters": []}


def test_clients_cannot(router):
    """At the address where requests are answered there are none of these calls."""
    assert router.client.get("/admin/adapters").status_code == 404
    for path in ("/admin/adapters", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert router.client.post(path, json={"lora_name": "a", "lora_path": "x"}).status_code == 404
