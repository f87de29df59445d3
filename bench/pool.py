"""Measures a remote draft pool in virtual time: `python -m bench.pool`.

A 70B target has its draft on another GPU; 1 to 8 targets share one draft worker. The router's choice, step
loops, coordinators, blocks and draft workers are the real ones (`cluster.simulator`). Messages take half the delay and
the programs' overheads, and steps take the time that the planner predicts (`cluster.planning.kernel_tables`). Every
stream sends its next request when the last is answered. Each figure is compared with k = 0, with the same draft on the
target's own GPUs, and with the bound, which assumes that drafting is hidden behind verification:

    E(k) t(n) / max(t(n (1 + k)), k t_draft(n) + delay)    times k = 0, the maximum over k

A parallel draft makes all k tokens in one step of n (1 + k) rows, in place of k steps of n. Its acceptance is taken
to be the same at each position; in sampled text it falls (docs/DECISIONS.md).
The bound leaves out prompts and the programs' own time. `--drafts free` shows what is left of it for a draft whose
steps take no time: 0.79 at 8 streams and acceptance 0.8.

All figures are per target. *planned* is what `outrider plan cluster` predicts for the case.

With `--programs` each case also runs as programs in real time, one after the other: router, targets, draft worker, gRPC
between them through a proxy that delays, HTTP clients. Only forward passes are replaced by their times. *ran* is their
tokens per second over those in virtual time.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench import simulate
from bench.in_process import SIMULATED
from bench.result import write_cells
from cluster.config import Config
from cluster.config.file import load_config
from cluster.drafters.read_tokens import NUM_SINKS, ContextTokens, context_choices
from cluster.engine.memory_plan import PlannedModel
from cluster.planning.hardware import parse_gpus
from cluster.planning.kernel_tables import step_predictor
from cluster.planning.prediction import ExpectedLoad, Option, plan
from cluster.planning.round_costs import RUN_AHEAD_HIDES, Drafting
from cluster.planning.steps import StepPredictor, context_ms, curve_points
from cluster.simulated_engines.steps import StepCurve
from cluster.simulator.cluster import MeasuredSpan, SimulatedCluster
from cluster.simulator.figures import Figures
from cluster.simulator.traffic import ClosedTraffic, Lengths
from cluster.speculation.speed import expected_tokens

TARGET = "70B"
DRAFTS = {"1B": "1B", "1B-int4": "1B:int4", "0.5B": "0.5B", "parallel-1B": "1B"}
OWN = "own"  # a card: the GPUs of the target itself
FREE = "free"  # a draft whose steps take no time
ANSWER_TOKENS = 256
_ROWS = (1, 8, 16, 32, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096)
_WARM_UP_SHARE = 0.3
_NUM_BLOCKS = 100_000  # more than any case needs
_KV_CACHE_BYTES = 2**30  # more than any case needs of the bundled target's blocks, which are counted and never filled
_MAX_DEPTH = 16
_ANSWERS = Lengths(ANSWER_TOKENS // 2, ANSWER_TOKENS * 3 // 2)


@functools.cache
def predicted_steps(model: str, gpus: str) -> StepPredictor:
    return step_predictor(PlannedModel.parse(model), parse_gpus(gpus))


def step_curve(
    model: str, gpus: str, streams: int, num_read: float, rows: Sequence[int] = _ROWS
) -> list[tuple[int, float]]:
    """Returns the planner's milliseconds of steps of `rows`, of `streams` sequences with `num_read` tokens each."""
    return [*curve_points(predicted_steps(model, gpus), streams, num_read, rows)]


