"""Tables of runs on a GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from bench import gpu_rows, gpu_vllm, roofline
from bench.report.page import Results, markdown

_ENGINE_FILES = ("gpu.json", "gpu-engine-target.json", "gpu-engine-draft.json")
_CHECK_FILES = ("gpu-constraints.json", "gpu-product.json", "gpu-triton.json")
_SHOWN_STEPS = {(1, 1), (64, 1)}  # sequences, rows
_PRODUCT_ROWS = (1, 16, 64, 2048)


def vllm(results: Results) -> str:
    document = results.read("gpu-vllm.json")
    return f"{_run(document)}\n\n{gpu_vllm.table(document)}"


def _run(document: Mapping[str, Any]) -> str:
    return f"{document['gpu']}, {document['date']}, commit `{document['commit']}`."


def speedup(results: Results) -> str:
    points = [
        {
            (point["num_streams"], point["temperature"]): point["depths"]
            for point in results.read(f"gpu-speedup-draft-on-{place}.json")["points"]
        }
        for place in ("cpu", "cuda")
    ]
    rows = [
        [f"{temperature:g}", streams, *(_ratios(own.get((streams, temperature))) for own in points)]
        for streams, temperature in points[0]
        if streams < 16  # at 16 streams two clusters without drafts differ by more than any two depths
    ]
    return markdown(["T", "streams", "draft on the CPU", "draft on the same GPU"], rows)


def _ratios(depths: Mapping[str, Any] | None) -> str:
    if depths is None:
        return ""
    return ", ".join(f"{statistics.median(depths[k]['speedups']):.2f}" for k in ("auto", "2", "4"))


def steps(results: Results) -> str:
    _, compared = roofline.compare(results.folder_of(*_ENGINE_FILES))
    shown = [one for one in compared if (one.num_seqs, one.rows) in _SHOWN_STEPS and "draft" not in one.model]
    return roofline.compared_table(shown)


def checks(results: Results) -> str:
    found: dict[str, dict[str, None]] = {}
    for row, verdict in gpu_rows.verdicts(results.folder_of(*_ENGINE_FILES, *_CHECK_FILES)).items():
        found.setdefault(verdict, {})[row.partition(", vocabulary")[0]] = None
    return markdown(["verdict", "checks"], ((verdict, "; ".join(rows)) for verdict, rows in found.items()))


def products(results: Results) -> str:
    rows = results.read("gpu-product.json")["rows"]
    (times,) = [row["figures"] for row in rows if "times" in row["check"]]
    names = dict.fromkeys(name.partition(",")[0] for name in times)

    def ratio(name: str, number: int) -> str:
        ours, theirs = (times[f"{name}, {kind}, {number} rows"]["us"] for kind in ("fixed", "cuBLAS"))
        return f"{ours / theirs:.2f}"

    return markdown(
        ["product", *(f"{number:,}" for number in _PRODUCT_ROWS)],
        ([name, *(ratio(name, number) for number in _PRODUCT_ROWS)] for name in names),
    )


TABLES: dict[str, Callable[[Results], str]] = {
    "gpu-vllm": vllm,
    "gpu-speedup": speedup,
    "gpu-steps": steps,
    "gpu-checks": checks,
    "gpu-products": products,
}
