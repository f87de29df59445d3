"""Runs all checks that need a GPU: `python -m bench.gpu_check` (`make gpu-check`).

Each check is a row: its subject, whether it held, and its figures. A check that fails or raises is a row too, and the
others still run. Choices and noise are compared with the CPU's, answers with those of a cluster without drafts, and the
kernels with PyTorch's operators (`bench.gpu_kernels`). Speed is measured with the bundled target widened by
`bench.models`, which keeps the acceptance of the bundled pair. The bundled draft runs on the CPU and on the same GPU.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch

from bench import gpu_kernels
from bench.gpu_rows import (
    PAIR_INTERMEDIATE_SIZE,
    PAIR_WIDTH_FACTOR,
    RESULTS,
    ROWS,
    VERDICTS,
    VOCAB_SIZES,
    Row,
    milliseconds,
    not_listed,
)
from bench.models import make_pair
from bench.result import describe_machine, write_result
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.speculation.sampling import Sampler, SampleRequest, perturbed_logits
from cluster.speculation.scoring import token_logprobs
from cluster.speculation.triton_sampler import best_tokens

CPU, GPU = torch.device("cpu"), torch.device("cuda")
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=40),
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=1.0, min_p=0.05),
    SamplingParams(temperature=1.2, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2),
    SamplingParams(temperature=1.0, logit_bias=((7, 4.0), (11, -100.0))),
)
NEAR_TIE = 1e-4  # of logit / T + g
NEAR_TIE_OF_KERNELS = 1e-6  # noise may differ in float32's last bit, all else is equal
SECONDS = 400  # of a bench that is run as a program


@dataclass(frozen=True, slots=True)
class Choices:
    """Choices of rows on the GPU, compared with those of the CPU from the same logits."""

    num_rows: int
    num_different: int
    num_near_ties: int  # of those that differ

    @classmethod
    def compare(
        cls, logits: torch.Tensor, requests: Sequence[SampleRequest], own: Sequence[int], near_tie: float
    ) -> Choices:
        expected, scores = Sampler(CPU).sample(logits, requests), perturbed_logits(logits, requests)
        different = [i for i, (a, b) in enumerate(zip(expected, own, strict=True)) if a != b]
        ties = sum(float(scores[i, expected[i]] - scores[i, own[i]]) < near_tie for i in different)
        return cls(len(own), len(different), ties)

    @property
    def is_same(self) -> bool:
        return self.num_different == self.num_near_ties

    def __str__(self) -> str:
        return (
            f"{self.num_different} of {self.num_rows} choices differ from the CPU's, {self.num_near_ties} of them "
            "near-ties"
        )


def check_sampling() -> list[Row]:
    """Compares the choice of every row by the sampler, and by the kernels alone."""
    timed = {
        "coupled": {f"T={t:g}": SamplingParams(temperature=t) for t in (0.0, 1.0)},
        "Triton": {"T=1, top-p 0.9": SamplingParams(top_k=50, top_p=0.9)},
    }
    sampler, rows = Sampler(GPU), []
    for (kind, params), vocab_size in itertools.product(timed.items(), VOCAB_SIZES):
        logits, requests = _rows(vocab_size)
        on_gpu = logits.to(GPU)
        if kind == "coupled":
            own, near_tie = sampler.sample(on_gpu, requests), NEAR_TIE
        else:
            own, near_tie = best_tokens(on_gpu, requests, 1)[0].flatten().tolist(), NEAR_TIE_OF_KERNELS
        choices = Choices.compare(logits, requests, own, near_tie)
        figures = {
            f"ms, {name}, {count} rows": milliseconds(partial(sampler.sample, on_gpu[:count], _asked(each, count)))
            for (name, each), count in itertools.product(params.items(), (1, 16, 64))
        }
        rows.append(Row(f"{kind} sampling, vocabulary of {vocab_size}", choices.is_same, str(choices), figures))
    return rows


def check_constraints() -> list[Row]:
    """Choices among allowed tokens, and log-probabilities, on both devices from the same logits."""
    rows = []
    for vocab_size in VOCAB_SIZES:
        logits, requests = _rows(vocab_size)
        generator = torch.Generator().manual_seed(vocab_size + 1)
        words = torch.randint(-(2**31), 2**31, (len(logits), -(-vocab_size // 32)), generator=generator)
        allowed = words.to(torch.int32)
        requests = [replace(request, allowed=allowed[i : i + 1]) for i, request in enumerate(requests)]
        places, on_gpu = range(len(logits)), logits.to(GPU)
        own = Sampler(GPU).sample(on_gpu, requests)
        choices = Choices.compare(logits, requests, own, NEAR_TIE)
        wanted, found = (token_logprobs(on, places, own, 5) for on in (logits, on_gpu))
        error = max(abs(a - b) for a, b in zip(wanted.top_logprobs, found.top_logprobs, strict=True))
        same = (wanted.ranks, wanted.top_token_ids) == (found.ranks, found.top_token_ids)
        one = _asked(SamplingParams(), 16)
        masked = [replace(request, allowed=allowed[i : i + 1]) for i, request in enumerate(one)]
        figures = {
            "ms, 16 rows": milliseconds(partial(Sampler(GPU).sample, on_gpu[:16], one)),
            "ms, 16 rows with masks": milliseconds(partial(Sampler(GPU).sample, on_gpu[:16], masked)),
            "ms, 5 log-probabilities of 16 rows": milliseconds(partial(token_logprobs, on_gpu, range(16), own[:16], 5)),
        }
        seen = f"{choices}; log-probabilities by at most {error:.1e}"
        held = choices.is_same and error < 1e-4 and same
        rows.append(Row(f"masks and log-probabilities, vocabulary of {vocab_size}", held, seen, figures))
    return rows


def _rows(vocab_size: int) -> tuple[torch.Tensor, list[SampleRequest]]:
    """Returns logits on the CPU, and a request for each row."""
    logits = 3 * torch.randn(16 * len(PARAMS), vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    return logits, [
        SampleRequest(PARAMS[i % len(PARAMS)], NoiseKey.derive(i, 0), [i + 1, 7, 7, 11], 2) for i in range(len(logits))
    ]


def _asked(params: SamplingParams, count: int) -> list[SampleRequest]:
    return [SampleRequest(params, NoiseKey.derive(i, 1), [1], 1) for i in range(count)]


def check_answers() -> list[Row]:
    """Compares answers of whole clusters over HTTP (see `bench.exactness`). In bfloat16 near-ties may differ."""
    rows = []
    for dtype in ("float32", "bfloat16"):
        out = _run("bench.exactness", "--dtype", dtype, "--numerics", "fast", "--tokens", "5000")
        held = out.count(": 0 tokens differ") == 3 if dtype == "float32" else None
        rows.append(Row(f"answers under speculation, {dtype}", held, " / ".join(out.strip().splitlines())))
    return rows


def check_engine(pair: Path, results: Path) -> list[Row]:
    """Measures the time of a step by its rows, for each model with the GPU to itself."""
    rows = []
    for name, quantizations in (("draft", ""), ("target", "int8,int4")):
        row = f"cost of a step, {name}"
        out = results / RESULTS[row]
        arguments = ("--model", str(pair / name), "--quantizations", quantizations, "--repeats", "20")
        rows.append(Row(row, None, "\n" + _run("bench.engine", *arguments, "--out", str(out))))
    return rows


def check_speed(pair: Path, results: Path) -> list[Row]:
    """Measures speed with and without speculation, over HTTP.

    Two processes on one GPU take turns of some milliseconds each.
    """
    rows = []
    for device, temperatures in (("cpu", "0,1"), ("cuda", "0")):
        settings = [f"target.model={pair}/target", f"draft.model={pair}/draft", f"draft.device={device}"]
        sets = [part for setting in (*settings, "target.kv_cache_bytes=4000000000") for part in ("--set", setting)]
        row = f"speedup, target on the GPU, draft on {device}"
        out = _run(
            *("bench.speedup", *sets, "--streams", "1,4,16", "--depths", "auto,0,2,4", "--temperatures", temperatures),
            *("--prompts", "4", "--max-tokens", "128", "--repeats", "3"),
            *("--out", str(results / RESULTS[row])),
        )
        rows.append(Row(row, None, "\n" + out))
    return rows


def _run(module: str, *arguments: str) -> str:
    """Runs a bench and returns its output. Its log goes to this program's. Raises RuntimeError if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, text=True, timeout=SECONDS, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{module} ended with code {done.returncode}: {done.stdout[-500:]}")
    return done.stdout


