"""Checks of kernels on a GPU: attention, recorded steps, bursts, products in a fixed order; part of `bench.gpu_check`.

The tests cover what Triton's interpreter can check without a GPU. This module checks errors and bits of attention and
of recorded steps, and that bursts make the drafts of single steps. Products must have the same bits at every height, in
every tile, and with or without programs of parts. All times are compared with PyTorch's; those of products are taken
from a CUDA graph that reads more weights than the L2 cache holds. A product that fails does not stop the others.
"""

from __future__ import annotations

import random
import statistics
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from bench.gpu_rows import Row, milliseconds
from cluster.config import Config
from cluster.config.workers import Numerics
from cluster.drafters.base import DraftSequence
from cluster.drafters.burst import Burst
from cluster.drafters.model import ModelDrafter
from cluster.engine.attention import GatheredAttention
from cluster.engine.batch import Batch, Segment, pack
from cluster.engine.gpu_kernels.paged_attention import PagedAttention
from cluster.engine.gpu_kernels.product import product, product_by_tiles
from cluster.engine.gpu_kernels.product_tiles import TILES
from cluster.engine.graph_memory import StepModel, graph_bytes, graph_sizes
from cluster.engine.invariance import check_invariance
from cluster.engine.kv_cache import KVCache
from cluster.engine.limits import StepLimits
from cluster.engine.loader import load_model
from cluster.engine.model import Model, TorchModel
from cluster.engine.runner import ModelRunner
from cluster.engine.triton_model import TritonModel
from cluster.model_folder import resolve_model_folder
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams

CPU = torch.device("cpu")
ALL = 2**31 - 1  # a span that no context exceeds
BLOCK_SIZE = 16
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
ERRORS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
MAX_ROWS, MAX_CONTEXT, NUM_BLOCKS = 64, 1024, 1024
PRODUCTS = {  # of Llama 3.1 8B: outputs and inputs
    "qkv": (6144, 4096),
    "output": (4096, 4096),
    "gate and up": (28_672, 4096),
    "down": (4096, 14_336),
    "head": (128_256, 4096),
}
HEIGHTS = (*range(1, 65), 65, 128, 200, 512, 2048)
TIMED_HEIGHTS = (1, 16, 64, 256, 2048)
_LEAST_BYTES = 300e6  # of weights between two readings of one, several times the L2 cache
_COMPARED_OUTPUTS = 2048  # whose errors are computed


def check_attention(device: torch.device, contexts: Sequence[int] = (1024, 8192, 32_768)) -> list[Row]:
    rows = []
    for dtype, bound in ERRORS.items():
        keys, values = (_random(4096 * BLOCK_SIZE, KV_HEADS, seed, dtype, device) for seed in (1, 2))
        rng, worst, num_other_bits = random.Random(3), {"triton": 0.0, "torch": 0.0}, 0
        for index in range(12):
            segments = _segments(rng, trees=index % 3 == 0)
            batch = pack(segments, BLOCK_SIZE, device)
            query = _random(len(batch.token_ids), HEADS, index, dtype, device)
            attend = partial(_attend, query, keys, values, batch)
            wanted = GatheredAttention(batch, BLOCK_SIZE).attend(query.double(), keys.double(), values.double(), ALL)
            seen = attend(may_split=True)
            worst["triton"] = max(worst["triton"], float((seen - wanted).abs().max()))
            plain = GatheredAttention(batch, BLOCK_SIZE).attend(query, keys, values, ALL)
            worst["torch"] = max(worst["torch"], float((plain - wanted).abs().max()))
            num_other_bits += int((seen != attend(may_split=False)).any())
            for place, segment in enumerate(segments):
                own = slice(int(batch.row_starts[place]), int(batch.row_starts[place + 1]))
                alone = _attend(query[own], keys, values, pack([segment], BLOCK_SIZE, device), may_split=True)
                num_other_bits += int((alone != seen[own]).any())
        name = str(dtype).removeprefix("torch.")
        held = worst["triton"] < bound and not num_other_bits
        seen_text = f"errors against float64 {worst['triton']:.1e}, PyTorch's {worst['torch']:.1e}; "
        seen_text += f"{num_other_bits} segments had other bits alone, or by splits"
        rows.append(Row(f"Triton attention, {name}", held, seen_text))
    return [*rows, _attention_times(device, contexts)]


