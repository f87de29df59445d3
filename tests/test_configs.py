"""The configurations we ship load, and the one that claims to be the default is."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.config import Config
from cluster.config.file import load_config

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_configuration_loads(path: Path) -> None:
    load_config(path)


def test_local_cpu_is_the_default() -> None:
    written_out = load_config(CONFIGS[0].with_name("local-cpu.yaml"), ["target.device=auto", "draft.device=auto"])
    assert written_out == Config()
