"""The command `outrider doctor`."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.config import Config
from cluster.diagnosis.findings import findings
from cluster.diagnosis.measurements import Examination
from cluster.diagnosis.waterfall import Waterfall, predicted_draft, waterfall
from cluster.errors import ConfigurationError
from services.argument_types import above_zero, temperature_list
from services.doctor.checks import with_programs
from services.doctor.examine import REPORTED_DEPTH, ExaminationPlan, examine
from services.doctor.report import DoctorReport
from services.held_out import held_out_texts
from services.http_call import router_url
from services.launch.local import LocalCluster
from services.output_file import check_output
from services.running_cluster.access import Access, access_of, add_access_arguments, config_of
from services.running_cluster.load import LoadMaker
from services.running_cluster.workers import look_around

_PROMPT_CHARACTERS = 400
_NUM_PROMPTS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Runs a few known loads on a running cluster and reports whether the draft suits the target, the gain of "
        "speculation, where the rest of the formula's speedup is lost, the problems, their costs, and the "
        "changes that help. Its requests share the cluster with others, which make the measurements less certain."
    )
    parser.epilog = (
        "With --seconds 1 --repeats 1 a first look takes about half a minute, and its figures vary more. "
        "example: outrider doctor --url http://127.0.0.1:8000 --streams 4"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--url", type=router_url, metavar="URL", help="address of the router; default http://127.0.0.1:8000"
    )
    which.add_argument(
        "--start",
        action="store_true",
        help="start the cluster of --config and --set on this machine, and end it afterwards",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="YAML configuration of the cluster to start, or with the `tls` to use",
    )
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    add_access_arguments(parser)
    add_load_arguments(parser)
    parser.add_argument(
        "--baseline",
        type=Path,
        metavar="FILE",
        help="an earlier --json of this cluster: reports the drift of the draft since, and its gain without drift",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report to this file")


def add_load_arguments(parser: argparse.ArgumentParser) -> Any:
    """Adds the options of the load; returns their group."""
    load = parser.add_argument_group("loads")
    load.add_argument(
        "--streams", type=above_zero(int), default=4, metavar="N", help="concurrent streams on each target; default 4"
    )
    load.add_argument(
        "--temperatures",
        type=temperature_list,
        default=(0.0, 0.7, 1.0),
        metavar="T,...",
        help="all loads use the first, the others are compared with it; default 0,0.7,1",
    )
    load.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="one prompt per line, of the kind that clients send: acceptance depends on it (default: Python source)",
    )
    load.add_argument(
        "--max-tokens", type=above_zero(int), default=96, metavar="N", help="tokens of an answer; default 96"
    )
    load.add_argument(
        "--seconds",
        type=above_zero(float),
        default=3.0,
        metavar="S",
        help="duration of a load; default 3; the load with k = auto is repeated three times as often",
    )
    load.add_argument("--repeats", type=above_zero(int), default=3, metavar="N", help="repeats of all loads; default 3")
    return load


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit code: 1 if there is a finding. Raises ConfigurationError."""
    report = diagnose(arguments)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report.to_json(), indent=2) + "\n", encoding="utf-8")
    print(report.text())
    return 1 if report.findings else 0


def diagnose(arguments: argparse.Namespace) -> DoctorReport:
    """Raises ConfigurationError."""
    check_output("--json", arguments.json)
    earlier = read_baseline(arguments.baseline, arguments.temperatures[0])
    prompts = read_prompts(arguments.prompts)
    if arguments.start:  # the configuration of the started programs
        arguments.overrides = ["logging.level=warning", *arguments.overrides]
    config = config_of(arguments)
    with _cluster(arguments, config) as (url, access):
        return examine_cluster(
            url,
            num_streams=arguments.streams,
            temperatures=arguments.temperatures,
            max_tokens=arguments.max_tokens,
            seconds=arguments.seconds,
            repeats=arguments.repeats,
            prompts=prompts,
            config=config,
            access=access,
            earlier_survival=earlier,
        )