def _attention_times(device: torch.device, contexts: Sequence[int]) -> Row:
    """Times attention of one layer in bfloat16: plain decodes, verify chains of 6 rows, a prompt's chunk."""
    figures = {}
    for context in contexts:
        keys, values = (_random(64 * context, KV_HEADS, seed, torch.bfloat16, device) for seed in (1, 2))
        num_blocks = context // BLOCK_SIZE
        for num_segments, num_rows in ((1, 1), (16, 1), (64, 1), (16, 6), (1, 512)):
            segments = [
                Segment([1] * num_rows, context - num_rows, range(i * num_blocks, (i + 1) * num_blocks), 1)
                for i in range(num_segments)
            ]
            batch = pack(segments, BLOCK_SIZE, device)
            query = _random(len(batch.token_ids), HEADS, 1, torch.bfloat16, device)
            plans: dict[str, PagedAttention | GatheredAttention] = {
                "triton": PagedAttention(batch, BLOCK_SIZE, context)
            }
            plans["torch"] = GatheredAttention(batch, BLOCK_SIZE)
            for name, plan in plans.items():
                key = f"ms, {name}, {num_segments} x {num_rows} rows of {context}"
                figures[key] = milliseconds(partial(plan.attend, query, keys, values, ALL), device=device)
    return Row("Triton attention, times of a layer", None, "beside PyTorch's", figures)


def check_steps(device: torch.device) -> list[Row]:
    """Recorded steps against the same ones on the CPU; the memory that they take against what was counted."""
    folder = resolve_model_folder(Config().target.model)
    plain, other = _bound(folder, CPU, TorchModel), _bound(folder, device, TritonModel)
    assert isinstance(other, TritonModel)
    before = _used_bytes(device)
    other.prepare(MAX_ROWS, MAX_CONTEXT)
    taken = _used_bytes(device) - before
    counted = graph_bytes(StepModel.of(other.config), graph_sizes(MAX_ROWS), MAX_CONTEXT, BLOCK_SIZE, 4)
    rng, worst = random.Random(0), 0.0
    for index in range(60):
        segments = _segments(rng, trees=index % 3 == 0, num_blocks=NUM_BLOCKS, vocab_size=plain.config.vocab_size)
        expected = plain.forward(pack(segments, BLOCK_SIZE, CPU))
        logits = other.forward(pack(segments, BLOCK_SIZE, device)).cpu()
        worst = max(worst, float((logits - expected).abs().max()))
    figures: dict[str, Any] = {"bytes of graphs": taken, "bytes counted": counted}
    for form in (TorchModel, TritonModel):
        model = _bound(folder, device, form)
        model.prepare(MAX_ROWS, MAX_CONTEXT)
        for num_segments in (1, 16, 64):
            segments = [Segment([1], 500, range(i * 32, i * 32 + 32), 1) for i in range(num_segments)]
            batch = pack(
                [replace(segment, block_table=list(segment.block_table)) for segment in segments], BLOCK_SIZE, device
            )
            step_ms = milliseconds(partial(model.forward, batch), device=device)
            figures[f"ms, {form.__name__}, {num_segments} decodes"] = step_ms
    seen = f"logits differ by at most {worst:.1e}; graphs take {taken / 1e6:.0f} MB, counted {counted / 1e6:.0f}"
    return [Row("steps with Triton attention, recorded, float32", worst < 1e-3, seen, figures)]


def check_bursts(device: torch.device) -> list[Row]:
    """Checks that bursts make the same drafts as single steps, and times a round of 5."""
    folder = resolve_model_folder(Config().draft_model)
    limits = StepLimits(MAX_CONTEXT, 16, 512)
    drafted, figures = [], {}
    for has_burst in (True, False):
        loaded = load_model(folder, torch.float32, device, form=TritonModel)
        runner = ModelRunner(loaded, BLOCK_SIZE, NUM_BLOCKS)
        runner.model.prepare(512, MAX_CONTEXT)
        drafter = ModelDrafter(runner, limits, Burst.of(runner, limits) if has_burst else None)
        sequences = [_sequence(i, SamplingParams(temperature=i % 3 / 2)) for i in range(16)]
        assert all(drafter.admit(sequence) for sequence in sequences)
        drafted.append(_rounds(drafter, sequences, limits))
        round_of_5 = partial(_rounds, drafter, sequences, limits, 1)
        figures[f"ms, 16 sequences, {'a burst' if has_burst else 'step by step'}"] = milliseconds(round_of_5)
    same = drafted[0] == drafted[1]
    return [Row("drafts in bursts, float32", same, "the same drafts" if same else "other drafts", figures)]


