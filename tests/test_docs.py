"""The documents are complete and their links lead somewhere."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from cluster.engine.model_config import FAMILIES
from cluster.vllm.compatibility import TESTED
from cluster.wire.version import WIRE_VERSION
from services.router.api.completions import CompletionRequest
from services.router.api.request import IGNORED_FIELDS
from services.router.chat.endpoint import ChatRequest
from services.router.responses import request as responses
from tests.system.vllm.architectures import ARCHITECTURES, REFUSED

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def anchors(page: Path) -> set[str]:
    """Returns GitHub's anchors for the headings of `page`."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), link
        if anchor:
            assert anchor in anchors(linked), link


def test_every_metric_is_explained() -> None:
    page = (ROOT / "docs" / "MONITORING.md").read_text(encoding="utf-8")
    sources = [*(ROOT / "cluster").rglob("*.py"), *(ROOT / "services").rglob("*.py")]
    declared = re.compile(r'(?:Reading|counter|readings|Gauge|Counter|histogram)\(\s*"((?:outrider_|vllm:)\w+)"')
    names = {name for path in sources for name in declared.findall(path.read_text(encoding="utf-8"))}
    assert len(names) > 25
    assert not {name for name in names if name not in page}


@pytest.mark.parametrize("request_type", [ChatRequest, CompletionRequest])
def test_every_field_of_a_request_is_explained(request_type: type[ChatRequest] | type[CompletionRequest]) -> None:
    page = (ROOT / "docs" / "API.md").read_text(encoding="utf-8")
    fields = {*request_type.model_fields, *request_type.unsupported_fields, *IGNORED_FIELDS} - {"stream_options"}
    assert not {field for field in fields if f"`{field}`" not in page}


def test_every_field_of_a_response_is_explained() -> None:
    page = (ROOT / "docs" / "API.md").read_text(encoding="utf-8")
    fields = {*responses.ResponsesRequest.model_fields, *responses.PASSED_ON, *responses.REFUSED, *responses.IGNORED}
    assert not {field for field in fields if f"`{field}`" not in page}


def test_the_compatibility_table_has_this_version_first() -> None:
    page = (ROOT / "docs" / "UPGRADING.md").read_text(encoding="utf-8")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    row = dict(zip(lines[0], lines[2], strict=True))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    required = [Requirement(text) for text in (*project["dependencies"], *extras["vllm"], *extras["ray"])]
    pinned = {requirement.name: str(requirement.specifier).removeprefix("==") for requirement in required}
    assert pinned["vllm"] == TESTED[0]
    assert row == {
        "Outrider": project["version"],
        "wire": str(WIRE_VERSION),
        "Python": f"{project['requires-python'].removeprefix('>=')} or later",
        "PyTorch": pinned["torch"],
        "vLLM": ", ".join(TESTED),
        "Ray": pinned["ray"],
    }


def test_the_table_of_architectures_is_that_of_code_and_results() -> None:
    page = (ROOT / "docs" / "MODELS.md").read_text(encoding="utf-8")
    table = page[page.index("| architecture | target on vLLM") :].partition("\n\n")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    rows = {name: cells for names, *cells in lines for name in names.split(", ")}
    own = {"Gemma3": "Gemma 3", "Phi3": "Phi-4"}
    own = {own.get(name, name): "seen" for name in (family.removesuffix("ForCausalLM") for family in FAMILIES)}
    refused = dict.fromkeys(REFUSED, "refused on a CPU")
    target, plugin = (_seen(name) | refused for name in ("architectures.json", "plugin-architectures.json"))
    assert rows.pop("Llama") == ["seen, GPU too", *["seen"] * 5]
    assert rows == {
        name: [
            target.get(name, "not seen"),
            plugin.get(name, "not seen"),
            own.get(name, "refused"),
            "not seen" if name in own else "refused",
            own.get(name, "not seen"),
            "not seen",
        ]
        for name in (own | ARCHITECTURES).keys() - {"Llama"}
    }


def _seen(results: str) -> dict[str, str]:
    found = json.loads((ROOT / "bench" / "results" / results).read_text(encoding="utf-8"))
    return {name: "seen" for name, row in found.items() if row["num_different_tokens"] == 0}
