"""Logged prompts with the target's answers to them: what a draft is distilled on, for the traffic that it will see."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEMPERATURES = (0.0, 0.7, 1.0)  # answers in turn: a draft is asked for all of them


@dataclass(frozen=True)
class Answer:
    """A prompt and what the target said to it with one seed."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    temperature: float
    seed: int

    @property
    def all_token_ids(self) -> tuple[int, ...]:
        return self.prompt_token_ids + self.token_ids


def read_prompts(
    file: Path, encode: Callable[[str], Sequence[int]], render: Callable[[Any], Sequence[int]]
) -> list[tuple[int, ...]]:
    """The prompts of a JSON-lines file, each once: those that a router has logged (`prompt_token_ids`), texts
    (`prompt`, which `encode` makes tokens of) and conversations (`messages`, which `render` does).

    Raises ValueError with the number of a line that is none of them.
    """
    prompts: dict[tuple[int, ...], None] = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            if "prompt_token_ids" in entry:
                token_ids = [int(token_id) for token_id in entry["prompt_token_ids"]]
            elif "messages" in entry:
                token_ids = list(render(entry["messages"]))
            else:
                token_ids = list(encode(entry["prompt"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{file}, line {number}: it has no prompt_token_ids, prompt or messages that can be used ({error!r})"
            ) from error
        if token_ids:
            prompts[tuple(token_ids)] = None
    if not prompts:
        raise ValueError(f"{file} has no prompts")
    return list(prompts)


def is_held_out(prompt_token_ids: Sequence[int], one_in: int) -> bool:
    """Decided by the prompt alone, so that every run agrees."""
    digest = hashlib.sha256(repr(tuple(prompt_token_ids)).encode()).digest()
    return int.from_bytes(digest[:8], "big") % one_in == 0


def write_answers(file: Path, answers: Sequence[Answer]) -> None:
    """As JSON lines."""
    lines = [
        json.dumps(
            {
                "prompt_token_ids": answer.prompt_token_ids,
                "token_ids": answer.token_ids,
                "temperature": answer.temperature,
                "seed": answer.seed,
            }
        )
        for answer in answers
    ]
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def read_answers(file: Path) -> list[Answer]:
    """As `write_answers` wrote them."""
    entries = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return [
        Answer(tuple(one["prompt_token_ids"]), tuple(one["token_ids"]), one["temperature"], one["seed"])
        for one in entries
    ]
