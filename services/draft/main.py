"""The draft worker program."""

from __future__ import annotations

import asyncio

from cluster.config import Config
from cluster.config.workers import model_name
from cluster.errors import ConfigurationError
from cluster.placement.endpoints import advertised_address
from cluster.transport.listening import Listener
from protos.speculation.v1 import draft_pb2_grpc
from services.draft.servicer import DraftServicer
from services.draft.versions import Version, make_first
from services.worker import (
    check_before_loading,
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
    return asyncio.run(_serve(config, make_first(config)))


async def _serve(config: Config, version: Version) -> int:
    listener = Listener.of(config.tls, "draft")
    configured = None if version.config is config else config  # with a promoted version
    servicer = DraftServicer(version, advertised_address(config.draft), configured)
    servicer.metrics_url = serve_readings(
        config.draft, servicer.readings, model_name(version.config.draft_model), listener
    )
    version.worker.start()
    try:
        return await serve(
            config.draft,
            listener,
            "speculation.v1.Draft",
            lambda server: draft_pb2_grpc.add_DraftServicer_to_server(servicer, server),
            servicer,
        )
    finally:
        servicer.version.worker.stop()
