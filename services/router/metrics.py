"""Metrics of the router: its requests, and the cluster's totals of tokens and speculation.

Metrics that vLLM has too keep its names; all others start with `outrider_`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.telemetry.metrics import LATENCY_BUCKETS, Tally

ROUTER_ENGINE = "router"  # value of vLLM's label `engine` on a router's page, which covers all its targets

Rejection = Literal["max_num_queued_reqs", "max_num_queued_tokens"]
"vLLM's names of the limits that requests are refused for."

_TOKEN_BUCKETS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_CHOICE_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)

_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_INTER_TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)


class RouterMetrics:
    """Counters of the router: its requests, and the cluster's totals of tokens and speculation.

    Requests that fail, per second:
        sum(rate(outrider_requests_total{code=~"5.."}[1m]))
    Generated tokens per second:
        rate(vllm:generation_tokens_total[1m])
    Acceptance rate:
        rate(vllm:spec_decode_num_accepted_tokens_total[1m])
          / rate(vllm:spec_decode_num_draft_tokens_total[1m])
    Acceptance length (rounds that verified no draft are left out):
        1 + rate(vllm:spec_decode_num_accepted_tokens_total[1m])
          / rate(vllm:spec_decode_num_drafts_total[1m])
    Median time to the first token:
        histogram_quantile(0.5, sum by (le) (rate(vllm:time_to_first_token_seconds_bucket[1m])))
    Decoding speedup of requests that may speculate, while the switch lets only a share of them:
        (rate(outrider_decode_tokens_total{speculation="on"}[5m])
          / rate(outrider_decode_seconds_total{speculation="on"}[5m]))
          / ignoring(speculation) (rate(outrider_decode_tokens_total{speculation="off"}[5m])
            / rate(outrider_decode_seconds_total{speculation="off"}[5m]))
    """

    def __init__(self, model_name: str) -> None:
        self.registry = registry = CollectorRegistry()
        self.running_adapters: dict[str, int] = {}  # number of choices in flight, by adapter
        self._model_name = model_name

        def histogram(name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(name, documentation, ["model_name", "engine"], registry=registry, buckets=buckets)
            return family.labels(model_name, ROUTER_ENGINE)

        def counter(name: str, documentation: str) -> Counter:
            family = Counter(name, documentation, ["model_name", "engine"], registry=registry)
            return family.labels(model_name, ROUTER_ENGINE)

        self.requests_running: Gauge = Gauge(
            "vllm:num_requests_running",
            "Requests in flight.",
            ["model_name", "engine"],
            registry=registry,
        ).labels(model_name, ROUTER_ENGINE)
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of answered requests.")
        self.time_to_first_token = histogram(
            "vllm:time_to_first_token_seconds",
            "Time from a request's arrival to its first token.",
            _FIRST_TOKEN_BUCKETS,
        )
        self.tokens = TokenTally(model_name)
        registry.register(self.tokens)
        self.keys = KeyTally()
        registry.register(self.keys)
        self.e2e_latency = histogram(
            "vllm:e2e_request_latency_seconds",
            "Time from a request's arrival to its last token.",
            LATENCY_BUCKETS,
        )
        self.time_per_output_token = histogram(
            "vllm:request_time_per_output_token_seconds",
            "Time from the first token of a choice to its last, per token after the first: decoding alone.",
            _INTER_TOKEN_BUCKETS,
        )
        self._prompt_tokens_cached = counter(
            "vllm:prompt_tokens_cached", "Prompt tokens of answered requests that were in a target's prefix cache."
        )
        self._prompt_tokens_by_source = Counter(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens of answered requests: computed (local_compute), or found in a target's prefix cache "
            "(local_cache_hit).",
            ["model_name", "engine", "source"],
            registry=registry,
        )
        self._prompt_tokens_predicted = Counter(
            "outrider_prompt_tokens_predicted",
            "Prompt tokens of answered requests that the router expected in the chosen target's prefix cache; "
            "vllm:prompt_tokens_cached counts those that were there.",
            ["model_name"],
            registry=registry,
        ).labels(model_name)
        self.request_prompt_tokens = histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of choices that have ended.", _TOKEN_BUCKETS
        )
        self.request_generation_tokens = histogram(
            "vllm:request_generation_tokens", "Tokens generated for choices that have ended.", _TOKEN_BUCKETS
        )
        self.request_params_max_tokens = histogram(
            "vllm:request_params_max_tokens", "Tokens that a choice may have at most.", _TOKEN_BUCKETS
        )
        self.request_params_n = histogram("vllm:request_params_n", "Choices that requests ask for.", _CHOICE_BUCKETS)
        self._success = Counter(
            "vllm:request_success",
            "Choices that have ended, by how: stop, length, abort (the client left) or error.",
            ["model_name", "engine", "finished_reason"],
            registry=registry,
        )
        self._rejections = Counter(
            "vllm:admission_rejections",
            "Requests refused by reason: too many requests (max_num_queued_reqs), or too many waiting prompt tokens "
            "(max_num_queued_tokens).",
            ["model_name", "reason"],
            registry=registry,
        )
        self._parsed_for_calls = Counter(
            "vllm:tool_call_parser_invocations",
            "Choices parsed for tool calls, each counted once, by whether they had a tool call.",
            ["model_name", "mode", "outcome", "request_type"],
            registry=registry,
        )
        self._decode_seconds = Counter(
            "outrider_decode_seconds",
            "Time of choices from their first token to their last, by whether they might speculate: off by the "
            "request's own k = 0, or by the switch.",
            ["model_name", "speculation"],
            registry=registry,
        )
        self._decode_tokens = Counter(
            "outrider_decode_tokens",
            "Tokens of these choices after the first.",
            ["model_name", "speculation"],
            registry=registry,
        )
        self.speculation_percentage = Gauge(
            "outrider_speculation_percentage",
            "Share of the requests that may speculate, as set by the switch.",
            registry=registry,
        )
        self.speculation_switched = Counter(
            "outrider_speculation_switched", "Number of times the switch was set.", registry=registry
        )
        self._requests = Counter(
            "outrider_requests",
            "Requests by their end: the HTTP status, 499 if the client left first, and for a failure after the "
            "answer began the status it would have had.",
            ["model_name", "code"],
            registry=registry,
        )
        self.connections = Gauge(
            "outrider_http_connections", "Connections of clients, including operators.", registry=registry
        )
        self._connections_closed = Counter(
            "outrider_http_connections_closed",
            "Connections closed because of their client's behaviour, by reason.",
            ["reason"],
            registry=registry,
        )
        self._moved = Counter(
            "outrider_requests_moved",
            "Sequences moved to another target, by its end: lost, draining, stuck, failed or unloaded.",
            ["model_name", "reason"],
            registry=registry,
        )
        self._by_adapter = Counter(
            "outrider_requests_by_adapter",
            "Requests with a LoRA adapter.",
            ["model_name", "adapter"],
            registry=registry,
        )

    def count_request(self, code: int) -> None:
        """Counts one request that ended with `code`."""
        self._requests.labels(self._model_name, str(code)).inc()

    def count_prompt(self, num_tokens: int, num_cached: int, num_predicted: int) -> None:
        """Counts a prompt of `num_tokens`.

        `num_cached`: tokens in the target's prefix cache. `num_predicted`: tokens that the router expected there.
        """
        self._prompt_tokens.inc(num_tokens)
        self._prompt_tokens_cached.inc(num_cached)
        self._prompt_tokens_predicted.inc(num_predicted)
        for source, number in (("local_compute", num_tokens - num_cached), ("local_cache_hit", num_cached)):
            self._prompt_tokens_by_source.labels(self._model_name, ROUTER_ENGINE, source).inc(number)

    def count_rejection(self, reason: Rejection) -> None:
        """Counts one request that was refused because of a limit."""
        self._rejections.labels(self._model_name, reason).inc()

    def count_parsed(self, request_type: str, *, is_streamed: bool, has_call: bool) -> None:
        """Counts one choice that was parsed for tool calls."""
        mode, outcome = "streaming" if is_streamed else "non_streaming", "tool_call" if has_call else "no_tool_call"
        self._parsed_for_calls.labels(self._model_name, mode, outcome, request_type).inc()

    def count_end(self, finish_reason: str, num_prompt_tokens: int, num_tokens: int) -> None:
        """Counts a choice that ended with `finish_reason`: stop, length, abort or error."""
        self._success.labels(self._model_name, ROUTER_ENGINE, finish_reason).inc()
        self.request_prompt_tokens.observe(num_prompt_tokens)
        self.request_generation_tokens.observe(num_tokens)

    def count_running_adapter(self, name: str, change: int) -> None:
        """Adjusts the number of choices in flight with the adapter `name`.

        `change`: 1 when a choice begins, -1 when it ends.
        """
        number = self.running_adapters.get(name, 0) + change
        if number > 0:
            self.running_adapters[name] = number
        else:
            self.running_adapters.pop(name, None)

    def count_closed_connection(self, reason: str) -> None:
        """Counts one connection that was closed because of its client's behaviour."""
        self._connections_closed.labels(reason).inc()

    def count_adapter(self, name: str) -> None:
        """Counts one request with an adapter that targets hold."""
        self._by_adapter.labels(self._model_name, name).inc()

    def count_move(self, reason: str) -> None:
        """Counts one sequence that moved to another target because of `reason`."""
        self._moved.labels(self._model_name, reason).inc()

    def count_decode(self, num_tokens: int, seconds: float, *, may_speculate: bool) -> None:
        """Counts an ended choice that decoded `num_tokens` in `seconds` after its first token."""
        if num_tokens > 0:
            self.time_per_output_token.observe(seconds / num_tokens)
            kind = "on" if may_speculate else "off"
            self._decode_seconds.labels(self._model_name, kind).inc(seconds)
            self._decode_tokens.labels(self._model_name, kind).inc(num_tokens)

    def render(self, only_key: str | None = None) -> bytes:
        """Returns the page in Prometheus's text format. `only_key`: the only key whose use it shows; None: all."""
        return self.renderer(only_key)()

    def renderer(self, only_key: str | None = None) -> Callable[[], bytes]:
        """Returns the function that formats the page of `render` with the present values. Any thread may call it."""
        source = self.registry if only_key is None else _OneKey(self.registry, only_key)
        return partial(generate_latest, _Families(list(source.collect())))


