"""The target worker program: an engine with its coordinator, served over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import torch

from cluster.config import Config
from cluster.coordination.pool import DraftPool
from cluster.engine.invariance import check_invariance
from cluster.engine.runner import ModelRunner
from cluster.errors import ConfigurationError
from cluster.model_folder import resolve_model_folder
from cluster.targets.torch import TorchTarget
from cluster.telemetry.metrics import WorkerMetrics, serve_metrics
from cluster.tokenization import Tokenizer
from protos.speculation.v1 import target_pb2_grpc
from services.target.servicer import TargetServicer
from services.worker import loading_progress, log_kv_cache, prepare_process, serve


def run(config: Config) -> int:
    """Serves until SIGTERM; returns the exit code. Raises ConfigurationError when it cannot start."""
    prepare_process(config.target)
    fingerprint = Tokenizer(resolve_model_folder(config.target.model)).fingerprint()
    return asyncio.run(_serve(config, build_target(config, fingerprint), fingerprint))


def build_target(config: Config, tokenizer_fingerprint: str) -> TorchTarget:
    """Loads the engine. Raises ConfigurationError."""
    target = config.target
    if target.max_num_batched_tokens < target.max_num_seqs:
        raise ConfigurationError(
            f"target.max_num_batched_tokens {target.max_num_batched_tokens} is less than "
            f"target.max_num_seqs {target.max_num_seqs}: every sequence needs a token in every step"
        )
    runner = ModelRunner.from_config(target, dtype_on_cpu=torch.bfloat16, progress=loading_progress(target.model))
    log_kv_cache(runner.blocks.num_blocks, target, config.speculation.num_speculative_tokens)
    if target.numerics == "invariant":
        check_invariance(runner)
    return TorchTarget(
        target.model,
        runner,
        DraftPool(tokenizer_fingerprint),
        config.speculation,
        max_model_len=runner.model.config.resolve_max_model_len(target.max_model_len),
        max_num_seqs=target.max_num_seqs,
        max_num_batched_tokens=target.max_num_batched_tokens,
    )


async def _serve(config: Config, target: TorchTarget, tokenizer_fingerprint: str) -> int:
    if config.target.metrics_port is not None:
        serve_metrics(WorkerMetrics(target.readings).registry, config.target.metrics_port)
    servicer = TargetServicer(target, config, tokenizer_fingerprint)
    target.start(servicer.publish)
    links = asyncio.create_task(target.run_links(_fixed_endpoints(config.draft.addresses)))
    try:
        return await serve(
            config.target.listen_address,
            "speculation.v1.Target",
            lambda server: target_pb2_grpc.add_TargetServicer_to_server(servicer, server),
            failure=lambda: target.error,
        )
    finally:
        servicer.end_calls()
        links.cancel()
        target.stop()


async def _fixed_endpoints(addresses: Sequence[str]) -> AsyncIterator[Sequence[str]]:
    yield addresses
