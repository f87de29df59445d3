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


def plot(result: Path) -> Path:
    """Speedup over no speculation by the number of streams, a panel a temperature and a line a depth.

    The controller's has bars from the lowest repeat to the highest.
    """
    measured: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    temperatures = sorted({point["temperature"] for point in measured["points"]})
    figure, _ = plt.subplots(1, len(temperatures), figsize=(4.5 * len(temperatures), 3.2), sharey=True)
    for axes, temperature in zip(figure.axes, temperatures, strict=True):
        points = [point for point in measured["points"] if point["temperature"] == temperature]
        streams = [point["num_streams"] for point in points]
        places = range(len(streams))  # evenly: 1, 4, 8, 16
        axes.axhline(1.0, color="grey", linewidth=0.8)
        for depth in points[0]["depths"]:
            speedups = [point["depths"][depth]["speedups"] for point in points]
            medians = [statistics.median(own) for own in speedups]
            if depth == "auto":
                below = [median - min(own) for median, own in zip(medians, speedups, strict=True)]
                above = [max(own) - median for median, own in zip(medians, speedups, strict=True)]
                axes.errorbar(places, medians, (below, above), color="black", marker="o", capsize=3, label=depth)
            else:
                axes.plot(places, medians, linewidth=0.9, label=f"k = {depth}")
        axes.set(title=f"T = {temperature:g}", xlabel="streams", ylim=(0, None))
        axes.set_xticks(places, streams)
    figure.axes[0].set_ylabel("speedup over no speculation")
    figure.axes[0].legend(frameon=False, fontsize=7)
    name = Path(measured["target"]["model"]).name
    figure.suptitle(f"{name}, {measured['machine']['processor']}", fontsize=9)
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
