"""The command `outrider tune`."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from tqdm import tqdm

from cluster.config import Config
from cluster.config.file import load_config, parse_config, read_tree
from cluster.diagnosis.measurements import Workload
from cluster.errors import ConfigurationError, UnavailableError
from services.argument_types import above_zero
from services.doctor.cli import add_load_arguments, examine_cluster, read_prompts
from services.launch.local import LocalCluster
from services.output_file import check_output
from services.running_cluster.access import Access
from services.running_cluster.load import LoadMaker
from services.running_cluster.workers import look_around
from services.terminal import as_line
from services.tune.candidates import Settings, SettingsCandidate, candidates

_LEAST_GAIN = 1.03  # minimum gain to keep a setting: less may be chance


@dataclass(frozen=True, slots=True)
class Trial:
    """Comparison of a candidate with the best settings so far, run alternately."""

    candidate: SettingsCandidate
    ratios: tuple[float, ...]  # ratios of their tokens per second; empty: it could not be tried
    problem: str = ""

    @property
    def gain(self) -> float:
        return statistics.median(self.ratios) if self.ratios else 0.0

    @property
    def is_better(self) -> bool:
        """True if the candidate is faster in the median of the repeats, and in each of them."""
        return self.gain >= _LEAST_GAIN and min(self.ratios) > 1.0

    def line(self) -> str:
        if not self.ratios:
            return f"  {self.candidate.name}: not possible: {self.problem}"
        kept = "kept" if self.is_better else "left unchanged"
        spread = f"{min(self.ratios):.2f} to {max(self.ratios):.2f}"
        return f"  {self.candidate.name}: {self.gain:.2f} times ({spread}), {kept}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Starts the cluster of a configuration on this machine, lets the doctor examine it, tries the drafts that are "
        "given and the settings that may solve its findings, each against the best so far, and writes a configuration "
        "with those that were faster. None of them changes a token of an answer, except for threads where PyTorch's "
        "operators compute in place of the kernels: their rounding depends on the number of threads."
    )
    parser.epilog = "example: outrider tune --set target.threads=8 --out tuned.yaml"
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML configuration (default: all defaults)")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="YAML configuration to write")
    load = add_load_arguments(parser)
    parser.add_argument(
        "--draft",
        dest="drafts",
        action="append",
        default=[],
        metavar="MODEL",
        help="a draft model, one that drafts in one pass, or a head (EAGLE, Medusa) to compare; may be repeated",
    )
    load.add_argument("--trials", type=above_zero(int), default=3, metavar="N", help="repeats of a trial; default 3")


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit code: 1 if nothing was faster. Raises ConfigurationError."""
    check_output("--out", arguments.out)
    prompts = read_prompts(arguments.prompts)
    # Two clusters run at the same time: neither may need a fixed port.
    free = [f"{name}=0" for name in ("router.port", "target.metrics_port", "draft.metrics_port")]
    overrides = [*arguments.overrides, *free, "router.admin_listen=null", "logging.level=warning"]
    config = load_config(arguments.config, overrides, os.environ)
    drafts = _draft_settings(config, arguments.drafts)
    with LocalCluster(config) as cluster:
        cluster.wait_ready()
        report = examine_cluster(
            cluster.url,
            num_streams=arguments.streams,
            temperatures=arguments.temperatures[:1],
            max_tokens=arguments.max_tokens,
            seconds=arguments.seconds,
            repeats=arguments.repeats,
            prompts=prompts,
            config=config,
            access=Access.to_own(cluster),
        )
    for finding in report.findings:
        print(as_line(f"{finding.name}: {finding.what}"))
    chosen: list[str] = []
    trials: list[Trial] = []
    for candidate in candidates(config, report.findings, drafts):
        trial = _try(arguments, [*overrides, *chosen], candidate, prompts)
        trials.append(trial)
        print(as_line(trial.line()), flush=True)
        if trial.is_better:
            chosen += candidate.settings
    if not (report.findings or drafts):
        print("The doctor finds nothing wrong: there is nothing to try.")
    _write(arguments, chosen, trials)
    return 0 if chosen else 1


def _try(
    arguments: argparse.Namespace, best: Sequence[str], candidate: SettingsCandidate, prompts: Sequence[str]
) -> Trial:
    """Runs both clusters at once, and puts them under the load one after the other."""
    workload = Workload(arguments.streams, arguments.temperatures[0], None)
    try:
        configs = [
            load_config(arguments.config, settings, os.environ) for settings in (best, [*best, *candidate.settings])
        ]
        with LocalCluster(configs[0]) as old, LocalCluster(configs[1]) as new:
            makers = []
            for cluster in (old, new):
                cluster.wait_ready()
                access = Access.to_own(cluster)
                makers.append(LoadMaker(look_around(cluster.url, access), prompts, arguments.max_tokens, access))
            ratios = []
            with tqdm(total=arguments.trials, desc=candidate.name, file=sys.stderr, disable=None) as progress:
                for trial in range(arguments.trials):
                    before, after = (
                        maker.measured(
                            workload, maker.run(workload, arguments.seconds, part=trial, num_parts=arguments.trials)
                        ).counts.tokens_per_second
                        for maker in makers
                    )
                    ratios.append(after / max(before, 1e-9))
                    progress.update()
    except (ConfigurationError, UnavailableError) as error:
        return Trial(candidate, (), str(error))
    return Trial(candidate, tuple(ratios))


def _draft_settings(config: Config, drafts: Sequence[str]) -> Sequence[Settings]:
    if config.target.engine == "simulated":
        return ()
    from services.tune.drafts import draft_settings  # it imports torch

    return list(draft_settings(config.target.model, drafts))


def _write(arguments: argparse.Namespace, chosen: Sequence[str], trials: Sequence[Trial]) -> None:
    """Writes the given configuration with the chosen settings, and the trials as comments."""
    tree = read_tree(arguments.config)
    parse_config(tree, [*arguments.overrides, *chosen])  # writes them into the configuration
    comments = [f"# {line}" for trial in trials for line in trial.line().strip().splitlines()]
    head = "# Written by `outrider tune`; tokens per second relative to the best until then:\n" if trials else ""
    arguments.out.write_text(
        head + "".join(f"{comment}\n" for comment in comments) + yaml.safe_dump(tree, sort_keys=False), encoding="utf-8"
    )
    print(f"{arguments.out}: {', '.join(chosen) or 'as it was'}")
