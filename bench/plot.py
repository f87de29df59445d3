"""Draws what `bench.speedup` measured: `python -m bench.plot RESULT.json` writes RESULT.svg."""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
# The same picture gives the same file.
matplotlib.rcParams["svg.hashsalt"] = "outrider"

from matplotlib import pyplot as plt  # noqa: E402 (the backend is chosen first)

SERIES = (("tokens_per_second", "speculation"), ("plain_tokens_per_second", "no speculation"))


def plot(result: Path) -> Path:
    """Tokens per second over the number of streams, a panel a temperature, bars from the lowest to the highest."""
    measured: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    temperatures = sorted({point["temperature"] for point in measured["points"]})
    figure, _ = plt.subplots(1, len(temperatures), figsize=(4.5 * len(temperatures), 3.2), sharey=True)
    for axes, temperature in zip(figure.axes, temperatures, strict=True):
        points = [point for point in measured["points"] if point["temperature"] == temperature]
        streams = [point["num_streams"] for point in points]
        places = range(len(streams))  # evenly: 1, 4, 8, 16
        for key, label in SERIES:
            medians = [statistics.median(point[key]) for point in points]
            below = [median - min(point[key]) for median, point in zip(medians, points, strict=True)]
            above = [max(point[key]) - median for median, point in zip(medians, points, strict=True)]
            axes.errorbar(places, medians, yerr=(below, above), marker="o", capsize=3, label=label)
        axes.set(title=f"T = {temperature:g}", xlabel="streams", ylim=(0, None))
        axes.set_xticks(places, streams)
    figure.axes[0].set_ylabel("tokens/s")
    figure.axes[0].legend(frameon=False)
    name, k = Path(measured["target"]["model"]).name, measured["speculation"]["num_speculative_tokens"]
    figure.suptitle(f"{name}, k = {k}, {measured['machine']['processor']}", fontsize=9)
    figure.tight_layout()
    picture = result.with_suffix(".svg")
    figure.savefig(picture, metadata={"Date": None})
    plt.close(figure)
    return picture


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.plot", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("result", type=Path, help="JSON written by bench.speedup")
    print(plot(parser.parse_args().result))


if __name__ == "__main__":
    main()
