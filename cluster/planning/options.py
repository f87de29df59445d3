"""Alternative placements of a draft (`Option`), for given models and GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from cluster.engine.memory_plan import Budget, Memory, PlannedModel, Tenant, plan_pair
from cluster.errors import ConfigurationError
from cluster.planning.hardware import DEFAULT_HOST_CPU, GpuGroup
from cluster.planning.kernel_tables import step_predictor
from cluster.planning.prediction import Option
from cluster.planning.round_costs import MAX_DEPTH, RUN_AHEAD_HIDES, Drafting
from cluster.planning.steps import ASSUMED, Efficiency, NoSteps, Roofline
from cluster.speculation.speed import Acceptance, scaled

PLAIN, HEAD, BESIDE = "no speculation", "EAGLE head in the target", "draft on the target's GPUs"
"Names of options."

# Published: a 7B draft of a 70B target has an acceptance of 0.78 in FP16 and 0.724 in INT4.
INT4_ACCEPTANCE_SHARE = 0.724 / 0.78
# Assumed of a draft on a device of its own: with `draft.context_tokens: auto` it reads the last tokens of a prompt, and
# how many depends on the texts.
DRAFT_CONTEXT_TOKENS = 512
NGRAM_ACCEPTANCE = 0.3  # published: 0.20 to 0.40
# Time of one sequence for transport and for coordination that target or draft waits for: `bench.coordination`, 2 cores
# of Zen 5.
LOCAL_ROUND_TRIP_SECONDS = 0.9e-3


@dataclass(frozen=True, slots=True)
class ClusterRequest:
    """The cluster to plan."""

    target: PlannedModel
    target_gpus: GpuGroup
    drafts: tuple[PlannedModel, ...]  # alternatives
    draft_gpus: GpuGroup
    acceptance: Acceptance
    round_trips_seconds: tuple[float, ...]  # round trips to a remote pool
    sidecar_round_trip_seconds: float
    host_cpu: GpuGroup = DEFAULT_HOST_CPU  # the draft's share of the target's host
    int4_acceptance: Acceptance | None = None  # None: in the published ratio
    head_acceptance: Acceptance | None = None  # None: the draft's
    one_pass_acceptance: Acceptance | None = None  # None: the draft's
    ngram_acceptance: Acceptance = NGRAM_ACCEPTANCE
    suffix_acceptance: Acceptance | None = None  # None: unknown
    efficiency: Efficiency = ASSUMED
    num_speculative_tokens: int | None = None  # None: the best number
    memory_utilization: float = 0.9
    block_size: int = 16

    def __post_init__(self) -> None:
        others = (self.int4_acceptance, self.head_acceptance, self.one_pass_acceptance, self.suffix_acceptance)
        for acceptance in (self.acceptance, self.ngram_acceptance, *others):
            for rate in acceptance if isinstance(acceptance, tuple) else (acceptance or 0.0,):
                if not 0.0 <= rate <= 1.0:
                    raise ConfigurationError(f"an acceptance rate lies between 0 and 1, not {rate:g}")


def options(request: ClusterRequest) -> Iterator[Option]:
    """Yields the option without speculation, then the options with it. All have the same target."""
    alone = Option(
        PLAIN,
        step_predictor(request.target, request.target_gpus, request.efficiency),
        target_dollars_per_hour=request.target_gpus.dollars_per_hour,
        budgets=(Budget((Tenant("target", request.target, 0),), _memory(request, request.target_gpus)),),
        num_speculative_tokens=request.num_speculative_tokens,
    )
    yield alone
    for draft in request.drafts:
        for option in _placements(request, alone, draft):
            yield option if len(request.drafts) == 1 else replace(option, name=f"{draft.name}, {option.name}")
    if request.target.steps is not None:
        head = _beside(request, alone, _head_of(request.target), request.head_acceptance)
        yield replace(head, name=HEAD)
    yield replace(alone, name="n-gram", drafting=Drafting(NoSteps(), request.ngram_acceptance))
    if request.suffix_acceptance is not None:
        yield replace(alone, name="suffix decoding", drafting=Drafting(NoSteps(), request.suffix_acceptance))


def main_options(request: ClusterRequest) -> Iterator[Option]:
    """Yields the options that differ in how they draft. A pool has a draft device for each target."""
    for option in options(request):
        if not option.name.startswith(("sidecar", "host-cpu")):
            yield replace(option, is_pool=False)


def _placements(request: ClusterRequest, alone: Option, draft: PlannedModel) -> Iterator[Option]:
    """Yields the options with `draft`."""
    beside = _beside(request, alone, draft)
    yield beside
    yield _in_one_pass(request, beside)
    yield _apart(request, alone, "sidecar", draft, request.sidecar_round_trip_seconds)
    pools = [
        replace(_apart(request, alone, f"pool, {1e3 * seconds:g} ms away", draft, seconds), is_pool=True)
        for seconds in request.round_trips_seconds
    ]
    yield from pools
    yield from (_in_one_pass(request, pool) for pool in pools)
    if draft.dtype != "int4":
        int4 = replace(draft, dtype="int4")
        yield _apart(request, alone, "sidecar, INT4 draft", int4, request.sidecar_round_trip_seconds, is_quantized=True)
    yield _on_host_cpu(request, alone, draft)


def _in_one_pass(request: ClusterRequest, option: Option) -> Option:
    assert option.drafting is not None
    acceptance = option.drafting.acceptance if request.one_pass_acceptance is None else request.one_pass_acceptance
    drafting = replace(option.drafting, acceptance=acceptance, is_one_pass=True)
    return replace(option, name=f"{option.name}, one pass", drafting=drafting)


def _head_of(target: PlannedModel) -> PlannedModel:
    """Returns an EAGLE head (arXiv 2401.15077): a layer of `target`, and a projection of token and hidden state.

    The parameters of the target's output head count, because each draft step reads them, too.
    """
    assert target.steps is not None
    hidden, vocabulary = target.steps.hidden_size, target.steps.vocab_size * target.steps.hidden_size
    in_layers = (target.num_parameters - (target.num_end_parameters or 2 * vocabulary)) // target.num_layers
    return replace(target, name="head", num_parameters=in_layers + 2 * hidden * hidden + vocabulary, num_layers=1)


def _beside(
    request: ClusterRequest, alone: Option, draft: PlannedModel, acceptance: Acceptance | None = None
) -> Option:
    """Returns the option with the draft on the target's GPUs, divided among them like the target.

    `acceptance`: None: that of the request.
    """
    steps = step_predictor(draft, request.target_gpus, request.efficiency)
    return replace(
        alone,
        name=BESIDE,
        drafting=Drafting(steps, request.acceptance if acceptance is None else acceptance),
        budgets=plan_pair(request.target, draft, _depth(request), _memory(request, request.target_gpus)),
    )


def _apart(
    request: ClusterRequest,
    alone: Option,
    name: str,
    draft: PlannedModel,
    round_trip: float,
    *,
    is_quantized: bool = False,
) -> Option:
    """Returns the option with the draft on its own GPUs.

    `is_quantized`: whether `draft` is in INT4, but the user requested another dtype.
    """
    acceptance = request.acceptance
    if is_quantized:
        measured = request.int4_acceptance
        acceptance = scaled(acceptance, INT4_ACCEPTANCE_SHARE) if measured is None else measured
    steps = step_predictor(draft, request.draft_gpus, request.efficiency)
    drafting = Drafting(steps, acceptance, round_trip, RUN_AHEAD_HIDES, context_tokens=DRAFT_CONTEXT_TOKENS)
    option = _on_own_device(request, alone, name, draft, drafting, request.draft_gpus)
    return replace(option, draft_dollars_per_hour=request.draft_gpus.dollars_per_hour)


def _on_host_cpu(request: ClusterRequest, alone: Option, draft: PlannedModel) -> Option:
    """Returns the option with the draft on cores of the target's host, at no additional price.

    The draft is in INT8, which halves the time to read it, or in INT4 if that is its dtype. INT8 is assumed not to
    change the acceptance rate.
    """
    draft = draft if draft.dtype in ("int8", "int4") else replace(draft, dtype="int8")
    steps = Roofline(draft.with_wide_head(), request.host_cpu, request.efficiency)
    round_trip = request.sidecar_round_trip_seconds
    drafting = Drafting(steps, request.acceptance, round_trip, RUN_AHEAD_HIDES, context_tokens=DRAFT_CONTEXT_TOKENS)
    return _on_own_device(request, alone, f"host-cpu, {draft.dtype.upper()} draft", draft, drafting, request.host_cpu)


def _on_own_device(
    request: ClusterRequest, alone: Option, name: str, draft: PlannedModel, drafting: Drafting, device: GpuGroup
) -> Option:
    """Returns the option with memory for the draft on `device`; the caller adds the draft's price."""
    memories = (_memory(request, request.target_gpus), _memory(request, device))
    budgets = plan_pair(request.target, draft, _depth(request), *memories)
    return replace(alone, name=name, drafting=drafting, budgets=budgets)


def _depth(request: ClusterRequest) -> int:
    """Returns the depth for which memory is planned."""
    return max(1, MAX_DEPTH if request.num_speculative_tokens is None else request.num_speculative_tokens)


def _memory(request: ClusterRequest, gpus: GpuGroup) -> Memory:
    return Memory(gpus.memory_gb, request.memory_utilization, request.block_size)
