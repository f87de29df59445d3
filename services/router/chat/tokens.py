"""POST /tokenize and /detokenize, as in vLLM: the tokens of a request's text, and the reverse."""

from __future__ import annotations

from typing import Annotated, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cluster.errors import InvalidRequestError
from services.router.api.endpoint import Serving
from services.router.api.request import TokenId
from services.router.chat.fields import TemplateVariables
from services.router.chat.messages import Message, to_messages
from services.router.chat.prompt import ChatPrompts, Conversation, check_continuation
from services.router.chat.shapes import ChatMessage, ToolDefinition
from services.router.errors import invalid_request
from services.router.http.body import read_json_body, to_json_object
from services.router.http.large_work import run_in_thread_if_large
from services.router.output.tools import Tool, to_tools

MAX_TOKENS = 262_144

TOKENIZE_PATHS, DETOKENIZE_PATHS = ("/tokenize", "/v1/tokenize"), ("/detokenize", "/v1/detokenize")
TOKEN_PATHS = frozenset({*TOKENIZE_PATHS, *DETOKENIZE_PATHS})


class TokenizeRequest(TemplateVariables):
    """A request to tokenise either a prompt or a chat's messages."""

    model_config = ConfigDict(strict=True)

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[
        list[Message] | None, PlainValidator(to_messages, json_schema_input_type=list[ChatMessage] | None)
    ] = None
    add_special_tokens: bool | None = None  # vLLM's default: true for a prompt; a chat template adds its own
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Annotated[tuple[Tool, ...], PlainValidator(to_tools, json_schema_input_type=list[ToolDefinition])] = ()
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("give either prompt or messages", param="prompt")
        check_continuation(continues=self.continue_final_message, begins=self.add_generation_prompt)
        return self


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(strict=True)

    model: str | None = None
    # Validation stops at the first error: a list of a million invalid tokens would otherwise produce a million errors.
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKENS, fail_fast=True)]


R = TypeVar("R", TokenizeRequest, DetokenizeRequest)


class Tokens:
    def __init__(self, serving: Serving, prompts: ChatPrompts) -> None:
        self._serving = serving
        self._prompts = prompts

    def routes(self) -> list[Route]:
        return [
            *(Route(path, self.tokenize, methods=["POST"]) for path in TOKENIZE_PATHS),
            *(Route(path, self.detokenize, methods=["POST"]) for path in DETOKENIZE_PATHS),
        ]

    async def tokenize(self, http_request: Request) -> Response:
        request, num_bytes = await self._read(TokenizeRequest, http_request)
        pool = self._serving.pool
        max_model_len = pool.limits().max_model_len if pool.usable else None
        return await run_in_thread_if_large(num_bytes, lambda: self._tokenized(request, max_model_len))

    def _tokenized(self, request: TokenizeRequest, max_model_len: int | None) -> Response:
        token_ids = self._encode(request)
        strings = self._serving.tokenizer.tokens(token_ids) if request.return_token_strs else None
        answer = {"count": len(token_ids), "max_model_len": max_model_len, "tokens": token_ids, "token_strs": strings}
        return JSONResponse(answer)

    async def detokenize(self, http_request: Request) -> Response:
        request, num_bytes = await self._read(DetokenizeRequest, http_request)
        vocab_size = self._serving.tokenizer.vocab_size
        for token_id in request.tokens:
            if token_id >= vocab_size:
                raise InvalidRequestError(
                    f"tokens has the token ID {token_id}; this model's are 0 to {vocab_size - 1}", param="tokens"
                )
        decode = self._serving.tokenizer.decode
        text = await run_in_thread_if_large(num_bytes, lambda: decode(request.tokens, skip_special_tokens=False))
        return JSONResponse({"prompt": text})

    def _encode(self, request: TokenizeRequest) -> list[int]:
        if request.messages is not None:
            conversation = Conversation(
                request.messages,
                [tool.definition for tool in request.tools],
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                variables=request.template_variables,
            )
            return self._prompts.encode(conversation, add_special_tokens=bool(request.add_special_tokens))
        assert request.prompt is not None
        return self._serving.tokenizer.encode(
            request.prompt, add_special_tokens=request.add_special_tokens is not False
        )

    async def _read(self, kind: type[R], http_request: Request) -> tuple[R, int]:
        """Returns the request, and the size of its body in bytes."""
        body = await read_json_body(http_request, self._serving.max_body_bytes)
        request = await run_in_thread_if_large(len(body), lambda: _parsed(kind, body))
        self._serving.check_model(request.model)
        return request, len(body)


def _parsed(kind: type[R], body: bytes) -> R:
    fields = to_json_object(body)
    try:
        return kind.model_validate({name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        raise invalid_request(error) from error
