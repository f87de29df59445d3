"""The plugin's scheduler: the rounds of our target worker, with addresses and settings from `--additional-config`.

It runs in the engine core's process, which also serves the plugin's metrics page.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from cluster.coordination.pool import DraftPool
from cluster.model_folder import resolve_tokenizer_folder
from cluster.telemetry.metrics import WorkerMetrics
from cluster.telemetry.metrics_page import PageGuard, serve_metrics
from cluster.tokenization import Tokenizer
from cluster.transport.dialing import Dialer
from cluster.transport.listening import Listener
from cluster.vllm.core.async_scheduler import AsyncRoundScheduler
from cluster.vllm.core.pool_scheduler import PoolScheduler
from cluster.vllm_plugin.settings import PluginSettings

logger = logging.getLogger(__name__)


class PluginScheduler(PoolScheduler, AsyncRoundScheduler):
    """Scheduler class that `front_end.prepare` sets as vLLM's `scheduler_cls`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raises ConfigurationError if the port of the metrics page is taken."""
        super().__init__(*args, **kwargs)
        _log_as_vllm_does()
        settings, model = PluginSettings.of(self.vllm_config.additional_config), self.vllm_config.model_config
        fingerprint = Tokenizer(resolve_tokenizer_folder(model.tokenizer)).fingerprint()
        dialer = Dialer.of(settings.tls, "target", settings.draft_server_name)
        new_pool = partial(DraftPool, fingerprint, dialer=dialer)
        self.connect(new_pool, settings.speculation, settings.draft_addresses)
        self.rounds = self.coordinated_rounds()
        logger.info("draft workers: %s", ", ".join(settings.draft_addresses))
        if settings.metrics_port is not None:
            registry = WorkerMetrics(self.readings, str(model.served_model_name)).registry
            guard = PageGuard.of(Listener.of(settings.tls, "target"), settings.metrics_token_file)
            index = self.vllm_config.parallel_config.data_parallel_index
            port = settings.metrics_port and settings.metrics_port + index
            port = serve_metrics(registry, settings.metrics_host, port, guard)
            logger.info("metrics page of speculation at %s, port %d", settings.metrics_host, port)


def _log_as_vllm_does() -> None:
    """Makes our loggers use vLLM's log handlers, which otherwise only cover vLLM's modules."""
    ours = logging.getLogger("cluster")
    if not ours.handlers:
        ours.handlers = logging.getLogger("vllm").handlers
        ours.setLevel(logging.INFO)
        ours.propagate = False
