"""Draws what `bench.peers` measured: tokens a second of every system, a panel for each point, into RESULT.svg."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "outrider"  # the same picture gives the same file

from matplotlib import pyplot as plt  # noqa: E402 (the backend is chosen first)


def plot(result: Path) -> Path:
    measured: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    points, systems = measured["points"], measured["systems"]
    temperatures = sorted({t for t, _ in points})
    streams = sorted({n for _, n in points})
    figure, panels = plt.subplots(
        len(temperatures), len(streams), figsize=(4.2 * len(streams), 2.6 * len(temperatures)), squeeze=False
    )
    for row, t in enumerate(temperatures):
        for column, n in enumerate(streams):
            axes, key = panels[row][column], f"{t:g}/{n}"
            names = [name for name in systems if systems[name].get(key)]
            rates = [[r["tokens_per_second"] for r in systems[name][key]] for name in names]
            medians = [statistics.median(rate) for rate in rates]
            spread = [
                [median - min(rate) for median, rate in zip(medians, rates, strict=True)],
                [max(rate) - median for median, rate in zip(medians, rates, strict=True)],
            ]
            colours = ["black" if name.startswith("Outrider") else "grey" for name in names]
            axes.barh(names, medians, xerr=spread, color=colours, height=0.7, error_kw={"linewidth": 0.8})
            axes.invert_yaxis()
            axes.set_title(f"T = {t:g}, {n} stream{'s' if n > 1 else ''}", fontsize=8)
            axes.tick_params(labelsize=6)
            if column:
                axes.set_yticklabels([])
    figure.suptitle(f"tokens/s, {measured['machine']['processor']}", fontsize=9)
    figure.tight_layout()
    picture = result.with_suffix(".svg")
    figure.savefig(picture, metadata={"Date": None})
    plt.close(figure)
    return picture
