"""POST /v1/chat/completions: the request's messages and tools, the reply's message."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, PlainValidator, model_validator
from starlette.requests import Request

from cluster.constraints import Grammar
from cluster.errors import InvalidRequestError
from cluster.logprobs import MAX_LOGPROBS
from services.router.api.endpoint import AnswerForm, ApiEndpoint, Serving
from services.router.api.reply import ChoicesReply, Reply
from services.router.api.request import UNSUPPORTED_FIELDS, ApiRequest, MaxTokens, Whole
from services.router.chat.fields import TemplateVariables
from services.router.chat.messages import Message, opening_of, text_of, to_messages
from services.router.chat.prompt import ChatPrompts, Conversation, check_continuation
from services.router.chat.readers import Readers
from services.router.chat.shapes import ChatMessage, ToolChoiceField, ToolDefinition
from services.router.http.body import read_json_body, to_json_object
from services.router.http.large_work import cost_of, run_in_thread_if_large
from services.router.output.accepted_drafts import AnswerRound
from services.router.output.answer_grammar import answer_grammar
from services.router.output.message import MessageWriter, Reader
from services.router.output.piece import Piece
from services.router.output.speculation_stats import SpeculationStats
from services.router.output.tools import Tool, ToolChoice, check_choice, to_tool_choice, to_tools, tool_grammar


class ChatRequest(ApiRequest, TemplateVariables):
    unsupported_fields = UNSUPPORTED_FIELDS | {
        "echo": (False,),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "web_search_options": (),
        "documents": ([],),
        "chat_template": (),
    }
    prompt_field = "messages"

    messages: Annotated[list[Message], PlainValidator(to_messages, json_schema_input_type=list[ChatMessage])]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool = False
    top_logprobs: Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS)] = 0
    add_generation_prompt: bool = True
    add_special_tokens: bool = False  # the template writes them itself
    continue_final_message: bool = False
    tools: Annotated[tuple[Tool, ...], PlainValidator(to_tools, json_schema_input_type=list[ToolDefinition])] = ()
    tool_choice: Annotated[ToolChoice, PlainValidator(to_tool_choice, json_schema_input_type=ToolChoiceField)] = (
        ToolChoice("auto")
    )
    parallel_tool_calls: bool = True
    include_reasoning: bool = True

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        check_continuation(continues=self.continue_final_message, begins=self.add_generation_prompt)
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs is only allowed when logprobs is true", param="top_logprobs")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @cached_property
    def offered_tools(self) -> tuple[Tool, ...]:
        return self.tool_choice.offered(self.tools)

    @cached_property
    def conversation(self) -> Conversation:
        return Conversation(
            self.messages,
            [tool.definition for tool in self.offered_tools],
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            variables=self.template_variables,
        )

    @property
    def opening(self) -> str:
        return opening_of(self.messages)

    @cached_property
    def grammar(self) -> Grammar | None:
        """Grammar of the tool call if one is required, else the requested grammar.

        A required call is the whole answer, except for reasoning.
        """
        check_choice(self.tool_choice, self.tools)
        called = tool_grammar(self.tool_choice, self.tools, parallel=self.parallel_tool_calls)
        return called if called is not None else super().grammar

    @property
    def token_limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().token_limit


@dataclass(frozen=True)
class ChatReply(ChoicesReply):
    id_prefix = "chatcmpl-"
    request_type = "chat_completions"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    reader: Reader | None = None  # None: the whole answer is content
    _started: dict[int, MessageWriter] = field(default_factory=dict)  # writers of the streamed choices

    def _choice(self, index: int, choice: Piece) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        finish_reason = choice.finish_reason
        if self.reader is not None:
            writer = MessageWriter(self.reader)
            message = writer.message(choice.said)
            finish_reason = writer.finish_reason(finish_reason)
        return self._with_extras(
            {
                "index": index,
                "message": message,
                "logprobs": self._logprobs(choice),
                "finish_reason": finish_reason,
                **self._stop(choice),
            },
            choice.token_ids,
            choice.speculation,
            choice.rounds,
        )

    def _deltas(self, index: int, piece: Piece, *, is_first: bool) -> Iterator[dict[str, Any]]:
        if is_first:
            yield self._delta(index, {"role": "assistant", "content": ""})
        deltas, finish_reason = self._read(index, piece)
        logprobs = self._logprobs(piece)
        if not deltas and (logprobs is not None or piece.rounds or (self.has_token_ids and piece.token_ids)):
            deltas = [{"content": ""}]
        for number, delta in enumerate(deltas):  # the first delta reports all tokens
            token_ids, rounds = ((), ()) if number else (piece.token_ids, piece.rounds)
            chunk = self._delta(index, delta, token_ids=token_ids, rounds=rounds)
            yield chunk if number else chunk | {"logprobs": logprobs}
        if finish_reason is not None:
            last = self._delta(index, {}, finish_reason=finish_reason, speculation=piece.speculation)
            yield last | self._stop(piece)

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if self.logprobs is None or piece.logprobs is None or not piece.token_ids:
            return None
        return self.logprobs.chat(piece.token_ids, piece.logprobs)

    def _of_prompts(self, choices: Sequence[Piece]) -> dict[str, Any]:
        prompt_logprobs = self._prompt_logprobs(choices[0])
        return {} if prompt_logprobs is None else {"prompt_logprobs": prompt_logprobs}

    def _read(self, index: int, piece: Piece) -> tuple[list[dict[str, Any]], str | None]:
        """Returns the deltas of `piece`, and the finish reason if its choice ends with it."""
        if self.reader is None:
            return ([{"content": piece.text}] if piece.text else []), piece.finish_reason
        writer = self._started.get(index)
        if writer is None:
            writer = self._started[index] = MessageWriter(self.reader)
        return writer.deltas(piece.said), writer.finish_reason(piece.finish_reason)

    def _delta(
        self,
        index: int,
        delta: dict[str, Any],
        token_ids: Sequence[int] = (),
        finish_reason: str | None = None,
        speculation: SpeculationStats | None = None,
        rounds: Sequence[AnswerRound] = (),
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return self._with_extras(choice, token_ids, speculation, rounds)


class ChatCompletions(ApiEndpoint[ChatRequest]):
    request_type: type[ChatRequest] = ChatRequest
    reply_type: ClassVar[type[Reply]] = ChatReply

    def __init__(self, serving: Serving, prompts: ChatPrompts, readers: Readers) -> None:
        super().__init__(serving)
        self._prompts = prompts
        self._readers = readers

    def _encode(self, request: ChatRequest) -> list[list[int]]:
        return [self._encode_within(request, request.conversation, self._serving.room_of(request))]

    def _encode_within(self, request: ChatRequest, conversation: Conversation, room: int | None) -> list[int]:
        """Returns the tokens of `conversation`. Raises ContextLengthError if they are clearly more than `room`."""
        return self._prompts.encode(conversation, add_special_tokens=request.add_special_tokens, max_tokens=room)

    def _answer_form(self, request: ChatRequest, prompt: list[int]) -> AnswerForm:
        reader, grammar = self._reader(request, prompt), request.grammar
        if grammar is not None and reader is not None:
            special_tokens = self._serving.tokenizer.special_tokens
            grammar = answer_grammar(grammar, request.grammar_field, reader, special_tokens)
        return AnswerForm(
            grammar,
            reader,
            frozenset() if request.ignore_eos else self._prompts.turn_end_ids,
            self._readers.shown_special_tokens(request.offered_tools, request.tool_choice),
        )

    async def _num_prompt_tokens(self, http_request: Request, parse: Callable[[dict[str, Any]], ChatRequest]) -> int:
        """Returns the number of prompt tokens that the request in the body of `http_request` has, however many."""
        body = await read_json_body(http_request, self._serving.max_body_bytes)
        request = await run_in_thread_if_large(cost_of(body), lambda: parse(to_json_object(body)))
        self._serving.check_model(request.model)
        prompt = await run_in_thread_if_large(
            len(body), lambda: self._encode_within(request, request.conversation, room=None)
        )
        return len(prompt)

    def _reply(self, request: ChatRequest, reader: Reader | None, **frame: Any) -> Reply:
        return ChatReply(reader=reader, **frame)

    def _reader(self, request: ChatRequest, prompt: list[int]) -> Reader | None:
        """Returns the reader of answers to `prompt`; None if all of an answer is content."""
        return self._readers.reader(
            request.offered_tools,
            request.tool_choice,
            parallel_calls=request.parallel_tool_calls,
            include_reasoning=request.include_reasoning,
            prompt=prompt,
            continued=text_of(request.messages[-1]["content"]) if request.continue_final_message else "",
        )
