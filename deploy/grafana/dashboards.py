"""The Grafana dashboards as code: `make docs` (`python -m deploy.grafana.dashboards`) writes the JSON into the chart.

A test compares the files with what would be written; another asks a Prometheus that scrapes a cluster under load every
query of every panel. In a query `{$J}` selects the job, and `{$J,` does so before further matchers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from grafana_foundation_sdk.builders import common, prometheus, stat, timeseries
from grafana_foundation_sdk.builders import dashboard as dashboards
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.common import LegendPlacement

# Helm reads no files but a chart's own.
FOLDER = Path(__file__).resolve().parent.parent / "helm" / "outrider" / "monitoring"
_WINDOW = "[$__rate_interval]"


@dataclass(frozen=True, slots=True)
class Query:
    expr: str
    legend: str = ""

    @property
    def promql(self) -> str:
        return self.expr.replace("{$J", '{job=~"$job"')


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph over a third of the width, or with `is_number` one figure over a quarter."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    is_number: bool = False


@dataclass(frozen=True, slots=True)
class Dashboard:
    name: str
    title: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]
    constants: tuple[tuple[str, str, str], ...] = ()  # numbers that the reader sets: name, label, value

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.json"

    def queries(self) -> Iterator[str]:
        for _, panels in self.rows:
            for panel in panels:
                yield from (query.promql for query in panel.queries)


def _rate(metric: str, by: str = "", matchers: str = "") -> str:
    selector = f"{{$J,{matchers}}}" if matchers else "{$J}"
    return f"sum{f' by ({by}) ' if by else ''}(rate({metric}{selector}{_WINDOW}))"


def _quantiles(metric: str) -> tuple[Query, ...]:
    return tuple(
        Query(f"histogram_quantile({q}, {_rate(f'{metric}_bucket', 'le')})", f"p{100 * q:g}") for q in (0.5, 0.9, 0.99)
    )


_TOKENS = _rate("vllm:generation_tokens_total")
_GAIN = "avg by (draft) (outrider_speculation_gain_ratio{$J})"
_ACCEPTED = _rate("vllm:spec_decode_num_accepted_tokens_total")
_DRAFTED = _rate("vllm:spec_decode_num_draft_tokens_total")
_ROUNDS = _rate("vllm:spec_decode_num_drafts_total")
_FAILED = _rate("outrider_requests_total", matchers='code=~"5.."')
_FAILING = f"({_FAILED} or vector(0)) / " + _rate("outrider_requests_total", matchers='code!="499"')
_WITHIN_LIMITS = " / ".join(
    (
        _rate("outrider_limit_ratio_bucket", "limit", 'le="1.0"'),
        f"clamp_min({_rate('outrider_limit_ratio_count', 'limit')}, 1e-9)",
    )
)

OVERVIEW = Dashboard(
    "overview",
    "Outrider / Overview",
    (
        (
            "Now",
            (
                Panel("Gain", "Tokens a second over those without drafts.", "none", (Query(_GAIN, "{{draft}}"),), True),
                Panel("Tokens a second", "Generated.", "none", (Query(_TOKENS),), True),
                Panel(
                    "Requests in flight",
                    "At the routers.",
                    "none",
                    (Query('sum(vllm:num_requests_running{$J,engine="router"})'),),
                    True,
                ),
                Panel("Failing", "5xx, of requests whose clients stayed.", "percentunit", (Query(_FAILING),), True),
            ),
        ),
        (
            "Traffic",
            (
                Panel(
                    "Requests",
                    "By how they ended; 499: the client left.",
                    "reqps",
                    (Query(_rate("outrider_requests_total", "code"), "{{code}}"),),
                ),
                Panel(
                    "Tokens",
                    "Prompts and answers.",
                    "none",
                    (Query(_rate("vllm:prompt_tokens_total"), "prompt"), Query(_TOKENS, "generated")),
                ),
                Panel(
                    "Moved requests",
                    "Taken to another target, by what became of the one before.",
                    "none",
                    (Query(f"{_rate('outrider_requests_moved_total', 'reason')} or vector(0)", "{{reason}}"),),
                ),
            ),
        ),
        (
            "Latency",
            (
                Panel("First token", "From a request's arrival.", "s", _quantiles("vllm:time_to_first_token_seconds")),
                Panel(
                    "Between tokens",
                    "Between two arrivals; with speculation several come at once.",
                    "s",
                    _quantiles("vllm:inter_token_latency_seconds"),
                ),
                Panel(
                    "In the queue",
                    "From a sequence's arrival at a target to its admission.",
                    "s",
                    _quantiles("vllm:request_queue_time_seconds"),
                ),
                Panel(
                    "Time per output token",
                    "Of a choice, after its first token: decoding alone.",
                    "s",
                    _quantiles("vllm:request_time_per_output_token_seconds"),
                ),
                Panel("Whole request", "To its last token.", "s", _quantiles("vllm:e2e_request_latency_seconds")),
                Panel(
                    "Within limits",
                    "Share of the requests that kept their limit.",
                    "percentunit",
                    (Query(_WITHIN_LIMITS, "{{limit}}"),),
                ),
            ),
        ),
    ),
)

SPECULATION = Dashboard(
    "speculation",
    "Outrider / Speculation",
    (
        (
            "What it gains",
            (
                Panel(
                    "Gain",
                    "Tokens a second as speculation is done now, over plain decoding, by target and draft model.",
                    "none",
                    (Query("outrider_speculation_gain_ratio{$J}", "{{instance}} {{draft}}"),),
                ),
                Panel(
                    "Goodput",
                    "What each draft model would give at its best depth. Under 1: it does not pay, and k is 0.",
                    "none",
                    (Query("outrider_goodput_ratio{$J}", "{{instance}} {{draft}}"),),
                ),
                Panel(
                    "Tokens a round",
                    "Accepted drafts and the target's own token, of rounds that had drafts.",
                    "none",
                    (Query(f"1 + {_ACCEPTED} / {_ROUNDS}", "tokens"),),
                ),
            ),
        ),
        (
            "Acceptance",
            (
                Panel("Rate", "Of drafted tokens.", "percentunit", (Query(f"{_ACCEPTED} / {_DRAFTED}", "accepted"),)),
                Panel(
                    "By position",
                    "Of rounds with drafts, those that accepted the draft at a position.",
                    "percentunit",
                    (
                        Query(
                            f"{_rate('vllm:spec_decode_num_accepted_tokens_per_pos_total', 'position')} "
                            f"/ on () group_left () {_ROUNDS}",
                            "{{position}}",
                        ),
                    ),
                ),
                Panel(
                    "What became of drafts",
                    "Tokens that draft workers made, those that no target verified included.",
                    "none",
                    (Query(_rate("outrider_draft_tokens_total", "outcome"), "{{outcome}}"),),
                ),
            ),
        ),
        (
            "Choices",
            (
                Panel(
                    "Depth",
                    "Sequences in steps by the k chosen.",
                    "none",
                    (Query(_rate("outrider_chosen_depths_total", "k"), "{{k}}"),),
                ),
                Panel(
                    "Plain decodes",
                    "Sequences in steps without drafts, by the reason.",
                    "none",
                    (Query(_rate("outrider_plain_decodes_total", "reason"), "{{reason}}"),),
                ),
                Panel(
                    "Switch",
                    "Share of the requests that may be speculated for, as each router is set.",
                    "percent",
                    (Query("outrider_speculation_percentage{$J}", "{{instance}}"),),
                ),
                Panel(
                    "Decoding speed",
                    "Tokens a second of one choice, by whether it might be speculated for.",
                    "none",
                    (
                        Query(
                            f"{_rate('outrider_decode_tokens_total', 'speculation')} / "
                            f"{_rate('outrider_decode_seconds_total', 'speculation')}",
                            "{{speculation}}",
                        ),
                    ),
                ),
                Panel(
                    "Draft temperature",
                    "By how much drafts are sampled warmer, by the target's temperature.",
                    "none",
                    (
                        Query(
                            "avg by (temperature) (outrider_draft_temperature_factor{$J}) or vector(1)",
                            "{{temperature}}",
                        ),
                    ),
                ),
            ),
        ),
        (
            "Time",
            (
                Panel(
                    "Waiting for proposals",
                    "Share of the time.",
                    "percentunit",
                    (Query(_rate("outrider_proposal_wait_seconds_total", "instance"), "{{instance}}"),),
                ),
                Panel(
                    "Late and dropped",
                    "Rounds that gave up waiting; proposals that were of no use.",
                    "none",
                    (
                        Query(_rate("outrider_late_rounds_total"), "late"),
                        Query(_rate("outrider_proposals_dropped_total", "reason"), "{{reason}}"),
                    ),
                ),
                Panel(
                    "Run-ahead hits",
                    "Rounds whose next proposal was there when their outcome came.",
                    "percentunit",
                    (
                        Query(
                            f"({_rate('outrider_run_ahead_hits_total')} or vector(0)) / clamp_min("
                            f"({_rate('outrider_run_ahead_hits_total')} or vector(0)) + "
                            f"({_rate('outrider_run_ahead_misses_total')} or vector(0)), 1e-9)",
                            "hits",
                        ),
                    ),
                ),
            ),
        ),
    ),
)

POOLS = Dashboard(
    "pools",
    "Outrider / Pools",
    (
        (
            "Targets",
            (
                Panel(
                    "Sequences",
                    "That hold KV blocks, and that wait for them.",
                    "none",
                    (
                        Query('vllm:num_requests_running{$J,engine!="router"}', "{{instance}} running"),
                        Query('vllm:num_requests_waiting{$J,engine!="router"}', "{{instance}} waiting"),
                    ),
                ),
                Panel(
                    "KV cache",
                    "Share in use.",
                    "percentunit",
                    (Query('vllm:kv_cache_usage_perc{$J,engine!="router"}', "{{instance}}"),),
                ),
                Panel(
                    "Step time",
                    "By kind of step.",
                    "s",
                    (
                        Query(
                            f"{_rate('outrider_step_seconds_total', 'kind')} / {_rate('outrider_steps_total', 'kind')}",
                            "{{kind}}",
                        ),
                    ),
                ),
                Panel(
                    "Preemptions",
                    "Sequences that lost their KV blocks.",
                    "none",
                    (Query(_rate("vllm:num_preemptions_total", "instance"), "{{instance}}"),),
                ),
                Panel(
                    "Stands still",
                    "1: work, and no step ends.",
                    "none",
                    (Query("outrider_engine_stuck{$J}", "{{instance}}"),),
                ),
                Panel(
                    "Prefix cache",
                    "Share of prompt tokens whose KV was there.",
                    "percentunit",
                    (
                        Query(
                            f"{_rate('vllm:prefix_cache_hits_total')} "
                            f"/ clamp_min({_rate('vllm:prefix_cache_queries_total')}, 1e-9)",
                            "hits",
                        ),
                    ),
                ),
            ),
        ),
        (
            "Links",
            (
                Panel(
                    "Up",
                    "Draft workers that a target is connected to, and has on its list.",
                    "none",
                    (
                        Query("outrider_draft_links_up{$J}", "{{instance}} up"),
                        Query("outrider_draft_links_configured{$J}", "{{instance}} listed"),
                    ),
                ),
                Panel(
                    "Round trip",
                    "Shortest of the last answers, by target and draft worker.",
                    "s",
                    (Query("outrider_link_round_trip_seconds{$J}", "{{instance}} {{draft}}"),),
                ),
                Panel(
                    "Bytes",
                    "Payload, by what it is.",
                    "Bps",
                    (Query(_rate("outrider_link_bytes_total", "kind, direction"), "{{kind}} {{direction}}"),),
                ),
                Panel(
                    "Moves and ejections",
                    "Sequences that went to another draft worker; workers that were silent.",
                    "none",
                    (
                        Query(_rate("outrider_sequences_moved_total"), "moved"),
                        Query(_rate("outrider_draft_trials_total"), "tried"),
                        Query(_rate("outrider_ejections_total"), "ejected"),
                    ),
                ),
                Panel(
                    "Refusals",
                    "Sequences that a draft worker would not draft for.",
                    "none",
                    (Query(f"{_rate('outrider_sequences_refused_total', 'reason')} or vector(0)", "{{reason}}"),),
                ),
            ),
        ),
        (
            "Draft workers",
            (
                Panel("Sequences", "Drafted for.", "none", (Query("outrider_draft_sequences{$J}", "{{instance}}"),)),
                Panel(
                    "Busy",
                    "Share of the time in steps, by the work of their rows: due proposals, running ahead, prompts.",
                    "percentunit",
                    (Query(_rate("outrider_draft_seconds_total", "instance, work"), "{{instance}} {{work}}"),),
                ),
                Panel(
                    "Step time",
                    "Of the drafter.",
                    "s",
                    (
                        Query(
                            f"{_rate('outrider_draft_step_seconds_total', 'instance')} "
                            f"/ {_rate('outrider_draft_steps_total', 'instance')}",
                            "{{instance}}",
                        ),
                    ),
                ),
            ),
        ),
    ),
)

_TARGETS, _DRAFTS = "count(outrider_engine_stuck{$J})", "count(outrider_draft_sequences{$J})"
_DOLLARS_A_SECOND = f"({_TARGETS} * $target_dollars + {_DRAFTS} * $draft_dollars) / 3600"
COST = Dashboard(
    "cost",
    "Outrider / Cost",
    (
        (
            "Dollars",
            (
                Panel("An hour", "Of all workers.", "currencyUSD", (Query(f"{_DOLLARS_A_SECOND} * 3600"),), True),
                Panel(
                    "A million tokens",
                    "Generated, at what is served now.",
                    "currencyUSD",
                    (Query(f"{_DOLLARS_A_SECOND} / {_TOKENS} * 1e6"),),
                    True,
                ),
                Panel(
                    "A million tokens without drafts",
                    "The same tokens at the speed of plain decoding, on the targets alone.",
                    "currencyUSD",
                    (
                        Query(
                            f"{_TARGETS} * $target_dollars / 3600 / ({_TOKENS} "
                            "/ avg(outrider_speculation_gain_ratio{$J})) * 1e6"
                        ),
                    ),
                    True,
                ),
                Panel(
                    "Tokens a second a target",
                    "Generated.",
                    "none",
                    (Query(f"{_TOKENS} / {_TARGETS}"),),
                    True,
                ),
            ),
        ),
        (
            "Over time",
            (
                Panel(
                    "Dollars per million tokens",
                    "Generated.",
                    "currencyUSD",
                    (Query(f"{_DOLLARS_A_SECOND} / {_TOKENS} * 1e6", "dollars"),),
                ),
                Panel("Workers", "That serve.", "none", (Query(_TARGETS, "targets"), Query(_DRAFTS, "drafts"))),
                Panel("Tokens a second", "Generated.", "none", (Query(_TOKENS, "tokens"),)),
            ),
        ),
    ),
    (
        ("target_dollars", "dollars an hour for a target", "14.7"),
        ("draft_dollars", "dollars an hour for a draft worker", "1.0"),
    ),
)

DASHBOARDS = (OVERVIEW, SPECULATION, POOLS, COST)


def to_json(dashboard: Dashboard) -> str:
    builder = (
        dashboards.Dashboard(dashboard.title)
        .uid(f"outrider-{dashboard.name}")
        .tags(["outrider"])
        .refresh("10s")
        .time("now-30m", "now")
        .timezone("browser")
        .with_variable(dashboards.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(
            dashboards.QueryVariable("job")
            .label("job")
            .datasource(_SOURCE)
            .query("label_values(outrider_requests_total, job)")
            .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(True)
            .include_all(True)
            .all_value(".*")
        )
    )
    for name, label, value in dashboard.constants:
        builder = builder.with_variable(dashboards.TextBoxVariable(name).label(label).default_value(value))
    for title, panels in dashboard.rows:
        builder = builder.with_row(dashboards.Row(title))
        for panel in panels:
            builder = builder.with_panel(_panel(panel))
    return JSONEncoder(sort_keys=True, indent=2).encode(builder.build()) + "\n"


_SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")


def _panel(panel: Panel) -> stat.Panel | timeseries.Panel:
    built: stat.Panel | timeseries.Panel
    if panel.is_number:
        built = stat.Panel().reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    else:
        built = timeseries.Panel().legend(common.VizLegendOptions().placement(LegendPlacement.BOTTOM).show_legend(True))
    built = (
        built.title(panel.title)
        .description(panel.description)
        .unit(panel.unit)
        .datasource(_SOURCE)
        .height(5 if panel.is_number else 8)
        .span(6 if panel.is_number else 8)
    )
    for index, query in enumerate(panel.queries):
        target = prometheus.Dataquery().ref_id(chr(ord("A") + index)).expr(query.promql).legend_format(query.legend)
        built = built.with_target(target)
    return built


if __name__ == "__main__":
    for each in DASHBOARDS:
        each.path.write_text(to_json(each), encoding="utf-8")
