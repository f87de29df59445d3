"""Measures the time of one more draft token for every sequence, by their number: `python -m bench.draft_levels`.

Sequences of 200 tokens each are drafted for, level by level, at T = 1, as a draft worker does it. A level's time is
divided into that of the kernels (the model, and drawing tokens) and that outside of them. Repeats are interleaved;
figures are medians with quartiles. With `--set draft.drafter=parallel` a level is a whole proposal of 8 tokens, which
takes one step.

`--random-0.5b` measures a draft of Qwen2.5-0.5B's shape with random weights on this machine's cores, as
`draft.placement: host-cpu` would run it; give `--set draft.quantization=int8` for INT8 weights.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.engine import read_bandwidth
from bench.machine import describe_machine
from bench.step_parts import Milliseconds, timed_kernels
from cluster.config.file import load_config
from cluster.drafters.base import Drafter, DraftSequence
from cluster.drafters.factory import make_drafter
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams

NUM_SEQUENCES = (1, 4, 16, 64)
CONTEXT_LEN = 200
LEVELS = 5  # of a round
ONE_PASS_DRAFTS = 8  # of a proposal that takes one step
WARM_UP = 5  # rounds
QWEN_2_5_0_5B = {  # its config.json, with fewer positions
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 4096,
    "eos_token_id": 151_643,
}


@dataclass(frozen=True, slots=True)
class Level:
    num_sequences: int
    level: Milliseconds
    outside_kernels: Milliseconds


class _Load:
    """Load of `num_sequences` sequences that are drafted for together."""

    def __init__(self, drafter: Drafter, num_sequences: int) -> None:
        rng = random.Random(num_sequences)
        self._drafter = drafter
        num_drafts = ONE_PASS_DRAFTS if drafter.is_one_pass else LEVELS
        self._sequences = [
            DraftSequence(
                [rng.randrange(drafter.vocab_size) for _ in range(CONTEXT_LEN)],
                1,
                SamplingParams(temperature=1.0),
                NoiseKey(index, 1),
                num_speculative_tokens=num_drafts,
                window=2 * num_drafts,
            )
            for index in range(num_sequences)
        ]

    def open(self) -> None:
        for sequence in self._sequences:
            if not self._drafter.admit(sequence):
                raise SystemExit(f"no room for {len(self._sequences)} sequences: give the draft more kv_cache_bytes")
        while any(not sequence.parents for sequence in self._sequences):
            self._drafter.draft([sequence for sequence in self._sequences if not sequence.parents])

    def close(self) -> None:
        for sequence in self._sequences:
            self._drafter.release(sequence)

    def round(self, levels: list[float], outside: list[float]) -> None:
        with timed_kernels() as in_kernels:
            for level in range(1 if self._drafter.is_one_pass else LEVELS):
                in_kernels.clear()
                started_at = time.perf_counter()
                self._drafter.draft(self._sequences)
                seconds = time.perf_counter() - started_at
                if level > 0 or self._drafter.is_one_pass:  # a chain's first also computes what was committed
                    levels.append(seconds)
                    outside.append(seconds - sum(in_kernels))
        for sequence in self._sequences:  # the first draft comes true, the others don't
            kept = sequence.commit(sequence.num_committed, [sequence.token_of(0), 1])
            if kept is not None:
                self._drafter.rewind(sequence, kept)


def make_random_model(folder: Path, config: dict[str, Any]) -> None:
    """Writes a model of the shape of `config`, a Qwen2 with tied embeddings, with random weights in bfloat16."""
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    kv_size = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for index in range(config["num_hidden_layers"]):
        for name, shape in {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (hidden, hidden),
            "self_attn.q_proj.bias": (hidden,),
            "self_attn.k_proj.weight": (kv_size, hidden),
            "self_attn.k_proj.bias": (kv_size,),
            "self_attn.v_proj.weight": (kv_size, hidden),
            "self_attn.v_proj.bias": (kv_size,),
            "self_attn.o_proj.weight": (hidden, hidden),
            "mlp.gate_proj.weight": (intermediate, hidden),
            "mlp.up_proj.weight": (intermediate, hidden),
            "mlp.down_proj.weight": (hidden, intermediate),
        }.items():
            shapes[f"model.layers.{index}.{name}"] = shape
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator, dtype=torch.float32).mul_(0.02).bfloat16()
        if len(shape) > 1
        else torch.full(shape, float("norm" in name), dtype=torch.bfloat16)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def measure(drafter: Drafter, num_sequences: int, rounds: int) -> Level:
    load = _Load(drafter, num_sequences)
    load.open()
    levels: list[float] = []
    outside: list[float] = []
    for _ in range(WARM_UP):
        load.round([], [])
    for _ in range(rounds):
        load.round(levels, outside)
    load.close()
    return Level(num_sequences, Milliseconds.of(levels), Milliseconds.of(outside))


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    settings = ["draft.enable_prefix_caching=false", *arguments.overrides]
    with contextlib.ExitStack() as stack:
        if arguments.random:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="draft-levels-"))
            make_random_model(Path(folder), QWEN_2_5_0_5B)
            settings.append(f"draft.model={folder}")
        config = load_config(arguments.config, settings)
        drafter = make_drafter(config, None)
    bandwidth, load_average = [read_bandwidth()], [os.getloadavg()[0]]
    results = [measure(drafter, number, arguments.rounds) for number in arguments.sequences]
    bandwidth.append(read_bandwidth())
    load_average.append(os.getloadavg()[0])
    print("| sequences | a level, ms | of it outside kernels, ms | over one sequence |\n| --- | --- | --- | --- |")
    for result in results:
        ratio = result.level.median / results[0].level.median
        print(f"| {result.num_sequences} | {result.level} | {result.outside_kernels} | {ratio:.2f} |")
    print(f"\nread bandwidth before and after: {bandwidth[0]:.1f}, {bandwidth[1]:.1f} GB/s")
    print(f"load average before and after: {load_average[0]:.1f}, {load_average[1]:.1f}")
    if arguments.out is not None:
        draft = config.draft.model_dump(mode="json") | ({"model": QWEN_2_5_0_5B} if arguments.random else {})
        report = {"draft": draft, "machine": describe_machine(), "gb_per_second": bandwidth}
        report |= {"load_average": load_average, "levels": [asdict(result) for result in results]}
        arguments.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.draft_levels", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", type=Path, help="YAML configuration of the cluster")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument(
        "--random-0.5b", dest="random", action="store_true", help="a draft of Qwen2.5-0.5B's shape, with random weights"
    )
    parser.add_argument(
        "--sequences", type=lambda text: [int(n) for n in text.split(",")], default=list(NUM_SEQUENCES), metavar="N,..."
    )
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main())
