"""Tests of the comparison of an installed vLLM with the internals that are used."""

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
from tests.waiting import WAIT_S


def _installed() -> Path:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parents[1]


INSTALLED = _installed()


def test_installed_vllm_is_as_expected() -> None:
    """In a process of its own, as vLLM changes the one that imports it."""
    program = "from cluster.vllm.compatibility import *; check(ALL)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr


def test_installed_source_is_as_expected() -> None:
    assert compatibility.compare_source(INSTALLED, [*compatibility.ALL, *compatibility.imported_names()]) == []


def test_number_of_internals() -> None:
    assert len(compatibility.ALL) <= 40, "each row costs work with every release of vLLM: try to cover several with one"


def test_imported_names_are_found() -> None:
    names = {internal.name for internal in compatibility.imported_names()}
    assert {"vllm.AsyncEngineArgs", "vllm.v1.engine.exceptions.EngineDeadError"} <= names  # of a module, of a function


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Stands for a tested vLLM with one function. Its source is that of the installed vLLM."""

    def generate(prompt: str, seed: int = 0) -> None: ...

    module = ModuleType("vllm")
    module.__spec__ = ModuleSpec("vllm", None, origin=str(INSTALLED / "vllm" / "__init__.py"))
    module.__version__ = f"{compatibility.TESTED[0]}+cpu"  # type: ignore[attr-defined]
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


UNTESTED = (
    Internal("vllm.of_old", "x"),
    Internal("vllm.v1.request", "Request.append_output_token_ids", ("self", "token_ids"), definitions=("0" * 12,)),
)


def test_an_untested_version_is_refused_by_what_differs(vllm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.34.1")
    with pytest.raises(ConfigurationError, match=r"vLLM 0\.34\.1 is installed.*0\.33") as raised:
        compatibility.check(UNTESTED)
    assert "vllm.of_old.x does not exist; vllm.v1.request.Request.append_output_token_ids has another definition (" in (
        str(raised.value)
    )
    assert "--allow-untested-vllm" in str(raised.value)


def test_an_untested_version_may_be_allowed(
    vllm: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.34.1")
    compatibility.check(UNTESTED, allow_untested=True)
    compatibility.check(compatibility.V2_TARGET)
    assert ["vllm.of_old.x does not exist" in message for message in caplog.messages] == [True, False]
    assert caplog.messages[1].endswith("nothing that Outrider uses differs")


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
