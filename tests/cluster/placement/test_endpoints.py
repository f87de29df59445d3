"""Lists of addresses that change: files that are edited, replaced or broken, and names that move."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from cluster.config import Config
from cluster.config.file import load_config
from cluster.errors import ConfigurationError
from cluster.placement import endpoints
from cluster.placement.endpoints import advertised_address, follow, follow_addresses, parse_list
from tests.waiting import WAIT_S

A, B, C = "10.0.0.1:7000", "10.0.0.2:7000", "[fd00::3]:7000"


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "FILE_INTERVAL_S", 0.03)
    monkeypatch.setattr(endpoints, "DNS_INTERVAL_S", 0.03)


class Names:
    """Answers of a scripted name server."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hosts: dict[str, list[str] | Exception] = {}
        self.num_questions = 0
        monkeypatch.setattr(socket, "getaddrinfo", self._getaddrinfo)

    def _getaddrinfo(self, name, port, family=0, type=0, proto=0, flags=0):
        self.num_questions += 1
        hosts = self.hosts[name]
        if isinstance(hosts, Exception):
            raise hosts
        return [
            (socket.AF_INET6, type, 6, "", (host, 0, 0, 0)) if ":" in host else (socket.AF_INET, type, 6, "", (host, 0))
            for host in hosts
        ]


async def following(lists: AsyncIterator[Sequence[str]]) -> Sequence[str]:
    return list(await asyncio.wait_for(anext(lists), timeout=WAIT_S))


def test_labels_of_a_place_may_follow_an_address():
    assert parse_list("a:1 zone=b  host=h2 # new\na:2\n") == ["a:1 host=h2 zone=b", "a:2"]
    with pytest.raises(ValueError, match=r"line 2: 'rack=4' is not one of"):
        parse_list("a:1\na:2 rack=4\n")


def test_routers_do_without_the_labels(tmp_path: Path):
    path = tmp_path / "targets"
    path.write_text(f"{A} zone=b\n{B}\n")

    async def run() -> None:
        assert await following(follow_addresses([f"file:{path}"])) == [A, B]

    asyncio.run(run())


async def nothing_comes(lists: AsyncIterator[Sequence[str]], seconds: float = 0.3) -> asyncio.Task:
    """Lets `lists` be asked for the next one for a while; the task has it when it comes later."""
    waiting = asyncio.create_task(anext(lists))
    done, _ = await asyncio.wait([waiting], timeout=seconds)
    assert not done, waiting.result()
    return waiting


def test_fixed_addresses_come_at_once_in_their_order_and_stay():
    async def run() -> None:
        lists = follow([B, A, B, C])
        assert await following(lists) == [B, A, C]
        (await nothing_comes(lists, 0.1)).cancel()

    asyncio.run(run())


def test_a_list_of_nothing_is_a_list():
    async def run() -> None:
        assert await following(follow([])) == []

    asyncio.run(run())


def test_a_file_has_a_line_for_each_worker():
    assert parse_list(f"# targets\n\n  {A}  # the old one\r\n\t\n{C}\n") == [A, C]
    with pytest.raises(ValueError, match=r"line 3: '10\.0\.0\.2' is not host:port"):
        parse_list(f"{A}\n\n10.0.0.2\n")


