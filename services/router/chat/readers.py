"""Chooses the reader of a request's answers from the configuration or the model's chat template."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from cluster.config.router import RouterConfig
from cluster.tokenization import Tokenizer
from services.router.chat.template import ChatTemplate
from services.router.output.formats import TOOL_FORMATS, Program, ToolFormat, format_of, named, plain, required
from services.router.output.message import Reader
from services.router.output.reasoning import BEGIN, END
from services.router.output.tools import Tool, ToolChoice

_LAST_TOKENS = 32  # tokens at a prompt's end to search for a reasoning mark, which may have about ten tokens


@dataclass(frozen=True)
class Readers:
    """Makes the readers of a model's answers."""

    tokenizer: Tokenizer
    tool_format: ToolFormat | None
    reads_reasoning: bool

    @classmethod
    def of(cls, config: RouterConfig, template: ChatTemplate | None, tokenizer: Tokenizer) -> Readers:
        source = template.of_request(has_tools=True).source if template is not None else ""
        name: str | None = config.tool_call_parser
        if name == "auto":
            name = format_of(source, tokenizer.special_tokens)
        reads_reasoning = config.reasoning_parser == "think" or (config.reasoning_parser == "auto" and END in source)
        return cls(tokenizer, TOOL_FORMATS.get(name or ""), reads_reasoning)

    def reader(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        *,
        parallel_calls: bool = True,
        include_reasoning: bool = True,
        prompt: Sequence[int] = (),
        continued: str = "",
    ) -> Reader | None:
        """Returns the reader; None if all of an answer is content.

        `prompt`: the prompt's token IDs. `continued`: the text of the message that the answer continues.
        """
        program: Program = plain
        call_format = self.tool_format if tools and choice.mode == "auto" else None
        if choice.is_forced:
            program = named(choice.name) if choice.mode == "named" else required
        elif call_format is not None:
            program = call_format.program
        if program is plain and not self.reads_reasoning:
            return None
        mark = self._last_mark(prompt, continued) if self.reads_reasoning else None
        return Reader(
            program=program,
            tools=tools,
            call_format=call_format,
            reads_reasoning=self.reads_reasoning,
            reasoning_has_begun=mark == BEGIN,
            may_reason=self.reads_reasoning and mark != END and not continued,
            include_reasoning=include_reasoning,
            parallel_calls=parallel_calls,
            has_short_ids=self.tool_format is not None and self.tool_format.has_short_ids,
            calls_finish=choice.mode != "named",
        )

    def shown_special_tokens(self, tools: Sequence[Tool], choice: ToolChoice) -> Collection[int]:
        """Returns the IDs of the special tokens that a reader needs in the text."""
        markers: list[str] = [BEGIN, END] if self.reads_reasoning else []
        if tools and choice.mode == "auto" and self.tool_format is not None:
            markers += self.tool_format.markers
        special = self.tokenizer.special_tokens
        return [special[marker] for marker in markers if marker in special]

    def _last_mark(self, prompt: Sequence[int], continued: str) -> str | None:
        """Returns the last reasoning mark before the answer; None if there is none.

        It is the last one in the continued message, or else one at the very end of the prompt.
        """
        if continued:
            places = {mark: continued.rfind(mark) for mark in (BEGIN, END)}
            last = max(places, key=places.__getitem__)
            return last if places[last] >= 0 else None
        end = self.tokenizer.decode(prompt[-_LAST_TOKENS:], skip_special_tokens=False).rstrip()
        return next((mark for mark in (BEGIN, END) if end.endswith(mark)), None)
