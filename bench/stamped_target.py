"""A simulated target worker that notes when it published what: `python -m bench.stamped_target`, for `bench.streams`.

At its end it writes `{request: [when it came, when each of its outputs was published]}`, in seconds of
`time.perf_counter()`, which on Linux all processes of a machine share.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path

from cluster.config import Config
from cluster.config.file import load_config
from cluster.factories.targets import make_target
from cluster.model_folder import resolve_model_folder
from cluster.targets.base import GenerationOutput, Target
from cluster.tokenization import Tokenizer
from cluster.transport.listening import Listener
from protos.speculation.v1 import target_pb2, target_pb2_grpc
from services.target.router_calls import Calls, RouterStream
from services.target.servicer import TargetServicer
from services.worker import prepare_process, serve


class StampedCalls(Calls):
    """Every caller's request ID is used once."""

    def __init__(self, target: Target, max_speculative_tokens: int) -> None:
        super().__init__(target, max_speculative_tokens)
        self.stamps: dict[str, list[float]] = {}

    def publish(self, outputs: Sequence[GenerationOutput]) -> None:
        now = time.perf_counter()
        for output in outputs:
            self.stamps[output.request_id.partition("#")[0]].append(now)
        super().publish(outputs)

    def start(self, stream: RouterStream, call: int, request: target_pb2.GenerateRequest) -> None:
        self.stamps[request.request_id] = [time.perf_counter()]
        super().start(stream, call, request)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.stamped_target", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    config = load_config(arguments.config)
    prepare_process(config.target)
    stamps = asyncio.run(_serve(config, arguments.address))
    arguments.out.write_text(json.dumps(stamps), encoding="utf-8")


async def _serve(config: Config, address: str) -> dict[str, list[float]]:
    fingerprint = Tokenizer(resolve_model_folder(config.target.model)).fingerprint()
    target = make_target(config, fingerprint)
    calls = StampedCalls(target, config.speculation.max_speculative_tokens)
    servicer = TargetServicer(calls, target, config, fingerprint)
    target.start(calls.publish)
    try:
        await serve(
            config.target.model_copy(update={"listen": address}),
            Listener.of(config.tls, "target"),
            "speculation.v1.Target",
            lambda server: target_pb2_grpc.add_TargetServicer_to_server(servicer, server),
            calls,
        )
    finally:
        target.stop()
    return calls.stamps


if __name__ == "__main__":
    main()
