"""A router and scripted targets, all real servers on loopback, in one background event loop."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import json
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from cluster.config import Config
from cluster.errors import from_status
from cluster.logprobs import TokenLogprobs
from cluster.tokenization import Tokenizer
from cluster.transport.listening import Listener
from cluster.wire.replies import EPOCH_KEY, UNFINISHED, CallReply, RoundCounts, encode_replies
from cluster.wire.version import WIRE_VERSION
from protos.speculation.v1 import target_pb2, target_pb2_grpc, types_pb2
from services.router.app import create_app
from services.router.http.connections import Connections
from services.router.http.server import HttpServer
from tests.background_loop import BackgroundLoop
from tests.waiting import WAIT_S, wait_until

from .chat_model import HERMES_TEMPLATE, MARKERS, Model

EOS_TOKEN_ID = 0
MAX_MODEL_LEN = 200
MAX_SPECULATIVE_TOKENS = 8
# What the scripted target echoes is then the rendered conversation.
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('the system message has to be the first') }}
    {%- endif %}
    {{- '<' + message.role + '>' + message.content }}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}
"""


def write_tokenizer_folder(folder: Path) -> Path:
    """A chat model's folder with a byte-level BPE tokenizer that knows English a little and emoji only as bytes."""
    tokenizer = RawTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 4, trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "config.json").write_text(json.dumps({"vocab_size": tokenizer.get_vocab_size()}))
    return folder


def scores_of(token_ids: Sequence[int], width: int) -> TokenLogprobs:
    """As if each were the likeliest, and the IDs after it came next."""
    top = [token + index for token in token_ids for index in range(width)]
    values = [-1.0 - index for _ in token_ids for index in range(width)]
    return TokenLogprobs(width, [1] * len(token_ids), [-1.0] * len(token_ids), top, values)