def run(checks: dict[str, Callable[[], list[Row]]], out: Path) -> list[Row]:
    rows: list[Row] = []
    machine = describe_machine() | {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    today = datetime.now(UTC).date().isoformat()
    for name, check in checks.items():
        started_at = time.perf_counter()
        try:
            found = check()
            if (wrong := not_listed(name, found)) is not None:
                found.append(wrong)
        except Exception as error:
            traceback.print_exc()
            found = [Row(name, False, f"{type(error).__name__}: {error}")]
        print(f"{name}: {time.perf_counter() - started_at:.0f} s", file=sys.stderr, flush=True)
        for row in found:
            print(f"{VERDICTS[row.held]}: {row.check}: {row.seen} {row.figures or ''}", flush=True)
        rows += found
        document = {"date": today, "machine": machine, "rows": [asdict(row) for row in rows]}
        write_result(out, document)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.gpu_check", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=tuple(ROWS))
    parser.add_argument("--out", type=Path, default=None, help="default: bench/results/gpu.json")
    arguments = parser.parse_args(argv)
    if arguments.only and arguments.out is None:
        parser.error("--only needs an --out: what was committed has all checks")
    arguments.out = arguments.out or Path("bench/results/gpu.json")
    if not torch.cuda.is_available():
        print("PyTorch sees no GPU: nothing is checked", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        pair, results = Path(folder), arguments.out.parent
        checks: dict[str, Callable[[], list[Row]]] = {
            "sampling": check_sampling,
            "constraints": check_constraints,
            **{name: partial(check, GPU) for name, check in gpu_kernels.CHECKS.items()},
            "answers": check_answers,
            "engine": lambda: check_engine(pair, results),
            "speed": lambda: check_speed(pair, results),
        }
        chosen = {name: check for name, check in checks.items() if not arguments.only or name in arguments.only}
        if chosen.keys() & {"engine", "speed"}:
            make_pair(pair, width_factor=PAIR_WIDTH_FACTOR, intermediate_size=PAIR_INTERMEDIATE_SIZE)
        rows = run(chosen, arguments.out)
    return int(any(row.held is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