class _Families(Collector):
    """Metrics that have been read already."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


class _OneKey(Collector):
    """Metrics of `registry` without samples whose label `key` is another key."""

    def __init__(self, registry: CollectorRegistry, key: str) -> None:
        self._registry = registry
        self._key = key

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if sample.labels.get("key", self._key) == self._key]
            yield family


class TokenTally(Collector):
    """Counts tokens and rounds in plain numbers. Not thread-safe.

    It is updated for every chunk and round, where Prometheus counters with their locks would cost many times more.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._num_tokens = 0
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._num_accepted_tokens = 0
        self._num_accepted_per_position: list[int] = []
        self._gaps = Tally(_INTER_TOKEN_BUCKETS)

    def count_tokens(self, num_tokens: int, seconds: float | None) -> None:
        """Counts `num_tokens` tokens of one choice that arrived together.

        `seconds`: time since the previous arrival; None for the first tokens of a choice.
        """
        self._num_tokens += num_tokens
        if seconds is not None:
            self._gaps.observe(seconds)

    def count_round(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Counts one round that verified draft tokens."""
        self._num_drafts += 1
        self._num_draft_tokens += num_draft_tokens
        self._num_accepted_tokens += num_accepted_tokens
        missing = num_accepted_tokens - len(self._num_accepted_per_position)
        self._num_accepted_per_position.extend([0] * missing)
        for position in range(num_accepted_tokens):
            self._num_accepted_per_position[position] += 1

    def collect(self) -> Iterator[Metric]:
        def counter(name: str, documentation: str, value: float) -> Metric:
            family = CounterMetricFamily(name, documentation, labels=["model_name", "engine"])
            family.add_metric([self._model_name, ROUTER_ENGINE], value)
            return family

        prefix = "vllm:spec_decode_num"
        yield counter("vllm:generation_tokens", "Tokens generated.", self._num_tokens)
        yield counter(f"{prefix}_drafts", "Rounds that verified at least one draft token.", self._num_drafts)
        yield counter(f"{prefix}_draft_tokens", "Tokens drafted.", self._num_draft_tokens)
        yield counter(f"{prefix}_accepted_tokens", "Draft tokens accepted.", self._num_accepted_tokens)
        per_position = CounterMetricFamily(
            f"{prefix}_accepted_tokens_per_pos",
            "Draft tokens accepted, by their place in the draft.",
            labels=["model_name", "engine", "position"],
        )
        for position, count in enumerate(self._num_accepted_per_position):
            per_position.add_metric([self._model_name, ROUTER_ENGINE, str(position)], count)
        yield per_position
        latency = HistogramMetricFamily(
            "vllm:inter_token_latency_seconds",
            "Time between two arrivals of tokens of one choice; speculation delivers several at once.",
            labels=["model_name", "engine"],
        )
        latency.add_metric([self._model_name, ROUTER_ENGINE], self._gaps.buckets(), self._gaps.sum)
        yield latency


class KeyTally(Collector):
    """Counts the use of each API key in plain numbers; "" stands for requests without a valid key.

    Requests of a key that were refused for its limits, per second:
        sum by (key) (rate(outrider_requests_by_key_total{code="429"}[5m]))
    """

    def __init__(self) -> None:
        self._requests: dict[tuple[str, str], int] = {}
        self._prompt_tokens: dict[str, int] = {}
        self._generated_tokens: dict[str, int] = {}

    def count_request(self, key: str, code: int) -> None:
        self._requests[key, str(code)] = self._requests.get((key, str(code)), 0) + 1

    def count_prompt(self, key: str, num_tokens: int) -> None:
        self._prompt_tokens[key] = self._prompt_tokens.get(key, 0) + num_tokens

    def count_generated(self, key: str, num_tokens: int) -> None:
        self._generated_tokens[key] = self._generated_tokens.get(key, 0) + num_tokens

    def collect(self) -> Iterator[Metric]:
        def counter(name: str, documentation: str, *labels: str) -> CounterMetricFamily:
            return CounterMetricFamily(name, documentation, labels=labels)

        requests = counter("outrider_requests_by_key", "Requests by the name of their key.", "key", "code")
        for labels, count in self._requests.items():
            requests.add_metric(labels, count)
        yield requests
        prompts = counter("outrider_prompt_tokens_by_key", "Prompt tokens of answered requests of a key.", "key")
        generated = counter("outrider_generation_tokens_by_key", "Tokens generated for a key.", "key")
        for family, tokens in ((prompts, self._prompt_tokens), (generated, self._generated_tokens)):
            for key, num_tokens in tokens.items():
                family.add_metric([key], num_tokens)
            yield family
