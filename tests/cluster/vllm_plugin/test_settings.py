from __future__ import annotations

from typing import Any

import pytest

from cluster.config.speculation import SpeculationConfig
from cluster.errors import ConfigurationError
from cluster.vllm_plugin import is_asked_for
from cluster.vllm_plugin.settings import PluginSettings


def settings(**section: Any) -> PluginSettings:
    return PluginSettings.of({"outrider": section})


@pytest.mark.parametrize("additional_config", [{}, {"outrider": {"channel": "x"}}, {"outrider": None}, object()])
def test_nothing_is_done_unless_it_is_asked_for(additional_config: object) -> None:
    assert not is_asked_for(additional_config)


def test_draft_addresses_ask_for_it() -> None:
    assert is_asked_for({"outrider": {"draft_addresses": []}})


def test_speculation_is_that_of_a_cluster() -> None:
    found = settings(draft_addresses=["a:1", "dns:b:2", "file:/c"])
    assert found.speculation == SpeculationConfig()
    assert found.max_drafts == SpeculationConfig().max_speculative_tokens


def test_engine_has_room_for_the_most_drafts_of_a_request() -> None:
    speculation = {"num_speculative_tokens": 3, "max_speculative_tokens": 7}
    assert settings(draft_addresses=["a:1"], speculation=speculation).max_drafts == 7
    assert settings(draft_addresses=["a:1"], speculation={"num_speculative_tokens": 0}).max_drafts == 0
    assert settings(draft_addresses=[], speculation=speculation).max_drafts == 0


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"draft_addresses": ["nowhere"]}, "outrider.draft_addresses.0"),
        ({"draft_addresses": [], "speculation": {"tree_width": 2}}, "outrider.speculation: .*tree_width 2"),
        ({"draft_addresses": [], "speculation": {"acceptance": "rejection"}}, "acceptance rejection"),
        ({"draft_addresses": [], "speculation": {"num_speculative_tokens": 17}}, "num_speculative_tokens 17"),
        ({"draft_addresses": [], "speculation": {"k": 9}}, "outrider.speculation.k"),
        ({"draft_addresses": [], "drafts": []}, "outrider.drafts"),
    ],
)
def test_what_cannot_work_is_refused_by_name(section: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        settings(**section)
