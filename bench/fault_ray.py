"""A Ray cluster of several nodes on this machine, with the application on it, and what befalls it.

A head with the routers; nodes named for the GPUs they would have, A100 for targets, A10G for drafts, in zones a and b.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
import yaml
from ray import serve
from ray.cluster_utils import Cluster

from bench.fault_load import Answers, Question, Row, print_head, print_row, row_of, under_load
from cluster.config import Config
from cluster.config.file import load_config
from cluster.owned_folder import sweep
from cluster.placement.registry import SETTLING_SECONDS, Announcement, Pool
from services.launch.local import free_ports
from services.launch.ray.launcher import RayApplication
from services.launch.ray.membership import FOLDERS
from services.launch.ray.registry_actor import end_registry, find_view
from services.launch.ray.scaling import scale

READY_SECONDS = 600.0
_ATTEMPTS = 4  # to start a node
_POLL_SECONDS = 0.1
_MEMORY = 80 * 2**20  # of a node's object store, the least that Ray takes: nothing goes through it
_ENVIRONMENT = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60"}  # on a busy machine 5 s are too short for Serve's proxy
_DRAIN_DEADLINE_SECONDS = 60
_LEAD_SECONDS = 1.0
_HEAD_AWAY_SECONDS = 10.0
TWO_OF_EACH = ("target.replicas=2", "draft.replicas=2", "ray.router.replicas=2")
PLACED = (
    "router.port=0",
    "router.drain_seconds=10",
    "target.drain_seconds=10",
    "draft.drain_seconds=5",
    "ray.router.num_cpus=0",
    "ray.router.resources={edge: 1}",
    "ray.target.num_cpus=0",
    "ray.target.resources={A100: 1}",
    "ray.draft.num_cpus=0",
    "ray.draft.resources={A10G: 1}",
    "ray.draft.max_replicas=3",
)


def _started(start: Callable[[], Any]) -> Any:
    """Returns what `start` starts. Ray's node dies if its agent is not up after 15 s, as happens on a busy machine."""
    for attempts_left in reversed(range(_ATTEMPTS)):
        try:
            return start()
        except Exception as error:
            if not attempts_left or "timed out during startup" not in str(error):
                raise
    raise AssertionError("unreachable")


class RayNodes:
    """Runs from when it is made until `close`; this process is its driver."""

    def __init__(self, *, has_redis: bool = False) -> None:
        """`has_redis`: the head's state is kept in a Redis, so that it can be restarted."""
        head: dict[str, Any] = {
            "num_cpus": 1,
            "resources": {"edge": 4},
            "object_store_memory": _MEMORY,
        }
        # Apart from other Rays of this machine, which look for one that was started here. Sockets need a short path.
        # Ray's programs may still write logs here after the shutdown, which is no failure of a test.
        self._folder = tempfile.TemporaryDirectory(prefix="or-", ignore_cleanup_errors=True)
        self._environment = {"RAY_TMPDIR": self._folder.name, **_ENVIRONMENT}
        os.environ |= self._environment
        self._redis = _Redis() if has_redis else None
        if self._redis is not None:
            head["external_addresses"] = [self._redis.address]
        self._cluster = _started(lambda: Cluster(initialize_head=True, head_node_args=head))
        self._nodes: dict[str, Any] = {}
        self.kinds: dict[str, str] = {}  # by host
        try:
            for kind in ("A100", "A10G"):
                for zone in ("a", "b"):
                    self.add(kind, zone)
            ray.init(self._cluster.address, log_to_driver=False, logging_level="WARNING")
            self.proxy_port = free_ports(1)[0]
            # On a real cluster there is a proxy on every node; here all nodes have the same ports.
            serve.start(proxy_location="HeadOnly", http_options={"port": self.proxy_port})
        except BaseException:
            self.close()
            raise

    @property
    def proxy_url(self) -> str:
        return f"http://127.0.0.1:{self.proxy_port}"

    def add(self, kind: str, zone: str) -> str:
        """Returns the new node's host, by which workers on it are listed: the node's ID."""
        node = _started(
            lambda: self._cluster.add_node(
                num_cpus=0,
                resources={kind: 1 if kind == "A100" else 2},
                labels={"ray.io/availability-zone": zone},
                object_store_memory=_MEMORY,
            )
        )
        self._nodes[node.node_id] = node
        self.kinds[node.node_id] = kind
        return str(node.node_id)

    @property
    def head(self) -> str:
        return str(self._cluster.head_node.node_id)

    def lose(self, host: str) -> None:
        """All of its processes are killed."""
        self._cluster.remove_node(self._nodes.pop(host), allow_graceful=False)

    def drain(self, host: str) -> None:
        """Drains a node, as happens before a spot machine is taken away."""
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "drain-node"),
            *("--address", self._cluster.address, "--node-id", self._nodes[host].node_id),
            *("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "the test takes it away"),
            *("--deadline-remaining-seconds", str(_DRAIN_DEADLINE_SECONDS)),
        ]
        subprocess.run(command, check=True, capture_output=True)

    def restart_head(self, seconds: float) -> None:
        """Stops the head's GCS for `seconds`. Programs on the nodes go on running."""
        assert self._redis is not None, "without a Redis the cluster ends with its head"
        self._cluster.head_node.kill_gcs_server()
        time.sleep(seconds)
        self._cluster.head_node.start_gcs_server()

    def close(self) -> None:
        """Shuts everything down. A log that Ray writes while the folder is removed may stay."""
        if ray.is_initialized():
            serve.shutdown()
        ray.shutdown()
        self._cluster.shutdown()
        if self._redis is not None:
            self._redis.close()
        for name in self._environment:
            del os.environ[name]
        self._folder.cleanup()
        sweep(FOLDERS)


