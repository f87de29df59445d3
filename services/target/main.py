"""The target worker program: an engine with its coordinator, served over gRPC."""

from __future__ import annotations

import asyncio
from itertools import chain

from cluster.config import Config
from cluster.factories.targets import make_target
from cluster.grammars.compiler import GrammarCompiler
from cluster.model_folder import resolve_model_folder
from cluster.placement.endpoints import advertised_address, follow
from cluster.targets.base import Target
from cluster.telemetry.metrics import Reading
from cluster.telemetry.tracing import check_tracing, make_tracer
from cluster.tokenization import Tokenizer
from cluster.transport.listening import Listener
from protos.speculation.v1 import target_pb2_grpc
from services.target.request_limits import RequestLimits
from services.target.router_calls import Calls
from services.target.servicer import TargetServicer
from services.target.traits import traits_of
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
    check_tracing(config.tracing)
    check_before_loading(config, "target")
    prepare_process(config.target)
    with loading(config.target.model):
        fingerprint = Tokenizer(resolve_model_folder(config.target.model)).fingerprint()
        target = make_target(config, fingerprint, loading_progress(config.target.model))
    log_kv_cache(
        target.load().num_blocks,
        target.block_size,
        config.target.max_num_seqs,
        config.speculation.num_speculative_tokens,
    )
    return asyncio.run(_serve(config, target, fingerprint))


async def _serve(config: Config, target: Target, tokenizer_fingerprint: str) -> int:
    grammars = None
    if config.target.engine != "simulated":
        folder = resolve_model_folder(config.target.model)
        grammars = GrammarCompiler(folder, target.model.vocab_size, target.model.eos_token_ids)
    listener = Listener.of(config.tls, "target")
    limits = RequestLimits(config)
    metrics_url = serve_readings(
        config.target,
        lambda: chain(target.readings(), limits.readings(), [_cache_info(target)]),
        config.served_model_id,
        listener,
    )
    address = advertised_address(config.target)
    # Here, as it starts a thread: the engine may have started processes before.
    tracer = make_tracer(config.tracing, "outrider-target", address)
    calls = Calls(
        target, config.speculation.max_speculative_tokens, tracer, grammars, config.target.max_waiting_tokens, limits
    )
    servicer = TargetServicer(
        calls,
        target,
        config,
        tokenizer_fingerprint,
        # An answer without a length limit ends at the model's limit. What caches hold may differ by some blocks, so the
        # router applies the least.
        traits=traits_of(config, target.model) | {"max_model_len": str(config.target.max_model_len)},
        advertised_address=address,
        metrics_url=metrics_url,
    )
    target.start(calls.publish)
    links = asyncio.create_task(target.run_links(follow(config.draft.addresses)))
    try:
        return await serve(
            config.target,
            listener,
            "speculation.v1.Target",
            lambda server: target_pb2_grpc.add_TargetServicer_to_server(servicer, server),
            calls,
        )
    finally:
        links.cancel()
        target.stop()
        if grammars is not None:
            await grammars.close()
        tracer.close()


def _cache_info(target: Target) -> Reading:
    labels = {"block_size": str(target.block_size), "num_gpu_blocks": str(target.load().num_blocks)}
    return Reading("vllm:cache_config_info", "Tokens in a KV block, and blocks.", 1, labels=labels)