def examine_cluster(
    url: str,
    *,
    num_streams: int = 4,
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0),
    max_tokens: int = 96,
    seconds: float = 3.0,
    repeats: int = 3,
    prompts: Sequence[str] = (),
    config: Config | None = None,
    access: Access | None = None,
    earlier_survival: Sequence[float] = (),
) -> DoctorReport:
    """Returns the report of the cluster whose router is at `url`. Raises ConfigurationError.

    `access`: None: as `config` defines it; a router with TLS is verified as this machine trusts it. `num_streams`:
    streams on each target.
    """
    config = config or Config()
    access = access or Access.of(config)
    facts = look_around(url, access)
    max_depth = min(target.max_speculative_tokens for target in facts.targets)
    if max_depth == 0:
        raise ConfigurationError(
            f"the targets of {url} have speculation.num_speculative_tokens 0: there is nothing to examine"
        )
    plan = ExaminationPlan(num_streams, temperatures, max_depth, seconds, repeats)
    maker = LoadMaker(facts, prompts or read_prompts(None), max_tokens, access)
    found = examine(maker, plan)
    wrong = with_programs(findings(found, earlier_survival), facts)
    return DoctorReport(facts, found, wrong, _waterfall(found, config, earlier_survival) if found.has_drafts else None)


def _waterfall(found: Examination, config: Config, earlier_survival: Sequence[float]) -> Waterfall:
    earlier = earlier_survival[0] if earlier_survival else None
    reported = min(found.fixed, key=lambda one: abs((one.workload.num_speculative_tokens or 0) - REPORTED_DEPTH))
    predicted = predicted_draft(found.alone, reported, equal=_equal_acceptance(found, config), earlier=earlier)
    return waterfall(found.plain, reported, predicted, found.network_seconds)


def _equal_acceptance(found: Examination, config: Config) -> float | None:
    """Returns the acceptance if drafts were sampled as the target's tokens are; None: they are.

    It is about that at T = 0, where both are greedy.
    """
    if config.speculation.acceptance != "greedy" or found.auto.workload.temperature == 0:
        return None
    greedy = [one.counts.survival for one in found.temperatures if one.workload.temperature == 0]
    return greedy[0][0] if greedy and greedy[0] else None


@contextlib.contextmanager
def _cluster(arguments: argparse.Namespace, config: Config) -> Iterator[tuple[str, Access]]:
    if not arguments.start:
        yield arguments.url or "http://127.0.0.1:8000", access_of(arguments, config)
        return
    with LocalCluster(config) as cluster:
        cluster.wait_ready()
        yield cluster.url, Access.to_own(cluster)


def read_prompts(file: Path | None) -> list[str]:
    """Returns the prompts of `file`, one a line; without a file pieces of Python source. Raises ConfigurationError."""
    if file is None:
        texts = [held_out.text for held_out in held_out_texts()]
        return [text[len(text) // 3 :][:_PROMPT_CHARACTERS] for text in texts if len(text) > 3 * _PROMPT_CHARACTERS][
            :_NUM_PROMPTS
        ]
    try:
        prompts = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--prompts {file} cannot be read: {error}") from error
    if not prompts:
        raise ConfigurationError(f"--prompts {file} has no line that is not empty")
    return prompts


def survival_of(report: Mapping[str, Any], temperature: float) -> tuple[float, ...]:
    """Returns the survival of draft tokens by depth that `report` has for `temperature`.

    Raises ConfigurationError if it has none for that temperature, and ValueError if its numbers are not shares.
    """
    reported = {float(one["temperature"]): one["survival"] for one in report["suitability"]}
    if temperature not in reported:
        known = ", ".join(f"{one:g}" for one in reported)
        raise ConfigurationError(f"it has the temperatures {known or 'none'}, and not {temperature:g}")
    shares = [float(share) for share in reported[temperature]]
    if not all(0.0 <= share <= 1.0 for share in shares):
        raise ValueError("a share is not from 0 to 1")
    return tuple(share for depth, share in enumerate(shares) if any(shares[depth:]))


def read_baseline(file: Path | None, temperature: float) -> tuple[float, ...]:
    if file is None:
        return ()
    try:
        survival = survival_of(json.loads(file.read_text(encoding="utf-8")), temperature)
    except ConfigurationError as error:
        raise ConfigurationError(f"--baseline {file}: {error}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigurationError(f"--baseline {file} was not written by `outrider doctor --json`: {error!r}") from error
    if not survival:
        raise ConfigurationError(f"--baseline {file} is of a cluster whose drafts were never accepted: use another one")
    return survival
