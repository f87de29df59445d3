"""The vLLM that is installed is the one whose internals are used, and one that is not is refused by name."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from cluster.errors import ConfigurationError
from cluster.vllm import compatibility
from cluster.vllm.compatibility import Internal


def test_installed_vllm_is_as_expected() -> None:
    """In a process of its own, as vLLM changes the one that imports it."""
    program = "from cluster.vllm.compatibility import *; check([*V2_FRONT_END, *V2_TARGET, *TARGET, *DRAFTER])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Stands for a vLLM of our version, with one function."""

    def generate(prompt: str, seed: int = 0) -> None: ...

    module = ModuleType("vllm")
    module.__spec__ = ModuleSpec("vllm", None)
    module.__version__ = f"{compatibility.VERSION}7"  # type: ignore[attr-defined]
    module.generate = generate  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    return module


def test_what_is_the_same_passes(vllm: ModuleType) -> None:
    there = Internal("vllm", "generate.__name__")
    compatibility.check(
        [there, Internal("vllm", "generate", ("prompt", "seed")), Internal("vllm", "generate", some=("seed",))]
    )


@pytest.mark.parametrize(
    ("internal", "complaint"),
    [
        (Internal("vllm.of_old", "x"), r"vllm\.of_old\.x does not exist"),
        (Internal("vllm", "generate.of_old"), r"vllm\.generate\.of_old does not exist"),
        (Internal("vllm", "generate", some=("seed", "n")), r"vllm\.generate has no n"),
        (Internal("vllm", "generate", ("prompt",)), r"vllm\.generate takes \(prompt, seed\), not \(prompt\)"),
    ],
)
def test_what_differs_is_named(vllm: ModuleType, internal: Internal, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        compatibility.check([internal])


def test_another_version_is_refused(vllm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.33.1")
    with pytest.raises(ConfigurationError, match=r"vLLM 0\.33\.1 is installed.*0\.32"):
        compatibility.check([])


def test_missing_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="make setup-vllm"):
        compatibility.check_installation()


def test_packages_built_for_another_torch(vllm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torchaudio.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchaudio", raising=False)
    with pytest.raises(ConfigurationError, match=r"torchaudio .*libcudart.*make setup-vllm"):
        compatibility.check_installation()