class ScriptedTarget(target_pb2_grpc.TargetServicer):
    """Echoes the prompt's tokens, over and over until max_tokens or an end-of-sequence token; or fails as told.

    Choice j starts at the prompt's token j. A request that was moved here goes on where it was.
    """

    def __init__(self, tokenizer: Tokenizer, listener: Listener | None = None) -> None:
        self._listener = listener or Listener()
        self.description = target_pb2.TargetDescription(
            model=types_pb2.ModelDescription(
                name="scripted",
                tokenizer_fingerprint=tokenizer.fingerprint(),
                vocab_size=tokenizer.vocab_size,
                max_model_len=MAX_MODEL_LEN,
            ),
            load=types_pb2.Load(num_running=1, num_waiting=2),
            num_speculative_tokens=4,
            max_speculative_tokens=MAX_SPECULATIVE_TOKENS,
            wire_version=WIRE_VERSION,
            num_draft_links=1,
            num_draft_links_configured=2,
        )
        self.address = ""
        self.requests: list[target_pb2.GenerateRequest] = []
        self.cancelled = threading.Event()
        self.num_cancelled = 0
        self.tokens_per_reply = 1
        self.delay_s = 0.0  # before every reply
        self.hang_after: int | None = None  # replies
        self.scripts: list[list[int]] = []  # its answers in place of the echo; the last goes on
        self.fail_after: int | None = None
        self.failing_choice: int | None = None  # None: all
        self.failure: tuple[grpc.StatusCode, str] = (grpc.StatusCode.UNAVAILABLE, "going down")
        self.last_finish_reason: int | None = None
        self.describe_delay_s = 0.0
        self.epoch_of_streams: int | None = None  # None: streams do not say
        self.num_cached_tokens = 0  # of every prompt
        self.adapter_error: str | None = None  # why none is loaded
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        # By default gRPC cancels, at random, some of the calls beyond 1,000 that arrive at once.
        self._server = self._listener.new_server(
            [
                ("grpc.server.max_pending_requests", 10_000),
                ("grpc.server.max_pending_requests_hard_limit", 20_000),
            ]
        )
        target_pb2_grpc.add_TargetServicer_to_server(self, self._server)
        port = self._listener.open_port(self._server, self.address or "127.0.0.1:0")
        self.address = f"127.0.0.1:{port}"
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(grace=None)

    async def Describe(self, request, context):
        if self._server is None:  # gRPC may accept one more connection while it stops
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the target is stopping")
        description = target_pb2.TargetDescription()
        description.CopyFrom(self.description)
        await asyncio.sleep(self.describe_delay_s)
        return description

    async def Observe(self, request, context):
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "its version is an older one")

    async def LoadAdapter(self, request, context):
        if self.adapter_error is not None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, self.adapter_error)
        self.description.adapters[request.name] = f"of {request.path}"
        return target_pb2.LoadAdapterReply(fingerprint=f"of {request.path}")

    async def UnloadAdapter(self, request, context):
        if request.name not in self.description.adapters:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is none")
        del self.description.adapters[request.name]
        return target_pb2.UnloadAdapterReply(num_running=2)

    async def GenerateMany(self, request_iterator, context):
        epoch = () if self.epoch_of_streams is None else ((EPOCH_KEY, str(self.epoch_of_streams)),)
        await context.send_initial_metadata(epoch)
        messages: asyncio.Queue[target_pb2.GenerateReplies] = asyncio.Queue()
        calls: dict[int, asyncio.Task[None]] = {}

        def send(call: int, reply: CallReply) -> None:
            messages.put_nowait(encode_replies({call: reply}))

        async def obey() -> None:
            async for commands in request_iterator:
                for start in commands.start:
                    answering = self._answer(start.request, functools.partial(send, start.call))
                    calls[start.call] = asyncio.create_task(answering)
                for call in commands.cancel:
                    calls[call].cancel()

        obeying = asyncio.create_task(obey())
        try:
            while True:
                yield await messages.get()
        finally:
            for task in (obeying, *calls.values()):
                task.cancel()

    async def _answer(self, request: target_pb2.GenerateRequest, send: Callable[[CallReply], None]) -> None:
        self.requests.append(request)
        try:
            for index, reply in enumerate(self._replies(request)):
                if index == self.fail_after and self.failing_choice in (None, request.choice_index):
                    code, details = self.failure
                    send(CallReply(error=from_status(code.value[0], details, "prompt")))
                    return
                await asyncio.sleep(self.delay_s)
                if index == self.hang_after:
                    await asyncio.sleep(60)
                send(reply)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            self.cancelled.set()
            raise

    def _replies(self, request) -> Iterator[CallReply]:
        num_generated = request.num_generated_tokens
        prompt = list(request.prompt_token_ids)[: len(request.prompt_token_ids) - num_generated]
        first = request.choice_index % len(prompt)
        prompt = prompt[first:] + prompt[:first]
        answer = list(itertools.islice(itertools.cycle(prompt), request.max_tokens))
        reason = target_pb2.FINISH_REASON_LENGTH
        if self.scripts:
            script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
            answer = [*script, EOS_TOKEN_ID][: request.max_tokens]
        if EOS_TOKEN_ID in answer and not request.ignore_eos:
            answer = answer[: answer.index(EOS_TOKEN_ID) + 1]
            reason = target_pb2.FINISH_REASON_STOP
        if self.last_finish_reason is not None:
            reason = self.last_finish_reason
        step = self.tokens_per_reply
        for start in range(num_generated, len(answer), step):
            last = start + step >= len(answer)
            told = answer[start : start + step]
            yield CallReply(
                told,
                reason if last else UNFINISHED,
                rounds=[RoundCounts(num_draft_tokens=4, num_accepted_tokens=3)],
                logprobs=scores_of(told, request.num_logprobs) if request.HasField("num_logprobs") else None,
                prompt_logprobs=scores_of(request.prompt_token_ids[1:], request.num_prompt_logprobs)
                if request.HasField("num_prompt_logprobs") and start == 0
                else None,
                num_cached_tokens=self.num_cached_tokens if start == num_generated else 0,
            )


@dataclasses.dataclass
class Router:
    """A running router and a client of it."""

    url: str
    client: httpx.Client
    model: str

    def complete(self, **fields: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json=fields)

    def chat(self, **fields: Any) -> httpx.Response:
        return self.client.post("/v1/chat/completions", json=fields)

    def openai(self) -> openai.OpenAI:
        """The official client."""
        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0)

    def stream(self, **fields: Any) -> list[Any]:
        """The decoded events of a streamed answer; the last is "[DONE]" when it went well."""
        return self._events(self.complete(stream=True, **fields))

    def stream_chat(self, **fields: Any) -> list[Any]:
        return self._events(self.chat(stream=True, **fields))

    @staticmethod
    def _events(response: httpx.Response) -> list[Any]:
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        events = response.text.split("\n\n")
        assert events.pop() == ""
        payloads = [event.removeprefix("data: ") for event in events]
        return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


