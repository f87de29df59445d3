from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from cluster.config.router import RouterConfig
from cluster.errors import ConfigurationError
from services.router.operators.traffic_log import TrafficLog


def messages_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The log's own messages: routers of other tests may still write theirs."""
    return [record.message for record in caplog.records if record.name == TrafficLog.__module__]


def lines(file: Path) -> list[list[int]]:
    return [json.loads(line)["prompt_token_ids"] for line in file.read_text(encoding="utf-8").splitlines()]


def test_it_is_off_unless_asked_for() -> None:
    assert TrafficLog.of(RouterConfig()) is None


def test_prompts_are_appended_for_the_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "traffic.jsonl"
    file.touch(mode=0o644)
    for prompts in ([[1, 2], [3]], [[4]]):
        log = TrafficLog(str(file), 1000)
        log.add(prompts)
        log.close()
    assert lines(file) == [[1, 2], [3], [4]]
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600


def test_a_full_one_takes_no_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "traffic.jsonl"
    log = TrafficLog(str(file), 60)
    log.add([[1, 2, 3]] * 5)
    log.add([[1]])
    assert lines(file) == [[1, 2, 3], [1, 2, 3]][: len(lines(file))]
    assert file.stat().st_size <= 60
    assert messages_of(caplog).count(f"no more prompts are logged in {file}: it is full") == 1


def test_one_that_is_full_at_start_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "traffic.jsonl"
    file.write_bytes(b"x" * 60)
    log = TrafficLog(str(file), 60)
    log.add([[1]])
    assert messages_of(caplog) == [f"no more prompts are logged in {file}: it is full"]
    assert file.stat().st_size == 60


def test_routers_that_share_one_hold_to_its_size_together(tmp_path: Path) -> None:
    file = tmp_path / "traffic.jsonl"
    logs = [TrafficLog(str(file), 200) for _ in range(3)]
    for number in range(10):
        for log in logs:
            log.add([[number]])
    assert 150 < file.stat().st_size <= 200
    assert lines(file) == [[number // 3] for number in range(len(lines(file)))]


def test_of_a_line_that_the_disk_takes_a_part_of_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, path = os.write, tmp_path / "traffic.jsonl"
    log = TrafficLog(str(path), 10_000)
    log.add([[1, 2, 3]])
    monkeypatch.setattr("os.write", lambda file, line: write(file, line[: len(line) // 2]))
    log.add([[4, 5, 6], [7]])
    monkeypatch.undo()
    log.add([[8]])  # it has ended
    assert path.read_text() == '{"prompt_token_ids":[1,2,3]}\n'


def test_one_that_cannot_be_written_is_an_error_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="traffic_log_file"):
        TrafficLog(str(tmp_path / "none" / "traffic.jsonl"), 1000)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.touch(mode=0o644)
    for name, to in (("link", other), ("dangling", tmp_path / "none")):
        (tmp_path / name).symlink_to(to)
        with pytest.raises(ConfigurationError, match=f"traffic_log_file .*{name}"):
            TrafficLog(str(tmp_path / name), 1000)
    assert not (tmp_path / "none").exists()
    assert stat.S_IMODE(other.stat().st_mode) == 0o644


def test_a_file_of_another_user_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, user = tmp_path / "traffic.jsonl", os.geteuid()
    file.touch(mode=0o644)
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(ConfigurationError, match="is not a file of the router's user"):
        TrafficLog(str(file), 1000)
    assert stat.S_IMODE(file.stat().st_mode) == 0o644


@pytest.mark.parametrize("has_reader", [False, True])
def test_a_fifo_is_refused_without_a_wait(tmp_path: Path, has_reader: bool) -> None:
    fifo = tmp_path / "traffic.jsonl"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK) if has_reader else None
    with pytest.raises(ConfigurationError, match="traffic_log_file"):
        TrafficLog(str(fifo), 1000)
    if reader is not None:
        os.close(reader)
