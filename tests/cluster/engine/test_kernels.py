"""PyTorch's operators and the kernels compute the same; the kernels give a row the same bits in every company."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from cluster.engine.batch import Batch, Segment, pack
from cluster.engine.cpu_kernels import InstructionSet, has_kernels
from cluster.engine.cpu_linear import KernelLinear
from cluster.engine.cpu_model import CpuModel
from cluster.engine.kv_cache import KVCache
from cluster.engine.linear import Linear, PackedLinear, PlainLinear, QuantizedLinear, _can_pack
from cluster.engine.loader import LoadedModel, load_model
from cluster.engine.model import Model, TorchModel
from cluster.engine.model_config import ModelConfig
from cluster.engine.quantization import Quantization, quantize
from cluster.engine.rope_config import RopeConfig
from cluster.engine.runner import ModelRunner
from cluster.engine.weights import LayerWeights, ModelWeights, WeightFormat

from .checkpoints import CHECKPOINTS
from .instruction_sets import INSTRUCTION_SETS, form_using

needs_kernels = pytest.mark.skipif(not has_kernels(), reason="the kernels do not run here")
DTYPES = [torch.float32, torch.bfloat16]
CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS = 4, 64

_UNTIL_ASLEEP = 0.002  # seconds: a thread of the pool looks for work some 0.3 ms

CONFIG = ModelConfig(
    vocab_size=100,
    hidden_size=96,
    intermediate_size=128,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=48,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=10_000.0),
    max_position_embeddings=256,
    tie_word_embeddings=True,
    eos_token_ids=(0,),
)


@pytest.fixture(params=[1, 2, 3])
def num_threads(request: pytest.FixtureRequest) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def randn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def num_switches() -> dict[str, int]:
    """Returns the number of context switches of each thread in the kernels' pool."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        lines = (task / "status").read_text().splitlines()
        if lines[0].split()[1] == "outrider-pool":
            found[task.name] = sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)
    return found