def replace(path: Path, text: str) -> None:
    """As editors and deployment tools do it: the file with this name is another one."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.rename(path)


def rewrite(path: Path, text: str) -> None:
    path.write_text(text)


@pytest.mark.parametrize("write", [replace, rewrite])
def test_a_file_is_followed(tmp_path: Path, write: Callable[[Path, str], None]):
    path = tmp_path / "targets"
    path.write_text(f"{A}\n")

    async def run() -> None:
        lists = follow([B, f"file:{path}"])
        assert await following(lists) == [B, A]
        write(path, f"{A}\n{C}\n")
        assert await following(lists) == [B, A, C]
        write(path, f"{C}\n{A}\n")  # as long as before
        assert await following(lists) == [B, C, A]
        write(path, "# none\n")
        assert await following(lists) == [B]

    asyncio.run(run())


def test_a_file_that_is_being_written_is_not_read(tmp_path: Path):
    path = tmp_path / "targets"
    path.write_text(f"{A}\n{B}\n")

    async def run() -> None:
        lists = follow([f"file:{path}"])
        assert await following(lists) == [A, B]
        waiting = asyncio.create_task(following(lists))
        text = f"{A}\n{B}\n{C}\n"
        with path.open("w") as file:  # every beginning of the text is a shorter list, or a wrong one
            for character in text:
                file.write(character)
                file.flush()
                os.utime(path)
                await asyncio.sleep(0.01)
                assert not waiting.done(), waiting.result()
        assert await waiting == [A, B, C]

    asyncio.run(run())


def test_a_broken_or_missing_file_leaves_the_last_list_and_says_so_once(tmp_path: Path, caplog):
    path = tmp_path / "targets"
    caplog.set_level(logging.INFO, "cluster.placement.endpoints")

    def said() -> list[str]:
        messages = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return messages

    async def run() -> None:
        lists = follow([f"file:{path}"])
        assert await following(lists) == []
        (complaint,) = said()
        assert str(path) in complaint
        assert "No such file" in complaint
        path.write_text(f"{A}\n")
        assert await following(lists) == [A]
        assert said() == [f"file:{path} is readable again"]
        path.write_text(f"{B}\nnonsense\n")
        waiting = await nothing_comes(lists)
        (complaint,) = said()
        assert "line 2: 'nonsense' is not host:port" in complaint
        path.unlink()
        await asyncio.wait([waiting], timeout=0.3)
        (complaint,) = said()
        assert "No such file" in complaint
        path.write_text(f"{A}\n{B}\n")
        assert await waiting == [A, B]

    asyncio.run(run())


def test_a_name_stands_for_all_of_its_addresses(monkeypatch: pytest.MonkeyPatch):
    names = Names(monkeypatch)
    names.hosts = {"drafts": ["10.0.0.2", "fd00::3", "10.0.0.1", "10.0.0.2"]}

    async def run() -> None:
        lists = follow(["dns:drafts:7000"])
        assert await following(lists) == [A, B, C]
        names.hosts["drafts"] = ["fd00::3", "10.0.0.1", "10.0.0.2"]  # the same, in another order
        (await nothing_comes(lists)).cancel()

    asyncio.run(run())


def test_a_name_is_followed_and_a_failing_lookup_changes_nothing(monkeypatch: pytest.MonkeyPatch, caplog):
    names = Names(monkeypatch)
    names.hosts = {"targets": socket.gaierror(socket.EAI_NONAME, "unknown name")}

    async def run() -> None:
        lists = follow(["dns:targets:7000", C])
        assert await following(lists) == [C]
        names.hosts["targets"] = ["10.0.0.1"]
        assert await following(lists) == [A, C]
        names.hosts["targets"] = socket.gaierror(socket.EAI_AGAIN, "try later")
        caplog.clear()
        waiting = await nothing_comes(lists)
        (complaint,) = caplog.records
        assert "targets cannot be resolved" in complaint.getMessage()
        assert "the last list of 1 addresses stays" in complaint.getMessage()
        names.hosts["targets"] = ["10.0.0.2", "10.0.0.1"]
        assert await waiting == [A, B, C]

    asyncio.run(run())


def test_a_name_server_that_is_silent_holds_up_no_other_address(monkeypatch: pytest.MonkeyPatch):
    async def silent(name: str, port: str) -> list[str]:
        await asyncio.sleep(60)
        raise AssertionError

    monkeypatch.setattr(endpoints, "resolve", silent)
    monkeypatch.setattr(endpoints, "_FIRST_LOOK_S", 0.1)

    async def run() -> None:
        assert await following(follow(["dns:targets:7000", A])) == [A]

    asyncio.run(run())


def test_localhost_is_a_name():
    async def run() -> Sequence[str]:
        return await following(follow(["dns:localhost:7000"]))

    addresses = asyncio.run(run())
    assert "127.0.0.1:7000" in addresses or "[::1]:7000" in addresses


def test_one_who_stops_following_leaves_nothing_running(tmp_path: Path):
    async def run() -> None:
        task = asyncio.create_task(drain(follow([f"file:{tmp_path / 'none'}", A])))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    async def drain(lists: AsyncIterator[Sequence[str]]) -> None:
        async for _ in lists:
            pass

    asyncio.run(run())


@pytest.mark.parametrize("address", [A, C, "a-1.b:1", "dns:targets.default.svc:7000", "file:/etc/targets", "file:7000"])
def test_addresses_that_can_be_configured(address: str):
    assert Config.model_validate({"target": {"addresses": [address]}}).target.addresses == (address,)


@pytest.mark.parametrize("address", ["nowhere", "dns:targets", "dns:a:b:7000", "file:", "http://a:70", "a:b:70", ""])
def test_addresses_that_cannot(address: str):
    with pytest.raises(ConfigurationError, match=r"target\.addresses\.0"):
        load_config(overrides=[f"target.addresses=['{address}']"])


def worker(**settings):
    return Config.model_validate({"draft": settings}).draft


def test_where_a_worker_listens():
    assert worker(addresses=[A, B]).listen_address == A
    assert worker(addresses=[A], listen="0.0.0.0:1").listen_address == "0.0.0.0:1"
    assert worker(addresses=["dns:drafts:7000"], listen="[::]:7000").listen_address == "[::]:7000"
    for addresses in ([], ["dns:drafts:7000"], ["file:drafts"]):
        with pytest.raises(ConfigurationError, match=r"set `target\.listen` or `draft\.listen`"):
            _ = worker(addresses=addresses).listen_address


def test_where_others_reach_it():
    host = socket.gethostname()
    assert advertised_address(worker(addresses=[A])) == A
    assert advertised_address(worker(listen="0.0.0.0:7001")) == f"{host}:7001"
    assert advertised_address(worker(listen="[::]:7001")) == f"{host}:7001"
    assert advertised_address(worker(listen="0.0.0.0:7001", advertise="gateway:80")) == "gateway:80"


def test_the_module_needs_no_torch():
    program = "import sys, cluster.placement.endpoints; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
