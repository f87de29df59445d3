"""A simulated target and its draft workers in this process, with real gRPC streams over loopback between them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import grpc
import yaml

from cluster.config import Config
from cluster.drafters.simulated import SimulatedDrafter
from cluster.drafting.worker import DraftWorker
from cluster.factories.drafters import make_drafter
from cluster.factories.targets import make_target
from cluster.interpreter import keep_collections_short, switch_threads_soon
from cluster.model_folder import resolve_model_folder
from cluster.simulator.virtual import simulated_request
from cluster.targets.base import GenerationOutput
from cluster.targets.step_loop import StepLoop
from cluster.tokenization import Tokenizer
from protos.speculation.v1 import draft_pb2_grpc, types_pb2
from services.draft.servicer import DraftServicer
from services.draft.versions import Version
from services.launch.child import Child, end_all
from services.launch.delay_proxy import DelayProxy
from services.launch.local import free_ports
from services.worker import SERVER_OPTIONS

SIMULATED = ("target.engine=simulated", "draft.drafter=simulated")  # settings
TIMEOUT_SECONDS = 120.0  # for what takes no time on a quiet machine
_numbers = itertools.count()

ResultT = TypeVar("ResultT")


@dataclass(slots=True)
class Answer:
    """Answer to one request, gathered from the outputs of the steps."""

    token_ids: list[int] = field(default_factory=list)
    num_rounds: int = 0  # that verified drafts
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    is_finished: bool = False

    def take(self, output: GenerationOutput) -> None:
        self.token_ids.extend(output.token_ids)
        self.num_rounds += output.num_draft_tokens > 0
        self.num_draft_tokens += output.num_draft_tokens
        self.num_accepted_tokens += output.num_accepted_tokens
        self.is_finished = output.finish_reason is not None


@dataclass(frozen=True, slots=True)
class Way:
    """Round trip to a draft worker, and the labels of its place."""

    round_trip_ms: float
    labels: str = ""


class SimulatedCluster:
    """Runs while entered. `config` has simulated engines; `draft.replicas` says how many draft workers there are.

    With `drafts_apart` they are programs of their own, as in a real cluster: what this process then spends is the
    target's. `ways` has one for each draft worker; none given: as the simulation says.
    """

    def __init__(self, config: Config, *, drafts_apart: bool = False, ways: Sequence[Way] = ()) -> None:
        self._config = config
        self._ways = ways or [Way(config.simulation.round_trip_ms)] * config.draft.replicas
        self._fingerprint = Tokenizer(resolve_model_folder(config.target.model)).fingerprint()
        self.target = make_target(config, self._fingerprint)
        assert isinstance(self.target, StepLoop)
        drafters = [make_drafter(config) for _ in range(0 if drafts_apart else config.draft.replicas)]
        self.drafters = [drafter for drafter in drafters if isinstance(drafter, SimulatedDrafter)]
        self.workers = [DraftWorker(drafter, config.speculation.num_run_ahead_branches) for drafter in self.drafters]
        self.answers: dict[str, Answer] = {}
        self.on_step: Callable[[Sequence[GenerationOutput]], None] | None = None  # from the target's thread
        self._changed = threading.Condition()
        self._links = _BackgroundLoop()
        self._draft_side = _BackgroundLoop()
        self._servers: list[grpc.aio.Server] = []
        self._ports: list[int] = []  # of these
        self._proxies: list[DelayProxy] = []
        self._children = self._programs() if drafts_apart else []

    def _programs(self) -> list[_DraftProgram]:
        children = []
        for port in free_ports(self._config.draft.replicas):
            draft = self._config.draft.model_copy(update={"addresses": (f"127.0.0.1:{port}",)})
            config = self._config.model_copy(update={"draft": draft})
            with tempfile.NamedTemporaryFile("w", suffix=".yaml", delete=False) as file:
                yaml.safe_dump(config.model_dump(mode="json"), file)
            children.append(_DraftProgram(port, file.name))
        return children

    def __enter__(self) -> SimulatedCluster:
        switch_threads_soon()  # as in the worker programs: three threads share the interpreter
        keep_collections_short()
        for worker in self.workers:
            worker.start()
        for child in self._children:
            child.start()
        addresses = self._draft_side.run(self._serve())
        self._following = self._links.start(self.target.run_links(_only(addresses)))
        self.target.start(self._publish)
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while self.target.load().num_draft_links < len(addresses):
            if time.monotonic() > deadline:
                raise TimeoutError("the links to the draft workers do not come up")
            time.sleep(0.01)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.target.stop()
        self._following.cancel()
        self._draft_side.run(self._end())
        for worker in self.workers:
            worker.stop()
        end_all(self._children, TIMEOUT_SECONDS)
        for child in self._children:
            child.config_file.unlink()
        self._links.stop()
        self._draft_side.stop()

    def cut_off(self, index: int) -> None:
        """The draft worker of that number is gone, until `bring_back`."""
        self._draft_side.run(self._servers[index].stop(None))

    def bring_back(self, index: int) -> None:
        self._servers[index], _ = self._draft_side.run(self._serve_draft(index, self._ports[index]))

    def links_cpu_seconds(self) -> float:
        """Processor time of the thread in which the target's links are."""
        return self._links.cpu_seconds()

    def submit(self, max_tokens: int, *, num_speculative_tokens: int | None = None, prompt_len: int = 32) -> str:
        """Starts a request; its number among all of this process's is its seed. Returns its name."""
        vocab_size = self.target.model.vocab_size
        request = simulated_request(next(_numbers), vocab_size, prompt_len, max_tokens, num_speculative_tokens)
        self.answers[request.request_id] = Answer()
        self.target.submit(request)
        return request.request_id

    def abort(self, name: str) -> None:
        self.target.abort(name)
        self.answers.pop(name, None)

    def wait(self, names: Sequence[str], timeout: float) -> None:
        """Until the requests `names` are finished."""

        def is_done() -> bool:
            return self.target.error is not None or all(self.answers[name].is_finished for name in names)

        with self._changed:
            if not self._changed.wait_for(is_done, timeout):
                raise TimeoutError(f"not finished after {timeout:.0f} s")
        if self.target.error is not None:
            raise self.target.error

    def _publish(self, outputs: Sequence[GenerationOutput]) -> None:
        if self.on_step is not None:
            self.on_step(outputs)
        with self._changed:
            for output in outputs:
                answer = self.answers.get(output.request_id)
                if answer is not None:
                    answer.take(output)
            self._changed.notify()

    async def _serve(self) -> list[str]:
        """Starts the draft workers' servers, and their proxies if the simulation has a network."""
        ports = [child.port for child in self._children]
        simulation = self._config.simulation
        for index in range(len(self.workers)):
            server, port = await self._serve_draft(index)
            self._servers.append(server)
            self._ports.append(port)
            ports.append(port)
        for index, way in enumerate(self._ways[: len(ports)]):
            if way.round_trip_ms or simulation.loss:
                proxy = DelayProxy("127.0.0.1", ports[index], way.round_trip_ms / 1e3, simulation.loss)
                self._proxies.append(proxy)
                ports[index] = await proxy.start()
        return [f"127.0.0.1:{port} {way.labels}".rstrip() for port, way in zip(ports, self._ways, strict=True)]

    async def _serve_draft(self, index: int, port: int = 0) -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        model = types_pb2.ModelDescription(name="simulated", tokenizer_fingerprint=self._fingerprint)
        servicer = DraftServicer(Version(Config(), self.drafters[index], self.workers[index], model))
        draft_pb2_grpc.add_DraftServicer_to_server(servicer, server)
        port = server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        return server, port

    async def _end(self) -> None:
        for proxy in self._proxies:
            await proxy.stop()
        for server in self._servers:
            await server.stop(None)


class _DraftProgram(Child):
    def __init__(self, port: int, config_file: str) -> None:
        super().__init__("draft", ["draft", "--config", config_file])
        self.port = port
        self.config_file = Path(config_file)


class _BackgroundLoop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def start(self, coroutine: Coroutine[Any, Any, None]) -> concurrent.futures.Future[None]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(TIMEOUT_SECONDS)

    def cpu_seconds(self) -> float:
        assert self._thread.ident is not None
        return float(time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident)))

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _only(addresses: Sequence[str]) -> AsyncIterator[Sequence[str]]:
    yield addresses