class TestLinear:
    @pytest.mark.parametrize("kernel", [PlainLinear, PackedLinear, pytest.param(KernelLinear, marks=needs_kernels)])
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        ("out_features", "in_features"), [(1, 1), (5, 37), (24, 64), (64, 33), (100, 130), (257, 96)]
    )
    def test_product(
        self,
        kernel: Callable[[torch.Tensor], Linear],
        dtype: torch.dtype,
        out_features: int,
        in_features: int,
    ) -> None:
        if kernel is PackedLinear and not _can_pack(dtype):
            pytest.skip("oneDNN has no such product on this processor")
        weight = randn(1, out_features, in_features).to(dtype)
        linear = kernel(weight)
        for num_rows in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17, 40):
            x = randn(num_rows, num_rows, in_features).to(dtype)
            x = x.float() if kernel is KernelLinear else x
            tolerance = 0.05 if x.dtype == torch.bfloat16 else 1e-4
            torch.testing.assert_close(
                linear(x).double(), x.double() @ weight.double().T, rtol=tolerance, atol=tolerance
            )

    @pytest.mark.parametrize("kernel", [PlainLinear, PackedLinear, pytest.param(KernelLinear, marks=needs_kernels)])
    def test_bias(self, kernel: Callable[..., Callable[[torch.Tensor], torch.Tensor]]) -> None:
        weight, bias = randn(1, 100, 33), randn(2, 100)
        linear = kernel(weight, bias)
        for num_rows in (0, 1, 3, 20):
            x = randn(num_rows, num_rows, 33)
            torch.testing.assert_close(linear(x), x @ weight.T + bias, rtol=1e-4, atol=1e-4)

    @needs_kernels
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_row_does_not_depend_on_the_others(self, dtype: torch.dtype, num_threads: int) -> None:
        linear = KernelLinear(randn(2, 150, 200).to(dtype))
        x = randn(3, 40, 200)
        together = linear(x)
        for first in range(0, 40, 3):
            for count in (1, 2, 5, 7, 11, 37):
                rows = slice(first, first + count)
                assert torch.equal(linear(x[rows]), together[rows])

    @pytest.mark.parametrize("kernel", [QuantizedLinear, pytest.param(KernelLinear, marks=needs_kernels)])
    @pytest.mark.parametrize(("bits", "group_size"), [(8, None), (4, 32), (4, 64)])
    @pytest.mark.parametrize("out_features", [5, 64, 100])
    def test_product_with_integers(
        self, kernel: Callable[..., Linear], bits: Literal[8, 4], group_size: int | None, out_features: int
    ) -> None:
        weight = quantize(randn(1, out_features, 192), Quantization(bits, group_size))
        linear = kernel(weight)
        for num_rows in (1, 2, 3, 4, 5, 8, 9, 17):
            x = randn(num_rows, num_rows, 192)
            torch.testing.assert_close(linear(x), x @ weight.dequantize().T, rtol=1e-4, atol=1e-4)
            if kernel is KernelLinear:
                assert torch.equal(linear(x)[-1:], linear(x[-1:]))

    @needs_kernels
    def test_rows_need_not_be_contiguous(self) -> None:
        x, linear = randn(4, 8, 64), KernelLinear(randn(5, 24, 64))
        assert torch.equal(linear(x[::2]), linear(x[::2].contiguous()))

    @needs_kernels
    def test_callers_do_not_disturb_each_other(self) -> None:
        """The pool serves one caller at a time; another computes alone."""
        torch.set_num_threads(2)
        linear, x = KernelLinear(randn(6, 640, 64)), randn(7, 5, 64)
        expected, wrong = linear(x), []

        def call() -> None:
            wrong.extend(1 for _ in range(2000) if not torch.equal(linear(x), expected))

        callers = [threading.Thread(target=call) for _ in range(3)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        torch.set_num_threads(1)
        assert not wrong

    @needs_kernels
    def test_threads_beyond_those_asked_for_sleep(self) -> None:
        linear, x = KernelLinear(randn(6, 640, 64)), randn(7, 50, 64)
        expected = linear(x)
        for num_threads in (6, 2, 3, 2):
            torch.set_num_threads(num_threads)
            linear(x)
            time.sleep(_UNTIL_ASLEEP)
            before = num_switches()
            for _ in range(200):
                assert torch.equal(linear(x), expected)
                time.sleep(_UNTIL_ASLEEP)
            woken = [thread for thread, count in num_switches().items() if count > before.get(thread, 0) + 20]
            assert len(woken) == num_threads - 1  # and the caller's own
        torch.set_num_threads(1)


@needs_kernels
class TestDecode:
    """Against PyTorch's operators in float32, over a mix of prefill, decode and verify segments."""

    @pytest.mark.parametrize("hidden_size", [1, 16, 50])
    def test_hidden_sizes(self, hidden_size: int) -> None:
        assert_same_logits(replace(CONFIG, hidden_size=hidden_size), block_size=4)

    @pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(6, 2), (4, 4), (40, 1)])
    @pytest.mark.parametrize("head_dim", [16, 48, 64])
    @pytest.mark.parametrize("block_size", [1, 4, 16, 24])
    def test_heads_and_blocks(self, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
        config = replace(CONFIG, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
        assert_same_logits(config, block_size)

    @pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(6, 2), (4, 4), (40, 1)])
    @pytest.mark.parametrize("window", [1, 2, 7, 16, 17, 40, 119, 120, 255])
    def test_windows(self, num_heads: int, num_kv_heads: int, window: int) -> None:
        windows = (window,) * CONFIG.num_layers
        assert_same_logits(
            replace(CONFIG, num_heads=num_heads, num_kv_heads=num_kv_heads, sliding_windows=windows), block_size=4
        )

    @pytest.mark.parametrize("head_dim", [16, 48, 128])
    def test_normed_queries_and_keys(self, head_dim: int) -> None:
        assert_same_logits(replace(CONFIG, head_dim=head_dim), block_size=4, has_qk_norm=True)

    @pytest.mark.parametrize("has_gelu", [False, True])
    @pytest.mark.parametrize("intermediate_size", [7, 130])
    def test_biases_large_gates_and_threads(self, intermediate_size: int, has_gelu: bool, num_threads: int) -> None:
        """Gates in the hundreds, where an exponential would overflow."""
        config = replace(CONFIG, intermediate_size=intermediate_size, has_gelu=has_gelu)
        assert_same_logits(config, block_size=16, has_bias=True, gate_scale=300.0)

    @pytest.mark.parametrize(
        "using", [using for using in INSTRUCTION_SETS if using.values[0] is not InstructionSet.PORTABLE]
    )
    @pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(6, 2), (40, 1)])
    @pytest.mark.parametrize(
        ("head_dim", "block_size", "window"), [(16, 1, None), (48, 24, None), (64, 16, 40), (80, 4, 17)]
    )
    def test_in_bfloat16(
        self,
        using: InstructionSet,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        window: int | None,
        num_threads: int,
    ) -> None:
        config = replace(CONFIG, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
        if window is not None:
            config = replace(config, sliding_windows=(window,) * config.num_layers)
        for result, expected in zip(
            *decoded((form_using(using), TorchModel), config, block_size, torch.bfloat16), strict=True
        ):
            assert (result - expected).square().mean().sqrt() < 0.02 * expected.square().mean().sqrt()

    @pytest.mark.skipif(not InstructionSet.AMX.is_supported, reason="not built, or the processor lacks tiles")
    def test_the_emulation_of_tiles_gives_their_bits(self) -> None:
        forms = form_using(InstructionSet.AMX), form_using(InstructionSet.AMX_EMULATED)
        for by_tiles, emulated in zip(*decoded(forms, CONFIG, 16, torch.bfloat16), strict=True):
            assert torch.equal(by_tiles, emulated)


def assert_same_logits(
    config: ModelConfig,
    block_size: int,
    *,
    has_qk_norm: bool = False,
    has_bias: bool = False,
    gate_scale: float = 1.0,
) -> None:
    results = decoded((CpuModel, TorchModel), config, block_size, torch.float32, has_qk_norm, has_bias, gate_scale)
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)


