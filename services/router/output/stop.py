"""Stop strings: finds the end of a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Iterable


class StopStrings:
    """The strings that end a text.

    A text ends as soon as it contains one of them. If two are complete at the same character, the longer one counts. So
    the end does not depend on the pieces in which the text arrives. The text is cut before the stop string, or after it
    if `in_output` is set.
    """

    def __init__(self, strings: Iterable[str] = (), *, in_output: bool = False) -> None:
        self.in_output = in_output
        self.patterns = [(string, _borders(string)) for string in sorted(set(strings), key=len, reverse=True)]

    def __bool__(self) -> bool:
        return bool(self.patterns)


class StopMatcher:
    """Cuts one text at its first stop string; holds back text that may begin one."""

    def __init__(self, stop_strings: StopStrings) -> None:
        self.stopped_at: str | None = None  # the stop string that was found
        self._in_output = stop_strings.in_output
        self._patterns = stop_strings.patterns
        # For each stop string, the number of its first characters that the text ends with.
        self._num_matched = [0] * len(self._patterns)
        self._held = ""

    def push(self, text: str) -> str:
        """Takes the next piece. Returns the text that certainly belongs to the output.

        Returns "" after a stop string was found.
        """
        if self.stopped_at is not None:
            return ""
        pending = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            completed = self._advance(character)
            if completed is not None:
                self.stopped_at = completed
                self._held = ""
                return pending[: end if self._in_output else end - len(completed)]
        num_held = 0 if self._in_output else max(self._num_matched, default=0)
        start_of_held = len(pending) - num_held
        self._held = pending[start_of_held:]
        return pending[:start_of_held]

    def would_stop(self, text: str) -> bool:
        """Returns True if `text`, if it came next, would complete a stop string. Changes nothing."""
        num_matched = self._num_matched.copy()
        would_stop = any(self._advance(character) is not None for character in text)
        self._num_matched = num_matched
        return would_stop

    def flush(self) -> str:
        """Returns the text that was held back. Must be called last."""
        held, self._held = self._held, ""
        self._num_matched = [0] * len(self._patterns)
        return held

    def _advance(self, character: str) -> str | None:
        """Returns the stop string that `character` completes; None if there is none.

        Runs the algorithm of Knuth, Morris and Pratt for each string.
        """
        for index, (string, borders) in enumerate(self._patterns):
            num_matched = self._num_matched[index]
            while num_matched and string[num_matched] != character:
                num_matched = borders[num_matched - 1]
            if string[num_matched] == character:
                num_matched += 1
            if num_matched == len(string):
                return string
            self._num_matched[index] = num_matched
        return None


def _borders(string: str) -> list[int]:
    """Returns the length of the longest border of each prefix of `string`.

    A border is a proper prefix that is also a suffix.
    """
    borders = [0] * len(string)
    length = 0
    for index in range(1, len(string)):
        while length and string[index] != string[length]:
            length = borders[length - 1]
        if string[index] == string[length]:
            length += 1
        borders[index] = length
    return borders
