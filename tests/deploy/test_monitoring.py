"""Dashboards and alerts: every query is answered by a Prometheus that scrapes a cluster under load, and alerts fire."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from cluster.config.file import load_config
from deploy.grafana.dashboards import DASHBOARDS, FOLDER, Dashboard, to_json
from services.launch.local import LocalCluster, free_ports
from services.prove.client import ask_all
from tests.system.conftest import READY_TIMEOUT_SECONDS
from tests.vllm_metrics import DASHBOARDS as VLLM_DASHBOARDS
from tests.vllm_metrics import ENGINES, PICKER
from tests.waiting import eventually

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = FOLDER / "rules.yaml"
RULES_TESTS = DEPLOY / "prometheus" / "tests.yaml"
RUNBOOKS = Path(__file__).parents[2] / "docs" / "RUNBOOKS.md"
VARIABLES = {"$job": ".*", "$__rate_interval": "10s", "$target_dollars": "14.7", "$draft_dollars": "1"}
SCRAPES_SECONDS = 12  # rates need two scrapes
GOOD_SECONDS = 20
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="Prometheus is not installed: apt-get install prometheus"
)


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.name)
def test_the_files_are_what_the_code_says(dashboard: Dashboard) -> None:
    assert dashboard.path.read_text(encoding="utf-8") == to_json(dashboard), "run `make docs`"


def test_every_alert_has_a_runbook_and_a_test() -> None:
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    alerts = [rule for rule in rules if "alert" in rule]
    names = [alert["alert"] for alert in alerts]
    assert len(names) == len(set(names))
    assert re.findall(r"^## (\w+)$", RUNBOOKS.read_text(encoding="utf-8"), re.MULTILINE) == names
    for alert in alerts:
        assert alert["annotations"]["runbook_url"] == f"docs/RUNBOOKS.md#{alert['alert'].lower()}"
    tests = yaml.safe_load(RULES_TESTS.read_text())["tests"]
    fired = {case["alertname"] for test in tests for case in test.get("alert_rule_test", ()) if case["exp_alerts"]}
    assert fired == set(names)
    computed = {case["expr"] for test in tests for case in test.get("promql_expr_test", ())}
    assert computed == {rule["record"] for rule in rules if "record" in rule}


@needs_prometheus
def test_the_alerts_fire_when_they_should() -> None:
    ran = subprocess.run(["promtool", "test", "rules", RULES_TESTS], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def is_ok(url: str) -> bool:
    try:
        return httpx.get(url).is_success
    except httpx.TransportError:
        return False


class Monitored:
    """A cluster of simulated engines, and a Prometheus that scrapes it every second with our rules.

    `shorter`: windows of the rules, and what stands for them, as `for` stands for ten minutes.
    """

    def __init__(self, folder: Path, *more_settings: str, shorter: dict[str, str] | None = None) -> None:
        targets, drafts, router, self._prometheus_port = free_ports(4)
        settings = [
            *("target.engine=simulated", "draft.drafter=simulated", f"router.port={router}"),
            *(f"target.metrics_port={targets}", f"draft.metrics_port={drafts}"),
            *more_settings,
        ]
        self.cluster = LocalCluster(load_config(None, settings))
        rules = yaml.safe_load(RULES.read_text())
        for group in rules["groups"]:
            for rule in group["rules"]:
                if "alert" in rule:
                    rule["for"] = "1s"  # as much would fire later
                for window, stand_in in (shorter or {}).items():
                    rule["expr"] = rule["expr"].replace(f"[{window}]", f"[{stand_in}]")
        (folder / "rules.yaml").write_text(yaml.safe_dump(rules))
        addresses = [f"127.0.0.1:{port}" for port in (router, targets, drafts)]
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yaml"],
            "scrape_configs": [{"job_name": "outrider", "static_configs": [{"targets": addresses}]}],
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        self._folder = folder
        self._stopping = threading.Event()
        self._load = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        body = {"prompt": "def main(", "max_tokens": 64, "temperature": 0.7, "ignore_eos": True}
        while not self._stopping.is_set():
            ask_all(self.cluster.url, [body] * 4, num_streams=4)

    def __enter__(self) -> Monitored:
        self.cluster.start()
        self.cluster.wait_ready(READY_TIMEOUT_SECONDS)
        listen = f"127.0.0.1:{self._prometheus_port}"
        paths = [f"--config.file={self._folder}/prometheus.yaml", f"--storage.tsdb.path={self._folder}/data"]
        self._prometheus = subprocess.Popen(
            ["prometheus", *paths, f"--web.listen-address={listen}"], stderr=subprocess.DEVNULL
        )
        ready = f"http://{listen}/-/ready"
        assert eventually(lambda: is_ok(ready), READY_TIMEOUT_SECONDS)
        self._load.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._load.join()
        self._prometheus.terminate()
        self._prometheus.wait()
        self.cluster.stop()

    def get(self, path: str, **parameters: str) -> dict:
        url = f"http://127.0.0.1:{self._prometheus_port}/api/v1/{path}"
        answer = httpx.get(url, params=parameters)
        assert answer.status_code == 200, f"{parameters}: {answer.text}"
        return answer.json()["data"]

    def query(self, promql: str) -> list:
        for name, value in VARIABLES.items():
            promql = promql.replace(name, value)
        return self.get("query", query=promql)["result"]

    def firing(self) -> set[str]:
        return {alert["labels"]["alertname"] for alert in self.get("alerts")["alerts"] if alert["state"] == "firing"}


@pytest.fixture(scope="module")
def monitored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitored]:
    with Monitored(tmp_path_factory.mktemp("prometheus")) as running:
        time.sleep(SCRAPES_SECONDS)
        yield running


@needs_prometheus
@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.name)
def test_every_query_of_every_panel_returns_data(monitored: Monitored, dashboard: Dashboard) -> None:
    def unanswered() -> list[str]:
        return [query for query in dashboard.queries() if not monitored.query(query)]

    assert eventually(lambda: not unanswered(), 30), unanswered()


@needs_prometheus
def test_other_dashboards_and_pickers_find_their_series(monitored: Monitored) -> None:
    wanted = {
        *(f'{name}{{model_name!="",engine="router"}}' for name in (*VLLM_DASHBOARDS, *PICKER)),
        *(f'{name}{{model_name!="",engine="0"}}' for name in ENGINES),
    }

    def missing() -> list[str]:
        return [query for query in sorted(wanted) if not monitored.query(query)]

    assert eventually(lambda: not missing(), 30), missing()


@needs_prometheus
def test_nothing_fires_while_all_is_well_and_a_lost_draft_pool_does(monitored: Monitored) -> None:
    assert monitored.firing() <= {"OutriderSpeculationCosts"}  # whose ten minutes are a second here
    (draft,) = monitored.cluster.drafts
    draft.watch = lambda: None  # it is not started again
    draft.kill()
    assert eventually(lambda: "OutriderDraftPoolGone" in monitored.firing(), 30), monitored.firing()


@needs_prometheus
def test_a_draft_that_guesses_at_random_is_noticed(tmp_path: Path) -> None:
    """The controller has ended its drafts by then; what is still tried now and then is enough to tell."""
    broken = f"simulation.acceptance_schedule=[[0, 0.8], [{GOOD_SECONDS}, 0.0]]"
    with Monitored(tmp_path, broken, shorter={"30m": "8s", "7d": "120s"}) as running:
        assert eventually(lambda: running.query("outrider_speculation_gain_ratio"), 30)
        assert "OutriderAcceptanceFell" not in running.firing()
        fired = eventually(lambda: "OutriderAcceptanceFell" in running.firing(), GOOD_SECONDS + 45)
        rates = (
            "rate(vllm:spec_decode_num_draft_tokens_total[8s])",
            "rate(vllm:spec_decode_num_accepted_tokens_total[8s])",
        )
        assert fired, [running.query(rate) for rate in rates]
