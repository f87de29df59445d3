"""The command `outrider prove`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path

from tqdm import tqdm

from cluster.config import Config
from cluster.config.file import load_config
from cluster.errors import ConfigurationError
from cluster.model_folder import resolve_model_folder
from cluster.tokenization import Tokenizer
from services.argument_types import above_zero, not_below_zero, share, stream_counts
from services.doctor.cli import read_prompts
from services.prove.devices import choose_devices, parse_device
from services.prove.limit import Stopped, TimeLimit
from services.prove.measure import Results, measure
from services.prove.memory import fit_together, sharing_memory, with_room
from services.prove.predict import predict
from services.prove.report import ProofReport
from services.prove.systems import MODEL, Experiment, make_systems
from services.prove.vllm_server import is_vllm_installed
from services.settings import AppendOverride

EXAMPLE = "outrider prove --target-device cuda:0 --draft-device cuda:1 --engine vllm --minutes 30 --out proof"
_MAX_PROMPT_TOKENS = 512
# One target and one draft worker, without fixed ports that another program on this machine may have taken.
_SETTINGS = (
    *("router.host=127.0.0.1", "router.port=0", f"router.served_model_name={MODEL}", "router.admin_listen=null"),
    *("router.page=false", "router.api_keys_file=null", "logging.level=warning"),
    *("target.replicas=1", "draft.replicas=1", "target.metrics_port=0", "draft.metrics_port=0"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measures on two devices of this machine whether Outrider pays: `vllm serve` of the target, Outrider "
        "without drafts, with the draft on the target's device, and with a draft worker on a device of its own, "
        "alternating, with the same prompts and seeds. The planner's prediction is written to the report before "
        "the first measurement. DIR/report.md has tables, ratios and a verdict, DIR/report.json the raw figures. "
        "At the time limit, and on Ctrl-C, the report has the results so far. The exit code is 1 when tokens "
        "differ although target.numerics promises equal tokens, or when a system could not be measured."
    )
    parser.epilog = f"example: {EXAMPLE}"
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML configuration (default: all defaults)")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    pair = parser.add_argument_group("models and devices")
    for option, setting, metavar, purpose in (
        ("--target", "target.model", "MODEL", "Hugging Face folder, hub name or bundled model (default: as serve)"),
        (
            "--draft",
            "draft.model",
            "MODEL",
            "Hugging Face folder, hub name or bundled model, with the target's tokenizer",
        ),
    ):
        pair.add_argument(
            option,
            action=AppendOverride,
            dest="overrides",
            const=(setting,),
            default=[],
            metavar=metavar,
            help=purpose,
        )
    pair.add_argument(
        "--engine",
        action=AppendOverride,
        dest="overrides",
        const=("target.engine",),
        default=[],
        choices=("torch", "vllm"),
        help="engine of the target (default: torch); the same as --set target.engine",
    )
    pair.add_argument(
        "--target-device",
        type=parse_device,
        metavar="DEVICE",
        help="cuda:INDEX, or cpu:CORES such as cpu:0-3,8 (default: the first GPU, otherwise half of the cores)",
    )
    pair.add_argument(
        "--draft-device",
        type=parse_device,
        metavar="DEVICE",
        help="the same for the draft (default: the second GPU, otherwise the cores that the target leaves)",
    )
    pair.add_argument(
        "--peer", choices=("vllm", "none"), help="system to compare with (default: vllm if it is installed)"
    )
    load = parser.add_argument_group("load")
    load.add_argument(
        "--streams", type=stream_counts, default=(1, 4, 16), metavar="N,...", help="concurrent answers; default 1,4,16"
    )
    load.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="one prompt per line, of the kind that clients send: acceptance depends on it (default: Python source)",
    )
    load.add_argument(
        "--max-tokens", type=above_zero(int), default=128, metavar="N", help="tokens of an answer; default 128"
    )
    load.add_argument(
        "--answers", type=above_zero(int), default=4, metavar="N", help="answers per stream and repeat; default 4"
    )
    load.add_argument("--temperature", type=not_below_zero, default=1.0, metavar="T", help="default 1")
    load.add_argument("--no-stream", action="store_true", help="request whole answers, without times of single tokens")
    load.add_argument("--repeats", type=above_zero(int), default=5, metavar="N", help="default 5")
    parser.add_argument(
        "--acceptance",
        type=share,
        default=0.78,
        metavar="RATE",
        help="acceptance rate assumed by the prediction; default 0.78",
    )
    parser.add_argument(
        "--minutes",
        type=above_zero(float),
        default=30.0,
        metavar="M",
        help="time limit of the whole command; default 30",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the report")


def run(arguments: argparse.Namespace) -> int:
    """Measures the systems and writes the report. Returns the exit code.

    The code is 1 if tokens differ against a promise or a system could not be measured, and 128 plus the signal if a
    signal ended it. Raises ConfigurationError.
    """
    experiment = read_experiment(arguments)
    _make_folder(arguments.out)
    together = fit_together(experiment)
    systems = make_systems(experiment)
    results = Results(experiment, [system.name for system in systems])
    report = ProofReport(experiment, systems, results, together, ["outrider", *sys.argv[1:]])
    report.write(arguments.out)
    with TimeLimit(60.0 * arguments.minutes) as limit:
        try:
            report.forecasts = predict(experiment)
            report.predicted_at = datetime.now(UTC)
            report.write(arguments.out)
            total = experiment.repeats * len(experiment.streams) * len(systems)
            with tqdm(total=total, desc="measured", file=sys.stderr, disable=None) as progress:

                def did_one() -> None:
                    report.write(arguments.out)
                    progress.update()

                measure(systems, results, limit, together=together, did_one=did_one)
        except Stopped as stopped:
            report.stopped = str(stopped)
        with limit.shielded():
            report.ended_at = datetime.now(UTC)
            report.write(arguments.out)
            print(report.markdown(), end="", flush=True)
    if limit.signum is not None:
        return 128 + signal.Signals(limit.signum)
    return 1 if report.breaks_promise or results.problems else 0


def read_experiment(arguments: argparse.Namespace) -> Experiment:
    """Returns the experiment that `arguments` describe. Raises ConfigurationError."""
    config = load_config(arguments.config, [*arguments.overrides, *_SETTINGS], os.environ)
    has_peer = _has_peer(arguments.peer, config)
    if not config.has_drafter:
        raise ConfigurationError(
            "there is no draft to place: set speculation.num_speculative_tokens above 0, and another draft.drafter "
            "than engine"
        )
    if config.draft.reads_states:
        raise ConfigurationError(
            f"draft.drafter {config.draft.drafter} drafts in the target's process only, so there are no placements to "
            "compare: name another draft.drafter"
        )
    target, draft = choose_devices(arguments.target_device, arguments.draft_device)
    tokenizer = Tokenizer(resolve_model_folder(config.target.model))
    prompts = [tokenizer.encode(text)[:_MAX_PROMPT_TOKENS] for text in read_prompts(arguments.prompts)]
    longest = max(map(len, prompts)) + arguments.max_tokens
    config = sharing_memory(with_room(config, arguments.streams, longest), target)
    return Experiment(
        config=config,
        target=target,
        draft=draft,
        streams=arguments.streams,
        prompts=prompts,
        max_tokens=arguments.max_tokens,
        answers=arguments.answers,
        temperature=arguments.temperature,
        repeats=arguments.repeats,
        is_streamed=not arguments.no_stream,
        has_peer=has_peer,
        acceptance_rate=arguments.acceptance,
    )


def _has_peer(wanted: str | None, config: Config) -> bool:
    if wanted is None:
        return is_vllm_installed() and config.target.engine != "simulated"
    if wanted == "vllm" and not is_vllm_installed():
        raise ConfigurationError("--peer vllm: vLLM is not installed: run `make setup-vllm`, or give --peer none")
    return wanted == "vllm"


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"--out {folder}: the folder cannot be made: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise ConfigurationError(f"--out {folder} may not be written: name another folder")
