"""The draft worker program."""

from __future__ import annotations

import asyncio
from itertools import chain

from cluster.config import Config
from cluster.config.workers import model_name
from cluster.drafters.base import Drafter
from cluster.drafters.pairing import draft_vocabulary, spoken_fingerprint
from cluster.drafting.worker import DraftWorker
from cluster.errors import ConfigurationError
from cluster.factories.drafters import draft_fingerprint, make_drafter
from cluster.placement.endpoints import advertised_address
from cluster.transport.listening import Listener
from protos.speculation.v1 import draft_pb2_grpc, types_pb2
from services.draft.servicer import DraftServicer
from services.worker import (
    check_before_loading,
    loading,
    loading_progress,
    log_kv_cache,
    prepare_process,
    serve,
    serve_readings,
)


def run(config: Config) -> int:
    """Serves until SIGTERM. Returns the exit code. Raises ConfigurationError if it cannot start."""
    if config.drafts_in_process and config.draft.reads_states:
        raise ConfigurationError(
            f"draft.drafter {config.draft.drafter} drafts in the target's process, so it has no draft workers"
        )
    if config.drafts_in_process:
        raise ConfigurationError(
            "draft.placement in-process has no draft workers: the target drafts by itself. To have some, set "
            "draft.placement to pool"
        )
    check_before_loading(config, "draft")
    prepare_process(config.draft)
    with loading(config.draft_model):
        vocabulary = draft_vocabulary(config) if config.names_target else None
        drafter = make_drafter(config, loading_progress(config.draft_model), vocabulary)
    if drafter.num_blocks:
        window = config.speculation.window(config.speculation.num_speculative_tokens)
        log_kv_cache(drafter.num_blocks, drafter.block_size, config.draft.max_num_seqs, window)
    description = types_pb2.ModelDescription(
        name="simulated" if config.draft.drafter == "simulated" else config.draft_model,
        tokenizer_fingerprint=spoken_fingerprint(config, vocabulary),
        vocab_size=drafter.vocab_size,
        max_model_len=drafter.max_model_len,
        dtype=drafter.dtype,
        fingerprint=draft_fingerprint(config),
    )
    return asyncio.run(_serve(config, drafter, description))


async def _serve(config: Config, drafter: Drafter, description: types_pb2.ModelDescription) -> int:
    worker = DraftWorker(
        drafter,
        config.speculation.num_run_ahead_branches,
        tunes_temperature=config.speculation.tunes_draft_temperature,
    )
    listener = Listener.of(config.tls, "draft")
    metrics_url = serve_readings(
        config.draft,
        lambda: chain(worker.readings(), drafter.readings()),
        model_name(config.draft_model),
        listener,
    )
    worker.start()
    servicer = DraftServicer(worker, drafter, description, advertised_address(config.draft), metrics_url)
    try:
        return await serve(
            config.draft,
            listener,
            "speculation.v1.Draft",
            lambda server: draft_pb2_grpc.add_DraftServicer_to_server(servicer, server),
            servicer,
        )
    finally:
        worker.stop()
