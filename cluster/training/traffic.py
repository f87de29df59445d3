"""Logged prompts with the target's answers to them: what a draft is distilled on, for the traffic that it will see."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
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
    for number, line in enumerate(file.read_text(encoding="utf-8-sig").split("\n"), 1):  # a text may have other ends
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
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
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


def write_answers(file: Path, answers: Sequence[Answer], asked: Mapping[str, Any]) -> None:
    """As JSON lines, after one that says how they were `asked`. For the owner alone, and all of them or nothing."""
    lines = [
        dict(asked),
        *(
            {
                "prompt_token_ids": answer.prompt_token_ids,
                "token_ids": answer.token_ids,
                "temperature": answer.temperature,
                "seed": answer.seed,
            }
            for answer in answers
        ),
    ]
    part = file.with_suffix(".part")
    part.touch(mode=0o600)
    part.chmod(0o600)
    part.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    part.replace(file)


def read_answers(file: Path, asked: Mapping[str, Any] | None = None) -> list[Answer]:
    """As `write_answers` wrote them; none, where they were asked otherwise than `asked`, if that is given."""
    head, *entries = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    if asked is not None and head != dict(asked):
        return []
    return [
        Answer(tuple(one["prompt_token_ids"]), tuple(one["token_ids"]), one["temperature"], one["seed"])
        for one in entries
    ]
