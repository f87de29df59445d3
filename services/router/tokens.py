"""POST /tokenize and /detokenize, as vLLM has them: what a request's text is in tokens, and back."""

from __future__ import annotations

import asyncio
from typing import Annotated, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cluster.errors import InvalidRequestError
from services.router.api_request import invalid_request
from services.router.body import read_json_object
from services.router.chat import Message, render, to_messages
from services.router.chat_template import ChatTemplate
from services.router.endpoint import Serving

MAX_TOKENS = 262_144

_TOKENIZE_PATH, _DETOKENIZE_PATH = "/tokenize", "/detokenize"
TOKEN_PATHS = frozenset({_TOKENIZE_PATH, _DETOKENIZE_PATH})


class _TokenizeRequest(BaseModel):
    """Of a prompt, or of a chat's messages: one of the two."""

    model_config = ConfigDict(strict=True)

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message] | None, PlainValidator(to_messages)] = None
    add_special_tokens: bool | None = None  # vLLM's default: true for a prompt; a chat template writes its own
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("give prompt or messages, one of the two", param="prompt")
        return self


class _DetokenizeRequest(BaseModel):
    model_config = ConfigDict(strict=True)

    model: str | None = None
    # Checked as far as the first that is wrong: a list of millions would make as many complaints.
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_TOKENS, fail_fast=True)]


R = TypeVar("R", _TokenizeRequest, _DetokenizeRequest)


class Tokens:
    def __init__(self, serving: Serving, template: ChatTemplate | None) -> None:
        self._serving = serving
        self._template = template

    def routes(self) -> list[Route]:
        return [
            Route(_TOKENIZE_PATH, self.tokenize, methods=["POST"]),
            Route(_DETOKENIZE_PATH, self.detokenize, methods=["POST"]),
        ]

    async def tokenize(self, http_request: Request) -> Response:
        request = await self._read(_TokenizeRequest, http_request)
        pool = self._serving.pool
        max_model_len = pool.limits().max_model_len if pool.usable else None
        # In a thread, as texts may be long, and their tokens many.
        return await asyncio.to_thread(self._tokenized, request, max_model_len)

    def _tokenized(self, request: _TokenizeRequest, max_model_len: int | None) -> Response:
        token_ids = self._encode(request)
        strings = self._serving.tokenizer.tokens(token_ids) if request.return_token_strs else None
        answer = {"count": len(token_ids), "max_model_len": max_model_len, "tokens": token_ids, "token_strs": strings}
        return JSONResponse(answer)

    async def detokenize(self, http_request: Request) -> Response:
        request = await self._read(_DetokenizeRequest, http_request)
        vocab_size = self._serving.tokenizer.vocab_size
        for token_id in request.tokens:
            if token_id >= vocab_size:
                raise InvalidRequestError(
                    f"tokens has the token ID {token_id}; this model's are 0 to {vocab_size - 1}", param="tokens"
                )
        text = await asyncio.to_thread(self._serving.tokenizer.decode, request.tokens, skip_special_tokens=False)
        return JSONResponse({"prompt": text})

    def _encode(self, request: _TokenizeRequest) -> list[int]:
        encode = self._serving.tokenizer.encode
        if request.messages is not None:
            text = render(self._template, request.messages, add_generation_prompt=request.add_generation_prompt)
            return encode(text, add_special_tokens=bool(request.add_special_tokens))
        assert request.prompt is not None
        return encode(request.prompt, add_special_tokens=request.add_special_tokens is not False)

    async def _read(self, kind: type[R], http_request: Request) -> R:
        fields = await read_json_object(http_request, self._serving.max_body_bytes)
        try:
            request = kind.model_validate({name: value for name, value in fields.items() if value is not None})
        except ValidationError as error:
            raise invalid_request(error) from error
        self._serving.check_model(request.model)
        return request
