from __future__ import annotations

from pathlib import Path

from protos.generate import MESSAGES, ROOT, SERVICES, generate


def test_the_committed_modules_are_those_the_protos_generate(tmp_path: Path) -> None:
    generate(tmp_path)
    generated = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    files = [path for path in (ROOT / "protos").rglob("*_pb2*.py*") if path.suffix in (".py", ".pyi")]
    committed = {path.relative_to(ROOT): path.read_text() for path in files}
    assert len(generated) == 2 * len(MESSAGES) + 2 * len(SERVICES)
    assert generated == committed