def decoded(
    forms: tuple[type[Model], ...],
    config: ModelConfig,
    block_size: int,
    dtype: torch.dtype,
    has_qk_norm: bool = False,
    has_bias: bool = False,
    gate_scale: float = 1.0,
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Logits, keys and values, by each form; PyTorch's operators in float32, with the same weights and cache."""
    num_blocks = 400 // block_size + 8
    batch = _batch([(0, 1), (0, 40), (15, 1), (16, 5), (100, 21), (199, 1)], block_size, num_blocks)
    embedding = randn(5, config.vocab_size, config.hidden_size).to(dtype)
    results = []
    for form in forms:
        prepare, own = form.weight_format, torch.float32 if form is TorchModel else dtype
        layers = [
            random_layer(config, prepare, index, has_qk_norm, has_bias, gate_scale, dtype, own) for index in range(2)
        ]
        norm = prepare.make_norm_weight(randn(8, config.hidden_size).to(dtype).to(own))
        weights = ModelWeights(embedding.to(own), tuple(layers), norm, prepare.make_linear(embedding.to(own)))
        cache = KVCache(config, num_blocks, block_size, own, CPU)
        cache.keys.copy_(randn(6, *cache.keys.shape).to(dtype))
        cache.values.copy_(randn(7, *cache.values.shape).to(dtype))
        logits = form(config, weights, cache).forward(batch)
        results.append((logits, cache.keys.float(), cache.values.float()))
    return results


def random_layer(
    config: ModelConfig,
    prepare: WeightFormat,
    seed: int,
    has_qk_norm: bool,
    has_bias: bool,
    gate_scale: float,
    dtype: torch.dtype,
    own: torch.dtype,
) -> LayerWeights:
    """Numbers of `dtype`, as `own`. Every product keeps the size of what goes in; attention is far from even."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype).to(own)

    def linear(kind: int, out_features: int, in_features: int, scale: float = 1.0) -> Linear:
        weight = scale * randn(10 * seed + kind, out_features, in_features) / in_features**0.5
        bias = rounded(randn(10 * seed + kind + 5, out_features)) if has_bias else None
        return prepare.make_linear(rounded(weight), bias)

    def norm(kind: int, *shape: int) -> torch.Tensor:
        return prepare.make_norm_weight(rounded(1 + 0.3 * randn(10 * seed + kind, *shape)))

    return LayerWeights(
        input_norm=norm(0, config.hidden_size),
        qkv=linear(1, config.q_size + 2 * config.kv_size, config.hidden_size, scale=2.0),
        qk_norm=norm(2, config.num_heads + config.num_kv_heads, config.head_dim) if has_qk_norm else None,
        output=linear(2, config.hidden_size, config.q_size),
        post_attention_norm=norm(3, config.hidden_size),
        gate_up=linear(3, 2 * config.intermediate_size, config.hidden_size, gate_scale),
        down=linear(4, config.hidden_size, config.intermediate_size, 1 / gate_scale**2),
    )


def _batch(segments: list[tuple[int, int]], block_size: int, num_blocks: int) -> Batch:
    """Segments of (computed tokens, rows) whose blocks lie anywhere."""
    blocks = random.Random(0).sample(range(num_blocks), num_blocks)
    tables = [[blocks.pop() for _ in range(-(-sum(segment) // block_size))] for segment in segments]
    return pack(
        [
            Segment(list(range(rows)), computed, table, num_logits=(rows + 1) // 2)
            for (computed, rows), table in zip(segments, tables, strict=True)
        ],
        block_size,
        CPU,
    )


class TestModel:
    TOKENS = tuple(random.Random(1).choices(range(512), k=70))

    @needs_kernels
    @pytest.mark.parametrize(
        "checkpoint",
        ["llama 3", "mistral with a window", "qwen2 with a window in one layer", "qwen3 with biases, yarn", "gemma3"],
    )
    def test_same_bits_however_the_work_is_cut_in_float32(
        self, checkpoint: str, tiny_folder: Callable[..., Path], num_threads: int
    ) -> None:
        self.check_cuts(load_model(tiny_folder(**CHECKPOINTS[checkpoint]), torch.float32, CPU))

    @pytest.mark.parametrize("using", INSTRUCTION_SETS)
    @pytest.mark.parametrize("quantization", [None, Quantization(8, None), Quantization(4, 32)])
    def test_same_bits_however_the_work_is_cut_by_every_set_of_instructions(
        self,
        using: InstructionSet,
        quantization: Quantization | None,
        tiny_folder: Callable[..., Path],
        num_threads: int,
    ) -> None:
        folder = tiny_folder(**CHECKPOINTS["qwen3 with biases, yarn"])
        self.check_cuts(load_model(folder, torch.bfloat16, CPU, quantization=quantization, form=form_using(using)))

    def check_cuts(self, model: LoadedModel) -> None:
        """In one step, one token a step, in uneven chunks, and with other sequences in between."""
        runner = ModelRunner(model, BLOCK_SIZE, NUM_BLOCKS)
        tokens, table, other = list(self.TOKENS), list(range(18)), list(range(20, 40))
        whole = runner.run([Segment(tokens, 0, table, num_logits=70)])
        for chunks in ([1] * 70, [5, 1, 17, 47], [33, 33, 4]):
            start, rows = 0, []
            for chunk in chunks:
                company = Segment(tokens[: 1 + start % 9], 0, other, num_logits=1)
                segment = Segment(tokens[start : start + chunk], start, table, num_logits=chunk)
                rows.append(runner.run([company, segment])[1:])
                start += chunk
            assert torch.equal(torch.cat(rows), whole)
