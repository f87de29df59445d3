"""Models whose files are as people publish them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.config import Config
from cluster.errors import ConfigurationError
from protos.speculation.v1 import target_pb2
from services.router.app import create_app

from .chat_model import Model
from .conftest import Router, ScriptedTarget

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|end|>\n{% endfor %}<assistant>"
AUTHORS = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True, "eos_token_id": 0}


def test_an_answer_in_chat_ends_where_the_template_ends_a_turn(new_model: Callable[..., Model]) -> None:
    """A fine-tune whose configurations name another end token went on through turns of its own making."""
    model = new_model(TURNS)
    end = model.tokenizer.special_tokens["<|end|>"]
    model.will_say("fox<|end|>")
    model.target.last_finish_reason = target_pb2.FINISH_REASON_STOP
    num_tokens = len(model.tokenizer.encode("fox<|end|>"))
    choice = model.chat(tools=[], max_tokens=num_tokens)
    assert list(model.target.requests[-1].stop_token_ids) == [end]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("fox", "stop")
    assert "stop_reason" not in choice
    model.chat(tools=[], max_tokens=num_tokens, ignore_eos=True)
    assert not model.target.requests[-1].stop_token_ids
    model.router.complete(prompt="fox", max_tokens=1)
    assert not model.target.requests[-1].stop_token_ids


@pytest.fixture
def authors_folder(model_folder: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "tuned"
    shutil.copytree(model_folder, folder)
    (folder / "generation_config.json").write_text(json.dumps(AUTHORS))
    return folder


def test_sampling_that_a_request_leaves_open_is_the_models(
    new_router: Callable[..., Router], target: ScriptedTarget, authors_folder: Path
) -> None:
    router = new_router([target.address], authors_folder)
    messages = [{"role": "user", "content": "fox"}]
    for ask in (
        lambda **fields: router.complete(prompt="fox", max_tokens=1, **fields),
        lambda **fields: router.chat(messages=messages, max_tokens=1, **fields),
        lambda **fields: router.client.post("/v1/responses", json={"input": "fox", "max_output_tokens": 1, **fields}),
    ):
        assert ask(top_p=None).status_code == 200
        sampling = target.requests[-1].sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == pytest.approx((0.6, 0.95, 20))
        assert ask(temperature=0, top_p=0.5).status_code == 200
        sampling = target.requests[-1].sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == pytest.approx((0.0, 0.5, 20))


def test_defaults_that_cannot_be_are_said_at_the_start(authors_folder: Path) -> None:
    target = {"model": str(authors_folder), "addresses": ["127.0.0.1:1"]}
    create_app(Config.model_validate({"target": target}))
    (authors_folder / "generation_config.json").write_text('{"temperature": 7}')
    with pytest.raises(ConfigurationError, match=r"generation_config\.json.*temperature.*target\.generation_config"):
        create_app(Config.model_validate({"target": target}))
    create_app(Config.model_validate({"target": {**target, "generation_config": "none"}}))
