"""The draft worker program."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import torch

from cluster.config import Config
from cluster.coordination.worker import DraftWorker
from cluster.drafters.model import ModelDrafter
from cluster.engine.cpu_ops import has_kernels
from cluster.engine.runner import ModelRunner
from cluster.model_folder import resolve_model_folder
from cluster.telemetry.metrics import Reading, WorkerMetrics, serve_metrics
from cluster.tokenization import Tokenizer
from protos.speculation.v1 import draft_pb2_grpc, types_pb2
from services.draft.servicer import DraftServicer
from services.worker import loading_progress, prepare_process, serve


def run(config: Config) -> int:
    """Serves until SIGTERM; returns the exit code. Raises ConfigurationError when it cannot start."""
    draft = config.draft
    prepare_process(draft)
    # A draft reads its weights as often as it proposes; without the kernels, though, PyTorch's float32 is the faster.
    dtype_on_cpu = torch.bfloat16 if has_kernels() else torch.float32
    runner = ModelRunner.from_config(draft, dtype_on_cpu=dtype_on_cpu, progress=loading_progress(draft.model))
    model_config = runner.model.config
    max_model_len = min(
        draft.max_model_len or model_config.max_position_embeddings, model_config.max_position_embeddings
    )
    drafter = ModelDrafter(runner, max_model_len, draft.max_num_seqs, draft.max_num_batched_tokens)
    description = types_pb2.ModelDescription(
        name=draft.model,
        tokenizer_fingerprint=Tokenizer(resolve_model_folder(draft.model)).fingerprint(),
        vocab_size=model_config.vocab_size,
        max_model_len=max_model_len,
        dtype=str(runner.model.dtype).removeprefix("torch."),
    )
    return asyncio.run(_serve(config, drafter, description))


async def _serve(config: Config, drafter: ModelDrafter, description: types_pb2.ModelDescription) -> int:
    worker = DraftWorker(drafter)
    if config.draft.metrics_port is not None:
        serve_metrics(WorkerMetrics(lambda: _readings(worker, drafter)).registry, config.draft.metrics_port)
    worker.start()
    servicer = DraftServicer(worker, drafter, description)
    try:
        return await serve(
            config.draft.listen_address,
            "speculation.v1.Draft",
            lambda server: draft_pb2_grpc.add_DraftServicer_to_server(servicer, server),
            failure=lambda: worker.error,
        )
    finally:
        worker.stop()


def _readings(worker: DraftWorker, drafter: ModelDrafter) -> Iterable[Reading]:
    yield Reading("outrider_draft_sequences", "Sequences that are drafted for.", worker.num_sequences)
    yield Reading("outrider_kv_blocks_used", "KV blocks in use.", drafter.num_used_blocks)
    yield Reading("outrider_kv_blocks", "KV blocks in all.", drafter.num_blocks)
    yield from worker.step_time.readings("outrider_draft_step", "Steps of the drafter")
