"""The Triton kernels on a GPU: part of `bench.gpu_check`.

The tests cover what Triton's interpreter can check without a GPU. This module compares choices with the CPU's and
checks errors and bits of attention, recorded steps, and drafts in bursts. All times are compared with PyTorch's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.gpu_rows import Row, milliseconds
from cluster.config import Config
from cluster.drafters.base import DraftSequence
from cluster.drafters.burst import Burst
from cluster.drafters.model import ModelDrafter
from cluster.engine.attention import GatheredAttention
from cluster.engine.batch import Batch, Segment, pack
from cluster.engine.gpu_kernels.paged_attention import PagedAttention
from cluster.engine.graph_memory import StepModel, graph_bytes, graph_sizes
from cluster.engine.kv_cache import KVCache
from cluster.engine.limits import StepLimits
from cluster.engine.loader import load_model
from cluster.engine.model import Model, TorchModel
from cluster.engine.runner import ModelRunner
from cluster.engine.triton_model import TritonModel
from cluster.model_folder import resolve_model_folder
from cluster.speculation.noise import NoiseKey
from cluster.speculation.params import SamplingParams
from cluster.speculation.sampling import Sampler, SampleRequest, perturbed_logits
from cluster.speculation.triton_sampler import best_tokens

CPU = torch.device("cpu")
ALL = 2**31 - 1  # a span that no context exceeds
BLOCK_SIZE = 16
NEAR_TIE = 1e-6  # of logit / T + g: noise may differ in float32's last bit, all else is equal
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
ERRORS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
MAX_ROWS, MAX_CONTEXT, NUM_BLOCKS = 64, 1024, 1024


def check_sampling(device: torch.device, vocab_sizes: Sequence[int], params: Sequence[SamplingParams]) -> list[Row]:
    """The choice of every row by the kernels, and by the sampler on the CPU; times of both ways on the GPU."""
    rows = []
    for vocab_size in vocab_sizes:
        logits = 3 * torch.randn(16 * len(params), vocab_size, generator=torch.Generator().manual_seed(vocab_size))
        requests = [
            SampleRequest(params[i % len(params)], NoiseKey.derive(i, 0), [i + 1, 7, 7, 11], 2)
            for i in range(len(logits))
        ]
        expected = Sampler(CPU).sample(logits, requests)
        on_device = logits.to(device)
        seen = best_tokens(on_device, requests, 1)[0].flatten().tolist()
        scores = perturbed_logits(logits, requests)
        different = [i for i, (a, b) in enumerate(zip(expected, seen, strict=True)) if a != b]
        ties = sum(float(scores[i, expected[i]] - scores[i, seen[i]]) < NEAR_TIE for i in different)
        figures: dict[str, Any] = {"rows": len(logits), "different": len(different), "near_ties": ties}
        sampler = Sampler(device)
        for asked in (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_k=50, top_p=0.9)):
            for num_rows in (1, 16, 64):
                each = [SampleRequest(asked, NoiseKey.derive(i, 1), [1], 1) for i in range(num_rows)]
                key = f"ms, T={asked.temperature:g}, top-p {asked.top_p:g}, {num_rows} rows"
                figures[key] = milliseconds(partial(sampler.sample, on_device[:num_rows], each))
        seen_text = f"{len(different)} of {len(logits)} choices differ from the CPU's, {ties} of them near-ties"
        rows.append(Row(f"Triton sampling, vocabulary of {vocab_size}", len(different) == ties, seen_text, figures))
    return rows


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
                figures[key] = milliseconds(partial(_waited, device, partial(plan.attend, query, keys, values, ALL)))
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
            step = partial(_waited, device, partial(model.forward, batch))
            figures[f"ms, {form.__name__}, {num_segments} decodes"] = milliseconds(step)
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


def _waited(device: torch.device, call: Callable[[], object]) -> None:
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _used_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


CHECKS: dict[str, Callable[[torch.device], list[Row]]] = {
    "triton-attention": check_attention,
    "triton-steps": check_steps,
    "triton-bursts": check_bursts,
}