def _rounds(
    drafter: ModelDrafter, sequences: Sequence[DraftSequence], limits: StepLimits, num_rounds: int = 8
) -> list[list[int]]:
    """Returns the drafts of `num_rounds` rounds. In each round the target accepts two drafts and adds one token."""
    drafted = []
    for _ in range(num_rounds):
        while waiting := [s for s in sequences if s.missing(limits.max_model_len)]:
            drafter.draft(waiting)
        for sequence in sequences:
            drafts = sequence.draft_token_ids
            drafted.append(drafts)
            kept = sequence.commit(sequence.num_committed, [*drafts[:2], 11])
            assert kept is not None
            drafter.rewind(sequence, kept)
    return drafted


def _sequence(seed: int, params: SamplingParams) -> DraftSequence:
    prompt = [random.Random(seed).randrange(1000) for _ in range(20 + seed)]
    return DraftSequence(prompt, len(prompt), params, NoiseKey.derive(seed, 0), num_owed=5, window=12)


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: Batch, *, may_split: bool
) -> torch.Tensor:
    max_context = batch.block_tables.shape[1] * BLOCK_SIZE
    return PagedAttention(batch, BLOCK_SIZE, max_context, may_split=may_split).attend(query, keys, values, ALL)


def _segments(rng: random.Random, *, trees: bool, num_blocks: int = 4096, vocab_size: int = 1000) -> list[Segment]:
    tables, segments = rng.sample(range(num_blocks), num_blocks), []
    for _ in range(rng.randint(1, 6)):
        num_rows, start = rng.randint(1, 9), rng.randint(0, 900)
        table = [tables.pop() for _ in range(-(-(start + num_rows) // BLOCK_SIZE))]
        parents = [-1, *(rng.randrange(node) for node in range(1, num_rows))] if trees else None
        token_ids = [rng.randrange(vocab_size) for _ in range(num_rows)]
        segments.append(Segment(token_ids, start, table, rng.randint(1, num_rows), parents))
    return segments


def _bound(folder: Path, device: torch.device, form: type[Model]) -> Model:
    loaded = load_model(folder, torch.float32, device, form=form)
    cache = KVCache(loaded.config, NUM_BLOCKS * 2, BLOCK_SIZE, torch.float32, device)
    for tensor in (cache.keys, cache.values):
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))
    return loaded.bind(cache)


def _random(length: int, heads: int, seed: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(length, heads, HEAD_DIM, generator=generator, device=device, dtype=dtype)


def _used_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def check_products(device: torch.device) -> list[Row]:
    return [_bits(device), _times(device), _model(device)]


def _bits(device: torch.device) -> Row:
    """Compares the bits of rows at every height with those among the most rows."""
    found = {name: _attempt(f"bits, {name}", partial(_bits_of, device, *shape)) for name, shape in PRODUCTS.items()}
    differing = sum(one["rows with other bits"] for one in found.values() if one is not None)
    held = None not in found.values() and not differing
    seen = f"{differing} rows had other bits at one of {len(HEIGHTS)} heights or in another tile"
    return Row("products in a fixed order, bits in bfloat16", held, seen, found)


def _bits_of(device: torch.device, num_outputs: int, num_inputs: int) -> dict[str, Any]:
    x, weights = operands(device, max(HEIGHTS), num_outputs, num_inputs, 1)
    weight = weights[0]
    whole, whole_by_cublas = product(x, weight), F.linear(x, weight)
    other, other_by_cublas = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
    for height in HEIGHTS:
        other += _num_other_rows(product(x[:height], weight), whole[:height])
        other += _num_other_rows(product(x[-height:], weight), whole[-height:])
        other_by_cublas += _num_other_rows(F.linear(x[:height], weight), whole_by_cublas[:height])
    for height in (1, 64, 200):
        for tile in TILES[x.itemsize]:
            for is_split in (False, True):
                cut = product_by_tiles(x[:height], weight, None, tile, is_split=is_split)
                other += _num_other_rows(cut, whole[:height])
    exact = x[:64].double() @ weight[:_COMPARED_OUTPUTS].double().T
    errors = [float((found[:64, :_COMPARED_OUTPUTS] - exact).abs().max()) for found in (whole, whole_by_cublas)]
    return {
        "rows with other bits": int(other),
        "cuBLAS's rows with other bits": int(other_by_cublas),
        "largest error": errors[0],
        "cuBLAS's largest error": errors[1],
    }


def _num_other_rows(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return (found != expected).any(1).sum()


def _times(device: torch.device) -> Row:
    """Times a product and cuBLAS's."""
    found: dict[str, Any] = {}
    for name, shape in PRODUCTS.items():
        of_shape = _attempt(f"times, {name}", partial(_times_of, device, *shape))
        found |= {f"{name}, {key}": value for key, value in (of_shape or {"failed": True}).items()}
    return Row("products in a fixed order, times in bfloat16", None, "compared with cuBLAS's", found)


def _times_of(device: torch.device, num_outputs: int, num_inputs: int) -> dict[str, Any]:
    weight_bytes = 2 * num_outputs * num_inputs
    x, weights = operands(device, max(TIMED_HEIGHTS), num_outputs, num_inputs, 1 + int(_LEAST_BYTES / weight_bytes))
    figures = {}
    for height in TIMED_HEIGHTS:
        calls: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"fixed": product, "cuBLAS": F.linear}
        for name, call in calls.items():
            taken = microseconds([partial(call, x[:height], weight) for weight in weights])
            figures[f"{name}, {height} rows"] = {
                "us": round(taken, 1),
                "TB/s": round(weight_bytes / taken / 1e6, 2),
                "TFLOP/s": round(height * weight_bytes / taken / 1e6, 1),
            }
    return figures


def microseconds(calls: Sequence[Callable[[], torch.Tensor]], repeats: int = 7) -> float:
    """Returns the median time of one of `calls`, which are replayed one after the other."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):  # kernels are compiled and libraries set themselves up, which cannot be recorded
        calls[0]()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(2 + repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()  # type: ignore[no-untyped-call]
        graph.replay()
        end.record()  # type: ignore[no-untyped-call]
        end.synchronize()  # type: ignore[no-untyped-call]
        times.append(1e3 * start.elapsed_time(end) / len(calls))  # type: ignore[no-untyped-call]
    return statistics.median(times[2:])


def _model(device: torch.device) -> Row:
    """The check at start, on the bundled target, before its steps are recorded and after."""
    figures: dict[str, Any] = {}
    held = True
    for name, prepares in (("steps not recorded", False), ("recorded steps", True)):
        passed = _attempt(f"check at start, {name}", partial(_checked, device, prepares=prepares))
        figures |= passed or {name: "failed"}
        held = held and passed is not None
    figures |= _attempt("steps, fast", partial(_step_times, device, "fast")) or {}
    figures |= _attempt("steps, invariant", partial(_step_times, device, "invariant")) or {}
    return Row("check of invariant numerics at start", held, "passed" if held else "not passed", figures)


def _checked(device: torch.device, *, prepares: bool) -> dict[str, Any]:
    runner = _runner(device, "invariant", prepares=prepares)
    check_invariance(runner)
    return {f"check of {type(runner.model).__name__}, {'recorded' if prepares else 'not recorded'}": "passed"}


def _step_times(device: torch.device, numerics: Numerics) -> dict[str, Any]:
    """Times recorded steps of decodes."""
    runner, figures = _runner(device, numerics, prepares=True), {}
    for num_rows in (1, 16, 64):
        segments = [Segment([1], 40, list(range(3 * i, 3 * i + 3)), 1) for i in range(num_rows)]

        def step(segments: Sequence[Segment] = segments) -> None:
            runner.run(segments)
            runner.wait()

        figures[f"ms, {numerics}, {num_rows} decodes"] = milliseconds(step)
    return figures


def _runner(device: torch.device, numerics: Numerics, *, prepares: bool) -> ModelRunner:
    folder = resolve_model_folder(Config().target.model)
    runner = ModelRunner(load_model(folder, torch.bfloat16, device, numerics=numerics), BLOCK_SIZE, NUM_BLOCKS)
    if prepares:
        runner.model.prepare(2 * MAX_ROWS, MAX_CONTEXT)
    return runner


def operands(
    device: torch.device, num_rows: int, num_outputs: int, num_inputs: int, num_weights: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns x and several weights in bfloat16. Outputs are about 1."""
    generator = torch.Generator(device).manual_seed(num_outputs + num_inputs)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    return normal(num_rows, num_inputs), normal(num_weights, num_outputs, num_inputs).mul_(num_inputs**-0.5)


def _attempt(name: str, call: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    """Returns the figures that `call` finds, or None if it fails, and logs either."""
    try:
        found = call()
    except Exception as error:
        traceback.print_exc()
        print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return None
    for key, value in found.items():
        print(f"{name}: {key}: {value}", file=sys.stderr, flush=True)
    return found


CHECKS: dict[str, Callable[[torch.device], list[Row]]] = {
    "triton-attention": check_attention,
    "triton-steps": check_steps,
    "triton-bursts": check_bursts,
    "product-invariant": check_products,
}
