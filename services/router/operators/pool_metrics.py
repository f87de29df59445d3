"""Metrics of the targets on the router's page, for load balancers that choose among routers.

They have vLLM's names. llm-d's endpoint picker reads exactly these families and `vllm:num_requests_running` from each
pod of its pool.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.router.metrics import ROUTER_ENGINE, RouterMetrics
from services.router.targets.replicas import ReplicaPool


class PoolMetrics(Collector):
    """Sums over the usable targets; the share of the KV cache in use is their mean."""

    def __init__(self, pool: ReplicaPool, metrics: RouterMetrics, model_name: str) -> None:
        self._pool = pool
        self._metrics = metrics
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        described = [replica.description for replica in self._pool.usable if replica.description is not None]
        loads = [description.load for description in described]
        waiting = sum(load.num_waiting for load in loads)
        shares = [load.num_used_blocks / load.num_blocks for load in loads if load.num_blocks]
        yield self._gauge("vllm:num_requests_waiting", "Sequences that wait for KV blocks of a target.", waiting)
        used = "Share of the KV blocks in use, the mean of the targets; 1 is all of them."
        yield self._gauge("vllm:kv_cache_usage_perc", used, sum(shares) / len(shares) if shares else 0.0)
        yield GaugeMetricFamily(
            "outrider_prefix_index_entries",
            "Chunks of 64 prompt tokens that the router expects in the prefix caches of its usable targets.",
            sum(len(replica.prefixes) for replica in self._pool.usable),
        )
        num_blocks = sum(load.num_blocks for load in loads)
        sizes = {description.block_size for description in described}
        cache = {"block_size": str(min(sizes, default=0)), "num_gpu_blocks": str(num_blocks)}
        yield self._gauge("vllm:cache_config_info", "Tokens in a KV block, and blocks of all targets.", 1, **cache)
        adapters = {
            "max_lora": str(len(self._pool.adapters())),
            "waiting_lora_adapters": "",
            "running_lora_adapters": ",".join(sorted(self._metrics.running_adapters)),
        }
        description = "LoRA adapters of requests in flight, and how many can be named; the value is the time."
        yield self._gauge("vllm:lora_requests_info", description, time.time(), **adapters)

    def _gauge(self, name: str, documentation: str, value: float, **labels: str) -> Metric:
        family = GaugeMetricFamily(name, documentation, labels=["model_name", "engine", *labels])
        family.add_metric([self._model_name, ROUTER_ENGINE, *labels.values()], value)
        return family
