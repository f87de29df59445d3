"""Tables of the whole cluster: exactness, speed next to no speculation and next to vLLM."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bench.report.page import Results, markdown, median

_SPEEDUPS = {
    "Sapphire Rapids": ["speedup-190m", "speedup-190m-4", "speedup-190m-16", "speedup-190m-64"],
    "Zen 4": [f"speedup-190m-zen4-{streams}" for streams in (1, 4, 16, 64)],
    "Zen 5": [
        *(f"speedup-190m-zen5-{streams}" for streams in (1, 4, 16, 64)),
        "speedup-190m-zen5-1-t1",
        "speedup-190m-zen5-64-t0",
    ],
}
"""Result files by processor; a point in a later file replaces the same point in an earlier one."""


def exactness(results: Results) -> str:
    cpu, gpu = results.read("exactness.json"), results.read("gpu-vllm.json")
    depths = list(gpu["exactness"][0]["num_different_tokens"])
    rows = [(f"PyTorch, `{row['instruction_set']}`", *_tokens(row), row["num_different_tokens"]) for row in cpu["rows"]]
    rows += [
        (f"vLLM on a GPU, {row['kind']}", *_tokens(row), ", ".join(str(row["num_different_tokens"][k]) for k in depths))
        for row in gpu["exactness"]
    ]
    head = ["target", "tokens", "drafts accepted", f"tokens that differ (GPU: k = {', '.join(depths)})"]
    return markdown(head, rows)


def architectures(results: Results) -> str:
    rows = [
        [name, where, f"{row['num_tokens']:,}", f"{row['num_accepted_drafts']:,}", row["num_different_tokens"]]
        for where, file in (("target", "architectures.json"), ("plugin", "plugin-architectures.json"))
        for name, row in results.read(file).items()
    ]
    return markdown(["architecture", "vLLM in", "tokens", "drafts accepted", "tokens that differ"], rows)


def _tokens(row: Mapping[str, Any]) -> tuple[str, str]:
    return f"{row['num_tokens']:,}", f"{row['num_accepted_drafts']:,}"


def schemas(results: Results) -> str:
    rows = results.read("schemas.json")["rows"]
    cells = (
        (row["drafts"], f"{row['steps']:,}", f"{row['tokens_per_step']:.2f}", row["accepted"] or "") for row in rows
    )
    return markdown(["drafts", "steps", "tokens a step", "accepted"], cells)


def speedup(results: Results) -> str:
    points = {
        processor: {
            (point["num_streams"], point["temperature"]): point
            for name in names
            for point in results.read(f"{name}.json")["points"]
        }
        for processor, names in _SPEEDUPS.items()
    }
    head = ["T", "streams"]
    for processor in _SPEEDUPS:
        head += [f"{processor}, tokens/s", "ratio (best)"]
    keys = sorted({key for own in points.values() for key in own}, key=lambda key: (key[1], key[0]))
    rows = []
    for streams, temperature in keys:
        cells = [cell for own in points.values() for cell in _sped_up(own[streams, temperature])]
        rows.append([f"{temperature:g}", str(streams), *cells])
    (busy,) = results.read("speedup-190m-4-streams.json")["points"]
    rows.append(["0", "4, always busy", *_sped_up(busy), "", "", "", ""])
    return markdown(head, rows)


def _sped_up(point: Mapping[str, Any]) -> tuple[str, str]:
    plain, auto = (statistics.median(of["tokens_per_second"]) for of in (_plain(point), point["depths"]["auto"]))
    ratios = {name: statistics.median(depth["speedups"]) for name, depth in point["depths"].items()}
    best = max(ratio for name, ratio in ratios.items() if name != "auto")
    return f"{plain:.0f} → {auto:.0f}", f"{ratios['auto']:.2f} ({best:.2f})"


def _plain(point: Mapping[str, Any]) -> dict[str, Any]:
    return {"tokens_per_second": point["plain_tokens_per_second"]}


_PEERS = (
    ("Sapphire Rapids", "peers-amx.json", "Outrider on PyTorch"),
    ("Zen 4", "peers-zen4.json", "Outrider on PyTorch"),
    ("Zen 4", "peers-zen4.json", "Outrider on PyTorch, int8"),
    ("Zen 4, AVX2 only", "peers-avx2.json", "Outrider on PyTorch"),
    ("Zen 5", "peers-vllm.json", "Outrider on vLLM"),
)
_RIVALS = (
    ("vLLM's best, with `draft_model` or without", r"vLLM( draft_model .*)?"),
    ("llama.cpp's best", r"llama\.cpp b?f16.*"),
)
_RIVALS_OF_INT8 = (("llama.cpp's best in q8_0", r"llama\.cpp q8_0.*"),)
"""Titles of rows, and the names of the systems: a row has the best of them at each point."""


def peers(results: Results) -> str:
    rows = []
    points = results.read(_PEERS[0][1])["points"]
    for processor, name, own in _PEERS:
        systems = results.read(name)["systems"]
        rivals = {}
        for title, names in _RIVALS_OF_INT8 if "int8" in own else _RIVALS:
            measured = [_speeds(speeds, points) for system, speeds in systems.items() if re.fullmatch(names, system)]
            if measured:
                rivals[title] = [max(speeds) for speeds in zip(*measured, strict=True)]
        best = [max(speeds) for speeds in zip(*rivals.values(), strict=True)]
        cells = [f"{a:.0f} ({a / b:.2f})" for a, b in zip(_speeds(systems[own], points), best, strict=True)]
        rows.append([f"**{own}**, {processor}", *cells])
        rows += [[title, *_whole(speeds)] for title, speeds in rivals.items()]
    return markdown(["tokens/s", *_titles(points)], rows)


def _titles(points: list[list[float]]) -> Iterator[str]:
    for temperature, streams in points:
        yield f"T={temperature:g}, {streams}"


def _key(point: list[float]) -> str:
    return f"{point[0]:g}/{point[1]}"


def _speeds(speeds: Mapping[str, Any], points: list[list[float]]) -> list[float]:
    return [median(speeds[_key(point)], "tokens_per_second") for point in points]


def _whole(values: list[float]) -> list[str]:
    return [f"{value:.0f}" for value in values]


TABLES: dict[str, Callable[[Results], str]] = {
    "exactness": exactness,
    "architectures": architectures,
    "schemas": schemas,
    "speedup": speedup,
    "peers": peers,
}