@dataclass(frozen=True, slots=True)
class Case:
    draft: str | None  # a key of DRAFTS; None: no speculation
    card: str  # the draft's GPUs; OWN: the target's own, which draft and verify in turn
    delay_ms: float  # there and back
    targets: int
    streams: int  # of each target
    acceptance: float
    prompt_tokens: int = 128
    target_gpus: str = "4xA100-80"
    fixed_k: int | None = None  # None: the controller chooses
    context_tokens: ContextTokens = None  # at the end of a prompt, which the draft reads; None: all

    @property
    def draft_gpus(self) -> str:
        return self.target_gpus if self.card == OWN else self.card

    @property
    def target_curve(self) -> list[tuple[int, float]]:
        return step_curve(TARGET, self.target_gpus, self.streams, self.num_held)

    @property
    def num_held(self) -> float:
        """Tokens of a prompt and of half an answer."""
        return self.prompt_tokens + ANSWER_TOKENS / 2

    def draft_curve(self, num_read: float = 0) -> list[tuple[int, float]]:
        """Returns the milliseconds of the draft's steps by rows, with sequences of `num_read` tokens."""
        assert self.draft is not None
        if self.draft == FREE:
            return [(1, 0.0)]
        return step_curve(DRAFTS[self.draft], self.draft_gpus, self.streams, num_read)

    @property
    def num_read(self) -> int:
        """Tokens of a prompt that the draft reads; with auto, the fewest that it may choose."""
        if self.context_tokens is None:
            return self.prompt_tokens
        read = context_choices(self.prompt_tokens)[0] if self.context_tokens == "auto" else self.context_tokens
        return self.prompt_tokens if read is None else min(self.prompt_tokens, NUM_SINKS + read)

    @property
    def draft_context_ms(self) -> list[float]:
        assert self.draft is not None
        if self.draft == FREE:
            return [0.0, 0.0]
        return [*context_ms(predicted_steps(DRAFTS[self.draft], self.draft_gpus), self.streams)]

    @property
    def is_one_pass(self) -> bool:
        return self.draft is not None and self.draft.startswith("parallel-")

    @property
    def bound(self) -> float:
        """Speedup over k = 0 if drafting were hidden behind verification."""
        target, draft = StepCurve(self.target_curve), StepCurve(self.draft_curve(self.num_held))
        n, delay = self.streams, self.delay_ms / 1e3

        def round_seconds(k: int) -> float:
            drafting = draft.at(n * (1 + k)) if self.is_one_pass else k * draft.at(n)
            return max(target.at(n * (1 + k)), drafting + delay)

        return max(
            expected_tokens(self.acceptance, k) * target.at(n) / round_seconds(k) for k in range(1, _MAX_DEPTH + 1)
        )

    @property
    def planned(self) -> float | None:
        """Speedup over k = 0 that the planner predicts; None for a free draft."""
        assert self.draft is not None
        if self.draft == FREE:
            return None
        target, draft = (
            predicted_steps(model, gpus)
            for model, gpus in ((TARGET, self.target_gpus), (DRAFTS[self.draft], self.draft_gpus))
        )
        hidden = RUN_AHEAD_HIDES / self.targets if self.card != OWN else 0.0
        drafting = Drafting(draft, self.acceptance, self.delay_ms / 1e3, hidden, self.is_one_pass, self.num_read)
        load = ExpectedLoad(self.streams, self.prompt_tokens, ANSWER_TOKENS)
        plain, drafted = (plan(Option("", target, each), load) for each in (None, drafting))
        return drafted.tokens_per_second / plain.tokens_per_second

    @property
    def settings(self) -> tuple[str, ...]:
        settings: dict[str, object] = {
            "simulation.target_step_ms": [list(point) for point in self.target_curve],
            "simulation.acceptance": self.acceptance,
            "simulation.round_trip_ms": self.delay_ms,
            "target.replicas": self.targets,
            "target.max_num_seqs": 2 * self.streams,
            "target.max_num_batched_tokens": 2048,
            "target.enable_prefix_caching": "false",
            "draft.max_num_seqs": 2 * self.targets * self.streams,
            "draft.max_num_batched_tokens": 2048,
        }
        if self.draft is None:
            settings |= {"speculation.num_speculative_tokens": 0, "draft.replicas": 0}
        else:
            settings["simulation.draft_step_ms"] = [list(point) for point in self.draft_curve()]
            settings["simulation.draft_context_ms"] = self.draft_context_ms
            settings["draft.context_tokens"] = "null" if self.context_tokens is None else self.context_tokens
            settings["simulation.is_one_pass"] = str(self.is_one_pass).lower()
            if self.fixed_k is not None:
                settings |= {"speculation.controller": "fixed", "speculation.num_speculative_tokens": self.fixed_k}
            if self.card == OWN:
                settings |= {"draft.placement": "in-process", "draft.in_process_threads": "shared"}
        return tuple(f"{key}={value}" for key, value in settings.items())

    @property
    def config(self) -> Config:
        return load_config(None, [*SIMULATED, *self.settings])

    @property
    def dollars_per_hour(self) -> float:
        dollars = self.targets * parse_gpus(self.target_gpus).dollars_per_hour
        has_own_card = self.draft is not None and self.card != OWN
        return dollars + (parse_gpus(self.card).dollars_per_hour if has_own_card else 0.0)