class _Redis:
    """Redis server from Debian's package redis-server, for this run only."""

    def __init__(self) -> None:
        port = free_ports(1)[0]
        self._folder = tempfile.TemporaryDirectory(prefix="outrider-redis-")
        command = ["redis-server", "--port", str(port), "--save", "", "--dir", self._folder.name]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self.address = f"127.0.0.1:{port}"
        deadline = time.monotonic() + READY_SECONDS
        while not _is_listening(port):
            _check(deadline, "redis-server does not listen")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._folder.cleanup()


def _is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class RayFaultCluster:
    """The application of `config` on `nodes`. Runs while entered."""

    def __init__(self, nodes: RayNodes, overrides: Sequence[str]) -> None:
        self.nodes = nodes
        self._overrides = [*PLACED, *overrides]
        self.application = RayApplication(self.config)

    @property
    def config(self) -> Config:
        return load_config(None, self._overrides)

    def __enter__(self) -> RayFaultCluster:
        self.application.start()
        try:
            self.wait_ready()
        except BaseException:
            self.application.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.application.stop()

    @property
    def urls(self) -> list[str]:
        """URLs of the routers."""
        return self.application.urls()

    def members(self, pool: Pool) -> Sequence[Announcement]:
        view = find_view(self.application.name, pool)
        return () if view is None else view.members

    def addresses(self) -> list[str]:
        """The addresses of all that the registry lists, sorted."""
        return sorted(member.address for pool in POOLS for member in self.members(pool))

    def pid(self, member: Announcement) -> int:
        """Returns the process ID of the member's program."""
        return next(pid for pid, address in programs(member.pool) if address == member.address)

    def kill(self, pool: Pool, signum: signal.Signals = signal.SIGKILL) -> Announcement:
        """Sends `signum` to the first program of `pool`. Returns its member."""
        member = self.members(pool)[0]
        os.kill(self.pid(member), signum)
        return member

    def update(self, *overrides: str) -> None:
        """Deploys the application again, with other settings."""
        self._overrides += overrides
        self.application.update(self.config)

    def roll(self, *overrides: str) -> int:
        """Calls `update`, and waits until every replica has been replaced. Returns how many were."""
        members = [member for pool in POOLS for member in self.members(pool)]
        self.update(*overrides)
        self.wait_replaced(*members)
        return len(members)

    def lose_registry(self) -> None:
        """Ends the registry, and waits until another one has settled and knows all programs."""
        end_registry(self.application.name)
        deadline = time.monotonic() + READY_SECONDS
        while (found := self.addresses()) != sorted(address for _, address in programs()):
            _check(deadline, f"the registry knows only {', '.join(found)}")
        time.sleep(SETTLING_SECONDS)

    def wait_replaced(self, *gone: Announcement) -> None:
        """Waits until others have replaced `gone`, and all know each other."""
        deadline = time.monotonic() + READY_SECONDS
        replicas = {member.replica for member in gone}
        while any(member.replica in replicas for pool in POOLS for member in self.members(pool)):
            _check(deadline, "the lost replicas are still listed")
        self.wait_ready()

    def wait_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while not (self.application.is_running() and self.application.is_joined()):
            _check(deadline, "the application is not ready")

    def scale(self, num_drafts: int) -> None:
        """Sets the number of draft workers, and waits until they are up and in use."""
        self._overrides.append(f"draft.replicas={scale(self.config, 'draft', num_drafts)}")
        self.application.config = self.config
        self.wait_ready()


POOLS: tuple[Pool, ...] = ("target", "draft", "router")


