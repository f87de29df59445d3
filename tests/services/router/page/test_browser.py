"""The page in a real Chromium, in front of a cluster with simulated engines that others use meanwhile."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright

from cluster.config.file import load_config
from cluster.model_folder import ASSETS
from cluster.speculation.speed import (
    RoundCosts,
    best_num_speculative_tokens,
    expected_tokens,
    round_seconds,
    speedup,
)
from services.launch.local import LocalCluster
from tests.system.conftest import READY_TIMEOUT_SECONDS
from tests.waiting import WAIT_S

SETTINGS = (
    "target.engine=simulated",
    "draft.drafter=simulated",
    "draft.placement=pool",
    "simulation.target_step_ms=[[1, 10]]",
    "simulation.draft_step_ms=[[1, 1]]",
    "simulation.acceptance=0.8",
    "target.first_token_ms=600000",
    "router.port=0",
)
# No sandbox for root, and nothing that a browser does of its own accord.
FLAGS = (
    *("--no-sandbox", "--disable-quic", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--disable-default-apps", "--no-first-run"),
)
WIDTHS = {"phone": (390, 844), "desktop": (1280, 900)}
PROMPT = {"prompt": "def main(", "max_tokens": 60, "temperature": 0.7, "seed": 11}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        assert "REQUIRE_BROWSER" not in os.environ, "there is no Chromium: apt-get install chromium"
        pytest.skip("there is no Chromium (apt-get install chromium)")
    expect.set_options(timeout=WAIT_S * 1e3)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        yield browser
        browser.close()


class Load:
    """Another client, who asks for one answer after the other."""

    def __init__(self, url: str) -> None:
        self.texts: list[str] = []
        self._url = url
        self._has_to_end = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_to_end.set()
        self._thread.join()

    def _ask(self) -> None:
        with httpx.Client(base_url=self._url, timeout=WAIT_S) as client:
            while not self._has_to_end.is_set():
                body = {"prompt": "class Secret:", "max_tokens": 48, "n": 3, "seed": len(self.texts)}
                choices = client.post("/v1/completions", json=body).json()["choices"]
                self.texts += [choice["text"] for choice in choices]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(load_config(None, SETTINGS)) as running:
        running.wait_ready(READY_TIMEOUT_SECONDS)
        yield running


class Visit:
    """A page that is open, and what it did."""

    def __init__(self, browser: Browser, url: str, scheme: str = "light", width: str = "desktop") -> None:
        size = dict(zip(("width", "height"), WIDTHS[width], strict=True))
        self._context = browser.new_context(color_scheme=scheme, viewport=size)
        self._context.set_default_timeout(WAIT_S * 1e3)
        self.page: Page = self._context.new_page()
        self.url = url
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda told: self.complaints.append(told.text) if told.type != "log" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(url + "/", wait_until="commit")

    def __enter__(self) -> Visit:
        expect(self.page.locator("#connection")).to_have_text("live")
        return self

    def __exit__(self, *_: object) -> None:
        self._context.close()

    def ask(self, **fields: Any) -> None:
        """Fills in the prompt's form, sends it, and waits for the answer."""
        self.page.select_option("#prompt-kind", fields.get("kind", "completion"))
        names = {"prompt": "text", "max_tokens": "length", "temperature": "temperature", "seed": "seed", "k": "k"}
        for field, name in names.items():
            self.page.fill(f"#prompt-{name}", str(fields.get(field, "")))
        self.page.click("text=Send")
        expect(self.page.locator("#answer-summary")).to_contain_text("ended:")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_shows_a_cluster_at_work(browser: Browser, cluster: LocalCluster, scheme: str, width: str) -> None:
    with Load(cluster.url) as load, Visit(browser, cluster.url, scheme, width) as visit:
        page = visit.page
        visit.ask(**PROMPT, k=4)  # else the controller may find, on a busy machine, that drafts don't pay
        expect(page.locator("#lanes li")).not_to_have_count(0)
        for mark in ("accepted", "correction"):
            expect(page.locator(f"#lanes i.{mark}").first).to_be_attached()
            expect(page.locator(f"#answer span.{mark}").first).to_be_attached()
        for bar in ("verify", "wait", "draft"):
            expect(page.locator(f"#timeline rect.{bar}").first).to_be_attached()
        for chart in ("positions", "depths"):
            expect(page.locator(f"#{chart} rect").first).to_be_attached()
        expect(page.locator("#workers tr")).to_have_count(2)
        expect(page.locator("#workers")).to_contain_text(re.compile(r"; 0 of [1-9]\d* requests late since its start; "))
        expect(page.locator("#figure-targets")).to_have_text("1 of 1")
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        found = Axe().run(page).response["violations"]
        serious = [(one["id"], one["nodes"]) for one in found if one["impact"] in ("serious", "critical")]
        assert not serious
        shown = page.evaluate("document.documentElement.outerHTML")
        assert visit.complaints == []
        assert visit.asked
        assert all(address.startswith(cluster.url + "/") for address in visit.asked)
    assert load.texts
    for text in load.texts:
        pieces = [text[start : start + 30] for start in range(0, len(text) - 30, 30)]
        assert not any(len("".join(piece.split())) > 20 and piece in shown for piece in pieces)