@functools.cache  # cases share the runs that they are compared with
def run(case: Case, seconds: float) -> Figures:
    warm_up, until = _WARM_UP_SHARE * seconds, (1 + _WARM_UP_SHARE) * seconds
    prompts = Lengths(case.prompt_tokens, case.prompt_tokens)
    traffic = ClosedTraffic(case.targets * case.streams, until, prompts, _ANSWERS, 0, warm_up / 2)
    cluster = SimulatedCluster(case.config, traffic, _NUM_BLOCKS, MeasuredSpan(warm_up, until, is_cut=True))
    cluster.run()
    return cluster.figures(case.dollars_per_hour)


@dataclass(frozen=True, slots=True)
class Cell:
    """Figures of one case, per target. Without speculation the target gives `k0` tokens per second."""

    case: Case
    tokens_per_second: float
    k0: float
    beside: float  # tokens per second with the draft on the target's own GPUs
    bound: float  # times `k0`
    planned: float | None  # times `k0`
    waiting_share: float
    draft_busy: float
    mean_k: float
    p99_between_ms: float | None  # None: no answer ended
    p99_between_k0_ms: float | None
    dollars_per_million: float | None
    dollars_per_million_k0: float | None
    programs_tokens_per_second: float | None = None  # None: not run

    @property
    def gain(self) -> float:
        return self.tokens_per_second / self.k0

    def columns(self) -> dict[str, Any]:
        """Returns the case and its figures in one dictionary."""
        figures = asdict(self)
        return {**figures.pop("case"), **figures}


def measure(case: Case, seconds: float) -> Cell:
    one = replace(case, card=OWN, delay_ms=0.0, targets=1)
    pool, beside, plain = (run(each, seconds) for each in (case, one, replace(one, draft=None, acceptance=0.0)))
    between, between_plain = (
        None if figures.per_output_token is None else 1e3 * figures.per_output_token.p99 for figures in (pool, plain)
    )
    return Cell(
        case,
        tokens_per_second=pool.tokens_per_second / case.targets,
        k0=plain.tokens_per_second,
        beside=beside.tokens_per_second,
        bound=case.bound,
        planned=case.planned,
        waiting_share=sum(target.wait_share for target in pool.targets) / case.targets,
        draft_busy=pool.drafts[0].utilization,
        mean_k=pool.mean_k,
        p99_between_ms=between,
        p99_between_k0_ms=between_plain,
        dollars_per_million=pool.dollars_per_million_tokens,
        dollars_per_million_k0=plain.dollars_per_million_tokens,
    )


def with_programs(cell: Cell, seconds: float) -> Cell:
    """Returns `cell` with the tokens per second of a cluster of programs on this machine."""
    case, warm_up = cell.case, _WARM_UP_SHARE * seconds
    settings = (*case.settings, f"target.kv_cache_bytes={_KV_CACHE_BYTES}")
    programs = simulate.Case(
        "", settings, _ANSWERS, Lengths(case.prompt_tokens, case.prompt_tokens), case.targets * case.streams
    )
    ran = simulate.measure(programs, warm_up + seconds, warm_up)
    return replace(cell, programs_tokens_per_second=ran.tokens_per_second / case.targets)