def usage(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0, reasoning_tokens: int = 0
) -> dict[str, Any]:
    """The usage of an answer."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


def wait_for_health(router: Router) -> None:
    """Waits until the router has a usable target.

    gRPC shares connections within a process. If a new target has the port of a stopped one, its router may first use
    the broken connection.
    """
    wait_until(lambda: router.client.get("/health").status_code == 200)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    return write_tokenizer_folder(tmp_path_factory.mktemp("models") / "tiny-model")


@pytest.fixture(scope="session")
def tokenizer(model_folder) -> Tokenizer:
    return Tokenizer(model_folder)


@pytest.fixture(scope="session")
def background() -> Iterator[BackgroundLoop]:
    loop = BackgroundLoop()
    yield loop
    loop.stop()


@pytest.fixture
def new_target(background, tokenizer) -> Iterator[Callable[[], ScriptedTarget]]:
    """Starts scripted targets that live as long as the test."""
    targets: list[ScriptedTarget] = []

    def start() -> ScriptedTarget:
        target = ScriptedTarget(tokenizer)
        background.run(target.start())
        targets.append(target)
        return target

    yield start
    for target in targets:
        background.run(target.stop())


@contextlib.contextmanager
def running_router(
    background, model_folder, addresses, tls=None, server_name=None, **settings: Any
) -> Iterator[Router]:
    target = {"model": str(model_folder), "addresses": addresses, "tls_server_name": server_name}
    config = Config.model_validate({"target": target, "router": settings, "tls": tls or {}})
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    app = create_app(config)
    connections = Connections(config.router, app.state.metrics)
    server = HttpServer(app, connections, lifespan="on", timeout_graceful_shutdown=1)
    serving = background.start(server.serve(sockets=[listener]))
    wait_until(lambda: server.started or serving.done())
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    # verify=False: reading the certificates, which nothing here needs, takes longer than most tests.
    with httpx.Client(base_url=url, timeout=WAIT_S, verify=False) as client:
        yield Router(url, client, model_folder.name)
    server.should_exit = True
    background.let_end(serving)


@pytest.fixture
def new_router(background, model_folder) -> Iterator[Callable[..., Router]]:
    """Starts routers that live as long as the test: new_router([address, ...], [model_folder], **router_settings)."""
    with contextlib.ExitStack() as stack:
        yield lambda addresses, folder=model_folder, **settings: stack.enter_context(
            running_router(background, folder, addresses, **settings)
        )


@pytest.fixture
def target(new_target) -> ScriptedTarget:
    return new_target()


@pytest.fixture
def router(new_router, target) -> Router:
    router: Router = new_router([target.address])
    wait_for_health(router)
    return router


@pytest.fixture(scope="session")
def shared_router(background, model_folder, tokenizer) -> Iterator[Router]:
    """One router for tests that leave no trace in it."""
    target = ScriptedTarget(tokenizer)
    background.run(target.start())
    with running_router(background, model_folder, [target.address], max_body_bytes=20_000) as router:
        wait_for_health(router)
        yield router
    background.run(target.stop())


@pytest.fixture(scope="session")
def chat_folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "chat-model"
    shutil.copytree(model_folder, folder)
    raw = RawTokenizer.from_file(str(folder / "tokenizer.json"))
    raw.add_special_tokens(MARKERS)
    raw.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def new_model(background: BackgroundLoop, chat_folder: Path, tmp_path: Path) -> Iterator[Callable[..., Model]]:
    started: list[Any] = []

    def start(template: str = HERMES_TEMPLATE, max_model_len: int = 2000, **settings: Any) -> Model:
        folder = tmp_path / "chat-model"
        shutil.copytree(chat_folder, folder)
        (folder / "chat_template.jinja").write_text(template)
        tokenizer = Tokenizer(folder)
        target = ScriptedTarget(tokenizer)
        target.description.model.max_model_len = max_model_len
        background.run(target.start())
        running = running_router(background, folder, [target.address], **settings)
        started.append((running, target))
        router = running.__enter__()
        wait_for_health(router)
        return Model(router, target, tokenizer)

    yield start
    for running, target in started:
        running.__exit__(None, None, None)
        background.run(target.stop())


@pytest.fixture
def model(new_model: Callable[..., Model]) -> Model:
    return new_model()
