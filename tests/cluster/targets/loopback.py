"""A target and its draft worker in one process, with real streams between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc

from cluster.config import Config
from cluster.config.speculation import SpeculationConfig
from cluster.coordination.base import LinkPool
from cluster.coordination.pool import DraftPool
from cluster.drafters.model import ModelDrafter
from cluster.drafting.worker import DraftWorker
from cluster.engine.limits import StepLimits
from cluster.engine.runner import ModelRunner
from cluster.targets.base import GenerationOutput, GenerationRequest
from cluster.targets.rejection import RejectionSampler
from cluster.targets.torch import TorchTarget
from protos.speculation.v1 import draft_pb2_grpc, types_pb2
from services.draft.servicer import DraftServicer
from services.draft.versions import Version
from tests.background_loop import BackgroundLoop
from tests.endpoints import Endpoints
from tests.waiting import wait_until

FINGERPRINT = "the same tokenizer"
TARGET_SEED, OTHER_SEED = 0, 1  # of tiny models


class LoopbackDraft:
    """A draft worker behind a real server on loopback. Stopped and started again it is a new worker, same address."""

    def __init__(
        self,
        loop: BackgroundLoop,
        runner: ModelRunner,
        fingerprint: str = FINGERPRINT,
        run_ahead_branches: int = 0,
    ) -> None:
        self._loop = loop
        self._run_ahead_branches = run_ahead_branches
        self._runner = runner
        self._fingerprint = fingerprint
        self.address = "127.0.0.1:0"
        self.start()

    def start(self) -> None:
        self.drafter = ModelDrafter(
            self._runner, StepLimits(max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64)
        )
        self.worker = DraftWorker(self.drafter, self._run_ahead_branches)
        self.worker.start()
        self._loop.run(self._serve())

    async def _serve(self) -> None:
        description = types_pb2.ModelDescription(name="tiny", tokenizer_fingerprint=self._fingerprint)
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        servicer = DraftServicer(Version(Config(), self.drafter, self.worker, description))
        draft_pb2_grpc.add_DraftServicer_to_server(servicer, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port(self.address)}"
        await self._server.start()

    def stop(self, grace: float | None = None) -> None:
        self._loop.run(self._server.stop(grace))
        wait_until(lambda: self.worker.num_sequences == 0)  # the links are gone, and with them what they held
        self.worker.stop()


class LoopbackTarget:
    """A TorchTarget with its links, and what it publishes collected by request."""

    def __init__(
        self,
        loop: BackgroundLoop,
        runner: ModelRunner,
        addresses: Sequence[str],
        *,
        max_num_seqs: int = 4,
        rejection: RejectionSampler | None = None,
        pool: LinkPool | None = None,
        launches_ahead: bool = False,
        max_model_len: int = 256,
        **settings: Any,
    ) -> None:
        """`pool`: takes the place of one that is linked to `addresses`."""
        # Drafts may take seconds on a busy machine: steps wait for them, so that they are verified.
        speculation = SpeculationConfig(**({"draft_timeout_ms": 60_000} | settings))
        self.runner = runner
        self.target = TorchTarget(
            "tiny",
            runner,
            StepLimits(max_model_len, max_num_seqs=max_num_seqs, max_num_batched_tokens=24),
            pool or DraftPool(FINGERPRINT),
            speculation,
            rejection,
        )
        self.target.launches_ahead = launches_ahead
        self._outputs: dict[str, list[GenerationOutput]] = {}
        self._loop = loop
        self._endpoints = Endpoints(loop)
        self._links = loop.start(self.target.run_links(self._endpoints.lists()))
        self.follow(addresses)
        self.target.start(self._publish)

    def follow(self, addresses: Sequence[str]) -> None:
        """The draft workers are at `addresses` from now on."""
        self._endpoints.become(*addresses)

    def _publish(self, outputs: Sequence[GenerationOutput]) -> None:
        for output in outputs:
            self._outputs.setdefault(output.request_id, []).append(output)

    def outputs(self, request: GenerationRequest) -> list[GenerationOutput]:
        return list(self._outputs.get(request.request_id, ()))

    def is_finished(self, request: GenerationRequest) -> bool:
        assert self.target.error is None
        outputs = self.outputs(request)
        return bool(outputs) and outputs[-1].finish_reason is not None

    def token_ids(self, request: GenerationRequest) -> list[int]:
        return [token for output in self.outputs(request) for token in output.token_ids]

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[int]]:
        """Runs them together; returns what each generated."""
        for request in requests:
            self.target.submit(request)
        wait_until(lambda: all(self.is_finished(request) for request in requests))
        return [self.token_ids(request) for request in requests]

    def readings(self) -> dict[str, float]:
        """The metrics without labels."""
        return {reading.name: reading.value for reading in self.target.readings() if not reading.labels}

    def wait_for_links(self, number: int = 1) -> None:
        wait_until(lambda: self.target.load().num_draft_links == number)

    def assert_idle(self) -> None:
        """Nothing runs, and every block is free."""
        wait_until(lambda: self.target.load().num_running == self.target.load().num_waiting == 0)
        assert self.target.load().num_used_blocks == 0
        assert self.target.error is None

    def stop(self) -> None:
        self.target.stop()
        self._links.cancel()