def cases(arguments: argparse.Namespace) -> list[Case]:
    """Returns all numbers of streams and acceptances with the first card and delay, then one change at a time.

    Other cards, delays and numbers of targets have `--shared-streams` and the last acceptance. With `--grid` all
    drafts, cards, numbers of targets and of streams, with the first delay and the last acceptance.
    """
    made = []
    if arguments.grid:
        grid = itertools.product(arguments.drafts, arguments.cards, [1, *arguments.targets], arguments.streams)
        delay_ms, acceptance = arguments.delays[0], arguments.acceptances[-1]
        made = [Case(draft, card, delay_ms, targets, streams, acceptance) for draft, card, targets, streams in grid]
    for draft in () if arguments.grid else arguments.drafts:
        first = Case(draft, arguments.cards[0], arguments.delays[0], 1, arguments.shared_streams, 0.0)
        for acceptance in arguments.acceptances:
            made += [replace(first, streams=streams, acceptance=acceptance) for streams in arguments.streams]
        first = replace(first, acceptance=arguments.acceptances[-1])
        made += [replace(first, card=card) for card in arguments.cards]
        made += [replace(first, delay_ms=delay_ms) for delay_ms in arguments.delays]
        made += [replace(first, targets=targets) for targets in arguments.targets]
    settings = itertools.product(arguments.prompts, arguments.fixed, arguments.context_tokens)
    return [
        replace(case, prompt_tokens=tokens, target_gpus=arguments.target_gpus, fixed_k=k, context_tokens=context_tokens)
        for tokens, k, context_tokens in settings
        for case in dict.fromkeys(made)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    print(
        "| draft | card | prompt | read | delay ms | targets | streams | acceptance | tokens/s | over k = 0 "
        "| over beside | planned | of the bound | k | waits | draft busy | p99 between over k = 0 "
        "| $ per million, k = 0 | ran |"
    )
    print(f"|{' --- |' * 19}")
    cells = []
    with ProcessPoolExecutor(arguments.parallel) as pool:
        made = cases(arguments)
        simulated = pool.map(measure, made, [arguments.seconds] * len(made))
        if arguments.programs:  # when nothing else takes the cores
            simulated = (with_programs(cell, arguments.programs) for cell in list(simulated))
        for cell in simulated:
            cells.append(cell)
            print(_row(cell), flush=True)
    used = {(TARGET, arguments.target_gpus)} | {
        (DRAFTS[case.draft], case.draft_gpus) for case in made if case.draft not in (None, FREE)
    }
    for model, gpus in sorted(used):
        print(predicted_steps(model, gpus).source or f"{model} on {gpus}: by formula")
    write_cells(arguments.out, "bench.pool", argv, [cell.columns() for cell in cells])
    return 0


def _row(cell: Cell) -> str:
    dollars = "" if cell.dollars_per_million is None else f"{cell.dollars_per_million:.2f}"
    plain = "" if cell.dollars_per_million_k0 is None else f"{cell.dollars_per_million_k0:.2f}"
    planned = "–" if cell.planned is None else f"{cell.planned:.2f}"
    between = "–"
    if cell.p99_between_ms and cell.p99_between_k0_ms:
        between = f"{cell.p99_between_ms / cell.p99_between_k0_ms:.2f}"
    case, programs = cell.case, cell.programs_tokens_per_second
    ran = "" if programs is None else f"{programs / cell.tokens_per_second:.2f}"
    return (
        f"| {case.draft} | {case.card} | {case.prompt_tokens} | {case.context_tokens or 'all'} "
        f"| {case.delay_ms:g} | {case.targets} | {case.streams} | {case.acceptance:g} "
        f"| {cell.tokens_per_second:.0f} | {cell.gain:.2f} | {cell.tokens_per_second / cell.beside:.2f} "
        f"| {planned} | {cell.gain / cell.bound:.2f} | {cell.mean_k:.1f} "
        f"| {cell.waiting_share:.0%} | {cell.draft_busy:.0%} | {between} | {dollars}, {plain} | {ran} |"
    )


def _parser() -> argparse.ArgumentParser:
    def numbers(text: str) -> list[float]:
        return [float(number) for number in text.split(",")]

    def counts(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    def contexts(text: str) -> list[ContextTokens]:
        return ["auto" if number == "auto" else int(number) for number in text.split(",")]

    parser = argparse.ArgumentParser(prog="bench.pool", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--drafts", type=lambda text: text.split(","), default=[*DRAFTS])
    parser.add_argument("--cards", type=lambda text: text.split(","), default=["A10G", "L4", "L40S"])
    parser.add_argument("--target-gpus", default="4xA100-80")
    parser.add_argument("--prompts", type=counts, default=[128, 500, 2000, 8000], help="tokens of each prompt")
    parser.add_argument(
        "--context-tokens", type=contexts, default=[None], help="tokens that drafts read, or auto; default: all"
    )
    parser.add_argument("--fixed", type=counts, default=[None], metavar="K", help="depths, in place of the controller")
    parser.add_argument("--delays", type=numbers, default=[0.5, 0.2, 2.0], help="ms, there and back")
    parser.add_argument("--streams", type=counts, default=[1, 8, 16, 32, 64], help="of each target")
    parser.add_argument("--acceptances", type=numbers, default=[0.6, 0.7, 0.8])
    parser.add_argument(
        "--targets", type=counts, default=[2, 4, 8], help="that share a draft worker, at --shared-streams"
    )
    parser.add_argument("--shared-streams", type=int, default=8)
    parser.add_argument("--grid", action="store_true", help="all drafts x cards x targets x streams")
    parser.add_argument("--seconds", type=float, default=30.0, help="of virtual time that is measured")
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--programs", type=float, metavar="SECONDS", help="also run programs, each case this long")
    parser.add_argument("--out", type=Path, default=Path("bench/results/pool.json"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
