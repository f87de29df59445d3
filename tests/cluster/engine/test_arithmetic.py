"""The portable kernels compute the same bits with registers of every width, by every compiler, on every processor."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cluster.engine import arithmetic, invariance
from cluster.engine.cpu_kernels import LANES_VARIABLE, has_kernels, kernels
from cluster.engine.invariance import check_invariance
from cluster.engine.loader import load_model
from cluster.engine.runner import ModelRunner
from cluster.errors import ConfigurationError
from cluster.model_folder import resolve_model_folder
from tests.soak import IS_SOAK

needs_kernels = pytest.mark.skipif(not has_kernels(), reason="they do not run here")
KERNELS = Path(arithmetic.__file__).parent / "kernels"
# The hash that bits.c prints with every compiler and for every processor.
BITS = "0527f519bc0f05ef"
_ARM = ("aarch64-linux-gnu-gcc", "clang-16 --target=aarch64-linux-gnu")
COMPILERS = (*_ARM, "gcc", "clang-16") if IS_SOAK else _ARM  # kernels of x86 take half a minute to compile


@pytest.fixture
def any_lanes() -> Iterator[None]:
    yield
    kernels.use_lanes(int(os.environ.get(LANES_VARIABLE) or 0))


@needs_kernels
@pytest.mark.usefixtures("any_lanes")
@pytest.mark.parametrize("lanes", [16, 8, 4])
def test_registers_of_every_width_compute_the_same(lanes: int) -> None:
    if not kernels.use_lanes(lanes):
        pytest.skip("this processor has no such registers")
    assert arithmetic.digest() == arithmetic.DIGEST


@needs_kernels
def test_kernels_with_other_bits_are_refused_where_they_should_be_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(resolve_model_folder("outrider-draft-2m"), torch.float32, torch.device("cpu"))
    monkeypatch.setattr(invariance, "is_portable", lambda: False)
    with pytest.raises(ConfigurationError, match="compute other bits than on other machines"):
        check_invariance(ModelRunner(model, 16, 16))


@needs_kernels
def test_cosines_and_sines_are_those_of_double_precision() -> None:
    angles = torch.outer(torch.arange(0.0, 131_072.0, 37.0), torch.logspace(0, -5, 64))
    cos, sin = torch.empty_like(angles), torch.empty_like(angles)
    kernels.cos_sin(angles.data_ptr(), angles.numel(), cos.data_ptr(), sin.data_ptr())
    assert (cos != angles.double().cos().float()).sum() <= 1  # of 226,752, where a library rounds a tie otherwise
    assert (sin != angles.double().sin().float()).sum() <= 1


@pytest.mark.parametrize("compiler", COMPILERS)
def test_other_compilers_and_processors_compute_the_same(compiler: str, tmp_path: Path) -> None:
    name, *options = compiler.split()
    emulator = ["qemu-aarch64-static"] if "aarch64" in compiler else []
    needed = (name, *emulator, *(["aarch64-linux-gnu-ld"] if emulator else []))
    if any(shutil.which(tool) is None for tool in needed):
        pytest.skip("not installed")
    program = tmp_path / "bits"
    sources = [path for path in KERNELS.glob("*.c") if not path.stem.endswith("_portable") and path.stem != "module"]
    command = [name, *options, "-O2", "-ffp-contract=off", "-pthread", "-static", "-I", KERNELS, "-o", program]
    subprocess.run([*command, Path(__file__).parent / "bits.c", *sources, "-lm"], check=True)
    assert subprocess.run([*emulator, program], check=True, capture_output=True, text=True).stdout.split() == [BITS]