def programs(pool: Pool | None = None) -> list[tuple[int, str]]:
    """The programs on this machine that replicas run, with where they are reached."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes().decode().split("\0")
            if "services.cli" in arguments and any("outrider-ray-" in argument for argument in arguments):
                kind = arguments[arguments.index("services.cli") + 1]
                tree = yaml.safe_load(Path(arguments[arguments.index("--config") + 1]).read_text(encoding="utf-8"))
                router = f"{tree['router']['host']}:{tree['router']['port']}"
                if pool in (None, kind):
                    found.append((int(folder.name), router if kind == "router" else tree[kind]["listen"]))
        except OSError:
            continue  # it has ended
    return found


def _check(deadline: float, what: str) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(f"after {READY_SECONDS:.0f} s {what}")
    time.sleep(_POLL_SECONDS)


Fault = Callable[[RayFaultCluster], str]
"""Does something to a cluster and waits until that is mended; returns what is worth noting."""


def signalled(pool: Pool, signum: signal.Signals = signal.SIGKILL) -> Fault:
    """One of its programs gets `signum`."""

    def act(cluster: RayFaultCluster) -> str:
        cluster.wait_replaced(cluster.kill(pool, signum))
        return ""

    return act


kill_router = signalled("router")


def lose_target_node(cluster: RayFaultCluster) -> str:
    """Another takes its place."""
    member = cluster.members("target")[0]
    assert member.node.host is not None
    assert member.node.zone is not None
    cluster.nodes.lose(member.node.host)
    cluster.nodes.add("A100", member.node.zone)
    cluster.wait_replaced(member)
    return f"{member.node.host} lost"


def drain_target_node(cluster: RayFaultCluster) -> str:
    """Another is there before it goes."""
    member = cluster.members("target")[0]
    assert member.node.host is not None
    assert member.node.zone is not None
    cluster.nodes.add("A100", member.node.zone)
    cluster.nodes.drain(member.node.host)
    cluster.wait_replaced(member)
    cluster.nodes.lose(member.node.host)
    return f"{member.node.host} drained"


def scale_drafts_up_and_down(cluster: RayFaultCluster) -> str:
    num_drafts = len(cluster.members("draft"))
    cluster.scale(3)
    cluster.scale(1)
    cluster.scale(num_drafts)
    return f"{num_drafts} -> 3 -> 1 -> {num_drafts}"


def roll(cluster: RayFaultCluster) -> str:
    """Every replica is replaced by one with another setting."""
    num_tokens = cluster.config.speculation.num_speculative_tokens
    return f"{cluster.roll(f'speculation.num_speculative_tokens={num_tokens + 1}')} replicas"


def restart_head(cluster: RayFaultCluster) -> str:
    cluster.nodes.restart_head(_HEAD_AWAY_SECONDS)
    cluster.wait_ready()
    return f"away for {_HEAD_AWAY_SECONDS:.0f} s"


FAULTS: dict[str, Fault] = {
    "kill a target": signalled("target"),
    "freeze a target": signalled("target", signal.SIGSTOP),
    "kill a draft": signalled("draft"),
    "kill a router": kill_router,
    "lose a target's node": lose_target_node,
    "drain a target's node": drain_target_node,
    "scale drafts": scale_drafts_up_and_down,
    "rolling update": roll,
}
# They need a Redis, and longer: `bench.faults` only.
LONG_FAULTS: dict[str, Fault] = {"restart the head": restart_head}


def measure_on_ray(settings: Sequence[str], questions: Sequence[Question], names: Sequence[str] | None) -> list[Row]:
    """A row for each of the faults, printed as soon as it is there. They leave the cluster as it was."""
    print_head()
    rows = []
    names = names or [*FAULTS, *(LONG_FAULTS if shutil.which("redis-server") else ())]
    nodes = RayNodes(has_redis=bool(LONG_FAULTS.keys() & set(names)))
    try:
        with RayFaultCluster(nodes, [*settings, *TWO_OF_EACH]) as cluster:
            calm, _ = under_load(cluster.urls, questions, None, lambda: "", _LEAD_SECONDS)
            rows.append(row_of("none", "", calm, ""))
            print_row(rows[-1])
            for name in names:
                rows.append(measure_fault(cluster, name, questions, calm.answers))
                print_row(rows[-1])
    finally:
        nodes.close()
    return rows


def measure_fault(cluster: RayFaultCluster, name: str, questions: Sequence[Question], expected: Answers) -> Row:
    fault = (FAULTS | LONG_FAULTS)[name]
    cluster.wait_ready()
    # A rolling update replaces the routers too, each with another port: only Serve's proxy stays where it is.
    urls = [cluster.nodes.proxy_url] if fault is roll else cluster.urls
    tally, note = under_load(
        urls, questions, expected, lambda: fault(cluster), _LEAD_SECONDS, may_change_router=fault is kill_router
    )
    return row_of(name, "", tally, note)