def test_a_question_is_put_to_a_model_that_converses(browser: Browser, tmp_path: Path) -> None:
    question = "What is the capital of France, and what is it known for?"
    folder = shutil.copytree(ASSETS / "outrider-target-12m", tmp_path / "instruct")
    with LocalCluster(load_config(None, [*SETTINGS, f"target.model={folder}"])) as cluster:
        cluster.wait_ready(READY_TIMEOUT_SECONDS)
        with Visit(browser, cluster.url) as visit:
            expect(visit.page.locator("#prompt-text")).to_have_value(question)
            expect(visit.page.locator("#prompt-kind")).to_have_value("chat")
            visit.page.click("text=Send")
            expect(visit.page.locator("#answer-summary")).to_contain_text("ended:")
            assert visit.complaints == []


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_an_answer_is_what_the_api_gives(browser: Browser, cluster: LocalCluster, kind: str) -> None:
    body = {**PROMPT, "return_rounds": True}
    path, prompt = "/v1/completions", body["prompt"]
    if kind == "chat":
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    (choice,) = httpx.post(cluster.url + path, json=body, timeout=WAIT_S).json()["choices"]
    with Visit(browser, cluster.url) as visit:
        visit.ask(**{**PROMPT, "prompt": prompt, "kind": kind})
        assert visit.page.locator("#answer").text_content() == choice.get(
            "text", choice.get("message", {}).get("content")
        )
        told = visit.page.locator("#answer-summary").text_content() or ""
        assert "60 tokens in" in told
        assert "seed 11" in told
        assert visit.complaints == []


def test_it_can_be_used_by_keyboard_alone(browser: Browser, cluster: LocalCluster) -> None:
    with Visit(browser, cluster.url) as visit:
        page, reached = visit.page, []
        for _ in range(40):
            page.keyboard.press("Tab")
            focused = page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()")
            reached.append(focused)
            if focused == "Send":
                page.keyboard.press("Enter")
                expect(page.locator("#answer-summary")).to_contain_text("ended:")
            if focused == "whatif-k":
                page.keyboard.press("ArrowRight")
        assert reached[0] == "Skip to the prompt"
        wanted = ["prompt-text", "prompt-kind", "prompt-length", "prompt-seed", "prompt-k", "Send", "answer"]
        wanted += ["timeline-hold", "whatif-follow", "whatif-k", "whatif-roundTrip", "whatif-turn"]
        places = [reached.index(name) for name in wanted]
        assert places == sorted(places)
        expect(page.locator("#whatif-follow")).not_to_be_checked()  # a slider was moved


def test_an_answer_can_be_stopped_and_an_error_is_shown(browser: Browser, cluster: LocalCluster) -> None:
    with Visit(browser, cluster.url) as visit:
        page = visit.page
        page.fill("#prompt-length", "1900")
        page.click("text=Send")
        expect(page.locator("#answer span").first).to_be_attached()
        page.click("text=Stop")
        expect(page.locator("#answer")).to_have_attribute("aria-busy", "false")
        page.fill("#prompt-length", "4096")
        page.fill("#prompt-text", "x " * 8000)
        page.click("text=Send")
        expect(page.locator("#error")).to_contain_text("maximum context length")


def test_a_router_with_keys_asks_for_one(browser: Browser, tmp_path) -> None:
    key = "a-key-of-more-than-thirty-two-characters"
    keys = tmp_path / "keys"
    keys.write_text(f"me:{key}\n")
    with LocalCluster(load_config(None, [*SETTINGS, f"router.api_keys_file={keys}"])) as running:
        running.wait_ready(READY_TIMEOUT_SECONDS)
        visit = Visit(browser, running.url)
        expect(visit.page.locator("#key-form")).to_be_visible()
        visit.page.fill("#key", key)
        visit.page.keyboard.press("Enter")
        with visit:
            expect(visit.page.locator("#key-form")).to_be_hidden()
            visit.ask(**PROMPT)
            assert visit.page.evaluate("localStorage.length") == 0
            assert key not in visit.page.url
            running.stop()
            expect(visit.page.locator("#connection")).not_to_have_text("live")


def test_its_formulas_are_the_librarys(browser: Browser, cluster: LocalCluster) -> None:
    rates = [0.0, 0.1, 0.35, 0.6, 0.8, 0.95, 1.0]
    depths = [0, 1, 2, 3, 5, 8, 16]
    costs = [(draft, verify, trip) for draft in (0.1, 2.0, 30.0) for verify in (1.0, 15.0) for trip in (0.0, 0.5, 20.0)]
    program = """async ([rates, depths, costs]) => {
      const { expectedTokens, speedup, bestK, overlappedRoundTime } = await import("/page/theory.js");
      return rates.flatMap((rate) => costs.flatMap(([draft, verify, roundTrip]) => {
        const own = { draft, verify, roundTrip };
        return [bestK(rate, own), ...depths.flatMap((k) => [
          expectedTokens(rate, k), speedup(rate, k, own), speedup(rate, k, { ...own, decode: 0.5 * verify }),
          speedup(rate, k, own, overlappedRoundTime)])];
      }));
    }"""
    with Visit(browser, cluster.url) as visit:
        found = visit.page.evaluate(program, [rates, depths, costs])
    expected: list[float] = []
    for rate in rates:
        for draft, verify, trip in costs:
            own = RoundCosts(draft_token=draft, verify=verify, round_trip=trip)
            expected.append(best_num_speculative_tokens(rate, own))
            for k in depths:
                tokens, gain = expected_tokens(rate, k), speedup(rate, k, own)
                overlapped = round_seconds(k * draft, verify, trip, overlaps=True)
                expected += [tokens, gain, 0.5 * gain, tokens * verify / overlapped]
    assert found == pytest.approx(expected, rel=1e-12)
