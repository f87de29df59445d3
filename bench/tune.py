"""Does the tuner mend what the doctor finds? `python -m bench.tune --pair DIR`.

`outrider tune` is given clusters that `bench.doctor` makes sick, of the pair that `bench.models` makes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.doctor import sicknesses
from bench.machine import describe_machine
from bench.speedup import MEASURED
from services.cli import main as outrider


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.tune", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pair", type=Path, required=True, help="folder that `bench.models` wrote")
    parser.add_argument("--only", nargs="+", default=["draft the bottleneck", "KV cache exhausted"])
    parser.add_argument("--seconds", type=float, default=3.0, help="of each load")
    parser.add_argument("--trials", type=int, default=3, help="repeats of each comparison")
    parser.add_argument("--out", type=Path, default=Path("bench/results/tune.json"))
    arguments = parser.parse_args(argv)
    tuned = []
    with tempfile.TemporaryDirectory() as name:
        strongest = {one.name: one for one in sicknesses(arguments.pair, Path(name))}  # which is the last of its name
        if unknown := set(arguments.only) - strongest.keys():
            parser.error(f"--only {', '.join(sorted(unknown))}: here are {', '.join(strongest)}")
        for sickness in map(strongest.__getitem__, arguments.only):
            models = [f"{pool}.model={arguments.pair / pool}" for pool in ("target", "draft")]
            settings = [*MEASURED, *models, "draft.placement=pool", *sickness.settings]
            out = Path(name) / "tuned.yaml"
            load = ["--streams", sickness.num_streams, "--seconds", arguments.seconds, "--trials", arguments.trials]
            print(f"{sickness.name}, {sickness.strength}:", flush=True)
            options = [part for setting in settings for part in ("--set", setting)]
            code = outrider(["tune", *options, *map(str, load), "--out", str(out)])
            if code > 1:
                return code
            comments = [line[2:] for line in out.read_text(encoding="utf-8").splitlines() if line.startswith("# ")]
            tuned.append(
                {
                    "sickness": sickness.name,
                    "strength": sickness.strength,
                    "is_faster": not code,
                    "trials": comments[1:],
                }
            )
    document = {"machine": describe_machine(), "clusters": tuned}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
