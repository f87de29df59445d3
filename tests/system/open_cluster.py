"""A cluster that lets further workers join, and a client that compares all of its answers with those of before."""

from __future__ import annotations

import itertools
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import yaml

from cluster.config import Config
from services.launch.child import Child
from services.launch.local import LocalCluster
from tests.system.fuzzing import Figures
from tests.system.hostile_servers import VICTIM

_PROMPTS = ("def main(", "import os", "class A:", "for i in range(")
_SECONDS = 60.0  # after which an answer counts as never given
_VICTIM_SECONDS = 8.0  # a target may let its victims wait for ever


class OpenCluster(LocalCluster):
    """A cluster whose router and target read the addresses of workers in files."""

    def __init__(self, config: Config) -> None:
        self._lists = tempfile.TemporaryDirectory()
        folder = Path(self._lists.name)
        self._files = {pool: folder / pool for pool in ("target", "draft")}
        super().__init__(config, {"target": {"OUTRIDER_DRAFT__ADDRESSES": f"['file:{self._files['draft']}']"}})
        config_file = folder / "cluster.yaml"
        config_file.write_text(yaml.safe_dump(self.config.model_dump(mode="json")))
        addresses = ("--set", f"target.addresses=['file:{self._files['target']}']")
        self.router = Child("router", ["router", "--config", str(config_file), *addresses])
        self.list_workers(self.config.target.addresses, self.config.draft.addresses)

    def list_workers(self, targets: Sequence[str], drafts: Sequence[str]) -> None:
        """Replaces the addresses of the targets for the router, and of the drafts for the target."""
        for pool, addresses in (("target", targets), ("draft", drafts)):
            self._files[pool].write_text("".join(f"{address}\n" for address in addresses))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._lists.cleanup()


class Client:
    """Asks for completions whose answers it knows, and plays the victims, whose answers may be anything."""

    def __init__(self, url: str, figures: Figures) -> None:
        self.slowest_seconds = 0.0
        self._http = httpx.Client(base_url=url, timeout=_SECONDS, trust_env=False)
        self._figures = figures
        self._expected: dict[str, list[int]] = {}
        self._numbers = itertools.count()

    def close(self) -> None:
        self._http.close()

    def learn(self) -> None:
        """Stores the answers, which are those of the target alone."""
        for body in map(_body, _PROMPTS):
            response = self._http.post("/v1/completions", json=body | {"num_speculative_tokens": 0})
            response.raise_for_status()
            self._expected[body["prompt"]] = response.json()["choices"][0]["token_ids"]

    def ask(self, source: random.Random) -> None:
        """Asks any target: a salt of its own leaves none with the prompt in its cache."""
        body = _body(source.choice(_PROMPTS)) | {"cache_salt": f"{source.getrandbits(64)}"}
        body["stop_token_ids"] = []
        begun_at = time.monotonic()
        response = self._http.post("/v1/completions", json=body)
        self.slowest_seconds = max(self.slowest_seconds, time.monotonic() - begun_at)
        self._figures.answers[f"ask: {response.status_code}"] += 1
        if response.status_code != 200:
            self._figures.failures.append(f"{response.status_code}: {response.text[:500]}")
        elif (token_ids := response.json()["choices"][0]["token_ids"]) != self._expected[body["prompt"]]:
            self._figures.failures.append(f"{token_ids} are not the tokens after {body['prompt']}")

    def ask_as_victim(self, source: random.Random) -> None:
        body = _body(source.choice(_PROMPTS)) | {
            "request_id": f"{VICTIM}-{next(self._numbers)}",
            "cache_salt": f"{source.getrandbits(64)}",
            "stream": source.random() < 0.5,
            "return_speculation_stats": source.random() < 0.5,
            "return_rounds": source.random() < 0.5,
            "logprobs": source.choice((None, 1, 5)),
            "n": source.choice((1, 1, 2)),
            "stop": source.choice(([], ["zz"])),
        }
        try:
            response = self._http.post("/v1/completions", json=body, timeout=_VICTIM_SECONDS)
        except httpx.TimeoutException:
            self._figures.answers["victim: no answer"] += 1
            return
        except httpx.TransportError as error:  # the router ends a stream that it cannot finish
            self._figures.answers[f"victim: {type(error).__name__}"] += 1
            return
        self._figures.answers[f"victim: {response.status_code}"] += 1
        if response.status_code == 500 or '"code": 500' in response.text or "internal_error" in response.text:
            self._figures.failures.append(f"a victim gets {response.status_code}: {response.text[-500:]}")


def _body(prompt: str) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 24, "seed": 7, "ignore_eos": True, "return_token_ids": True}
