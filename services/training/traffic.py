"""Logged prompts with the target's answers: the training data of a draft for that traffic."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cluster.errors import OutriderError

TEMPERATURES = (0.0, 0.7, 1.0)
"Temperatures for training and measuring drafts."


@dataclass(frozen=True)
class RecordedAnswer:
    """A prompt and the target's answer for one seed; the answer may be empty."""

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
    """Returns the distinct prompts of a JSON-lines file, as token IDs.

    A line has `prompt_token_ids`, as in a router's log, a text `prompt`, which `encode` converts to token IDs, or a
    conversation `messages`, which `render` converts. A last line that was cut off is skipped. Raises ValueError with
    the number of a line that has no usable prompt, or if the file has no prompts.
    """
    prompts: dict[tuple[int, ...], None] = {}
    lines = file.read_text(encoding="utf-8-sig").split("\n")  # splits at "\n" only: a text may contain other line ends
    for number, line in enumerate(lines, 1):
        if not line.strip() or (number == len(lines) > 1 and not _is_json(line)):
            continue
        try:
            entry = json.loads(line)
            if "prompt_token_ids" in entry:
                token_ids = [int(token_id) for token_id in entry["prompt_token_ids"]]
            elif "messages" in entry:
                token_ids = list(render(entry["messages"]))
            else:
                token_ids = list(encode(entry["prompt"]))
        except OutriderError as error:  # the model's template refuses the conversation
            raise ValueError(f"{file}, line {number}: {error}") from error
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(
                f"{file}, line {number}: it has no usable prompt_token_ids, prompt or messages ({error!r})"
            ) from error
        if token_ids:
            prompts[tuple(token_ids)] = None
    if not prompts:
        raise ValueError(f"{file} has no prompts")
    return list(prompts)


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def is_held_out(prompt_token_ids: Sequence[int], one_in: int) -> bool:
    """Returns True for a held-out prompt. Depends on the prompt alone, so that every run agrees."""
    digest = hashlib.sha256(repr(tuple(prompt_token_ids)).encode()).digest()
    return int.from_bytes(digest[:8], "big") % one_in == 0


class AnswersFile:
    """A file of answers as JSON lines, which a run after a failed one reuses.

    Each answer is written when it arrives. The first line is `asked`, which identifies the prompts, the target and the
    settings. If it differs from the file's, the file is started over. Only the owner can read the file.
    """

    def __init__(self, file: Path, asked: Mapping[str, Any]) -> None:
        self._file = file
        self.answers = read_answers(file, asked) if file.exists() else []
        part = file.with_suffix(".part")
        part.touch(mode=0o600)
        part.chmod(0o600)
        lines = [json.dumps(dict(asked)), *map(_line, self.answers)]  # without a truncated line
        part.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        part.replace(file)

    def add(self, answer: RecordedAnswer) -> None:
        self.answers.append(answer)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(f"{_line(answer)}\n")


def _line(answer: RecordedAnswer) -> str:
    return json.dumps(asdict(answer))


def read_answers(file: Path, asked: Mapping[str, Any] | None = None) -> list[RecordedAnswer]:
    """Returns the answers that `AnswersFile` wrote.

    Returns [] if `asked` is given and differs from the first line of the file. Raises ValueError if a line was changed.
    """
    head, *lines = file.read_text(encoding="utf-8").split("\n")
    if asked is not None and head != json.dumps(dict(asked)):
        return []
    # A last line without a line end was truncated.
    return [_read(line, f"{file}, line {number}") for number, line in enumerate(lines[:-1], 2)]


def _read(line: str, place: str) -> RecordedAnswer:
    try:
        one = json.loads(line)
        return RecordedAnswer(
            tuple(map(int, one["prompt_token_ids"])),
            tuple(map(int, one["token_ids"])),
            float(one["temperature"]),
            int(one["seed"]),
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{place}: it is not an answer ({error!r}); delete the line or the file") from error
