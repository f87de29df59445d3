"""Every drafter on one target: what is accepted, and what it brings: `python -m bench.drafters`.

One stream, against a cluster without speculation; the two are interleaved as in `bench.speedup`. Layer-skip is
measured on the bundled target: the widened one has layers that do nothing, which would flatter it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from bench.machine import describe_machine
from bench.speedup import MEASURED, READY_TIMEOUT_SECONDS, measure, without_speculation
from cluster.config_file import load_config
from services.launch.local import LocalCluster

DRAFTERS: dict[str, tuple[str, ...]] = {
    "model": (),
    "model, int8": ("draft.quantization=int8",),
    "model, int4": ("draft.quantization=int4",),
    "self-int4": ("draft.drafter=self-int4",),
    "layer-skip, even": ("draft.drafter=layer-skip", "draft.layers=even"),
    "layer-skip, last-half": ("draft.drafter=layer-skip", "draft.layers=last-half"),
    "ngram": ("draft.drafter=ngram",),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.drafters", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("bench/results/drafters.json"))
    arguments = parser.parse_args()
    temperatures = [float(text) for text in arguments.temperatures.split(",")]
    base = load_config(None, [*MEASURED, *arguments.overrides])
    k = base.speculation.num_speculative_tokens
    print(f"{base.target.model}, k = {k}, one stream, {arguments.repeats} repeats\n")
    print("| drafter | T | accepted / drafted | acceptance length | speedup | draft ms | verify ms | decode ms |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    results = []
    with LocalCluster(without_speculation(base)) as plain:
        plain.wait_ready(READY_TIMEOUT_SECONDS)
        for name, overrides in DRAFTERS.items():
            config = load_config(None, [*MEASURED, *arguments.overrides, *overrides])
            with LocalCluster(config) as speculative:
                speculative.wait_ready(READY_TIMEOUT_SECONDS)
                for temperature in temperatures:
                    point = measure(plain, speculative, [k], 1, temperature, arguments)
                    results.append({"drafter": name, **point.to_json()})
                    (depth,) = point.depths
                    speedups = point.speedups(depth)
                    print(
                        f"| {name} | {temperature:g} | {depth.acceptance_rate:.3f} | {depth.acceptance_length:.2f} "
                        f"| {statistics.median(speedups):.2f} ({min(speedups):.2f}-{max(speedups):.2f}) "
                        f"| {depth.step_ms('outrider_draft_step'):.2f} "
                        f"| {depth.step_ms('outrider_step', ':verify'):.2f} "
                        f"| {point.plain.step_ms('outrider_step', ':decode'):.2f} |",
                        flush=True,
                    )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    document = {"target": base.target.model, "k": k, "machine": describe_machine(), "points": results}
    arguments.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
