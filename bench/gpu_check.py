"""Runs all checks that need a GPU: `python -m bench.gpu_check` (`make gpu-check`).

Each check is a row: its subject, whether it held, and its figures. A check that fails or raises is a row too, and the
others still run. Choices and noise are compared with the CPU's, answers with those of a cluster without drafts, and the
Triton kernels with PyTorch's operators (`bench.gpu_kernels_check`, `bench.gpu_product_check`). Speed is measured with
the bundled target widened by `bench.models`, which keeps the acceptance of the bundled pair. The bundled draft runs on
the CPU and on the same GPU.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench import gpu_kernels_check, gpu_product_check
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
SECONDS = 400  # of a bench that is run as a program


def check_sampling() -> list[Row]:
    """The choice of every row, on both devices from the same logits."""
    rows = []
    for vocab_size in VOCAB_SIZES:
        logits = 3 * torch.randn(16 * len(PARAMS), vocab_size, generator=torch.Generator().manual_seed(vocab_size))
        requests = [
            SampleRequest(PARAMS[i % len(PARAMS)], NoiseKey.derive(i, 0), [i + 1, 7, 7, 11], 2, num_rows=1)
            for i in range(len(logits))
        ]
        expected, seen = (Sampler(d).sample(logits.to(d), requests) for d in (CPU, GPU))
        scores = perturbed_logits(logits, requests)
        different = [i for i, (a, b) in enumerate(zip(expected, seen, strict=True)) if a != b]
        ties = sum(float(scores[i, expected[i]] - scores[i, seen[i]]) < NEAR_TIE for i in different)
        figures: dict[str, Any] = {"rows": len(logits), "different": len(different), "near_ties": ties}
        for temperature in (0.0, 1.0):
            for num_rows in (1, 16, 64):
                params = SamplingParams(temperature=temperature)
                asked = [SampleRequest(params, NoiseKey.derive(i, 1), [1], 1) for i in range(num_rows)]
                sample = partial(Sampler(GPU).sample, logits[:num_rows].to(GPU), asked)
                figures[f"ms, T={temperature:g}, {num_rows} rows"] = milliseconds(sample)
        rows.append(
            Row(
                f"coupled sampling, vocabulary of {vocab_size}",
                len(different) == ties,
                f"{len(different)} of {len(logits)} choices differ from the CPU's, {ties} of them near-ties",
                figures,
            )
        )
    return rows


def check_constraints() -> list[Row]:
    """Choices among allowed tokens, and log-probabilities, on both devices from the same logits."""
    rows = []
    for vocab_size in VOCAB_SIZES:
        generator = torch.Generator().manual_seed(vocab_size)
        logits = 3 * torch.randn(16 * len(PARAMS), vocab_size, generator=generator)
        words = torch.randint(-(2**31), 2**31, (len(logits), -(-vocab_size // 32)), generator=generator)
        allowed = words.to(torch.int32)
        requests = [
            SampleRequest(
                PARAMS[i % len(PARAMS)], NoiseKey.derive(i, 0), [i + 1, 7, 7, 11], 2, allowed=allowed[i : i + 1]
            )
            for i in range(len(logits))
        ]
        expected, seen = (Sampler(d).sample(logits.to(d), requests) for d in (CPU, GPU))
        scores = perturbed_logits(logits, requests)
        different = [i for i, (a, b) in enumerate(zip(expected, seen, strict=True)) if a != b]
        ties = sum(float(scores[i, expected[i]] - scores[i, seen[i]]) < NEAR_TIE for i in different)
        places, on_gpu = range(len(logits)), logits.to(GPU)
        wanted, found = (token_logprobs(on, places, expected, 5) for on in (logits, on_gpu))
        error = max(abs(a - b) for a, b in zip(wanted.top_logprobs, found.top_logprobs, strict=True))
        same = (wanted.ranks, wanted.top_token_ids) == (found.ranks, found.top_token_ids)
        one = [SampleRequest(SamplingParams(), NoiseKey.derive(i, 1), [1], 1) for i in range(16)]
        masked = [replace(request, allowed=allowed[i : i + 1]) for i, request in enumerate(one)]
        figures = {
            "ms, 16 rows": milliseconds(partial(Sampler(GPU).sample, on_gpu[:16], one)),
            "ms, 16 rows with masks": milliseconds(partial(Sampler(GPU).sample, on_gpu[:16], masked)),
            "ms, 5 log-probabilities of 16 rows": milliseconds(
                partial(token_logprobs, on_gpu, range(16), expected[:16], 5)
            ),
        }
        seen_text = f"{len(different)} choices differ, {ties} near-ties; log-probabilities by at most {error:.1e}"
        held = len(different) == ties and error < 1e-4 and same
        rows.append(Row(f"masks and log-probabilities, vocabulary of {vocab_size}", held, seen_text, figures))
    return rows


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
            "sampling": lambda: check_sampling() + gpu_kernels_check.check_sampling(GPU, VOCAB_SIZES, PARAMS),
            "constraints": check_constraints,
            **{name: partial(check, GPU) for name, check in gpu_kernels_check.CHECKS.items()},
            **{name: partial(check, GPU) for name, check in gpu_product_check.CHECKS.items()},
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
