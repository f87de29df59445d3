"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cluster.errors import ContextLengthError, InvalidRequestError
from services.router.anthropic.reply import MessagesReply
from services.router.anthropic.request import CountTokensRequest, renamed, to_chat
from services.router.anthropic_errors import MESSAGES_PATH
from services.router.api.reply import Reply
from services.router.chat.endpoint import ChatCompletions, ChatRequest
from services.router.output.message import Reader

COUNT_TOKENS_PATH = MESSAGES_PATH + "/count_tokens"


class Messages(ChatCompletions):
    reply_type = MessagesReply

    def routes(self) -> list[Route]:
        return [
            Route(MESSAGES_PATH, self.create, methods=["POST"]),
            Route(COUNT_TOKENS_PATH, self.count_tokens, methods=["POST"]),
        ]

    async def create(self, http_request: Request) -> Response:
        try:
            return await super().create(http_request)
        except ContextLengthError as error:
            raise InvalidRequestError(_context_message(error), param=error.param) from error
        except InvalidRequestError as error:
            raise renamed(error) from error

    async def count_tokens(self, http_request: Request) -> Response:
        """Answers with the number of prompt tokens that the request would have."""
        count = await self._num_prompt_tokens(http_request, lambda fields: to_chat(fields, CountTokensRequest))
        return JSONResponse({"input_tokens": count})

    def _parse(self, fields: dict[str, Any]) -> ChatRequest:
        return to_chat(fields)

    def _reader(self, request: ChatRequest, prompt: list[int]) -> Reader:
        return super()._reader(request, prompt) or Reader()

    def _reply(self, request: ChatRequest, reader: Reader | None, **frame: Any) -> Reply:
        assert reader is not None
        return MessagesReply(reader=reader, **{**frame, "continuous_usage": True})  # the first event reports the prompt


def _context_message(error: ContextLengthError) -> str:
    """Returns Anthropic's message for `error`, which agents parse to shorten the request."""
    if error.num_prompt_tokens == 0:  # a target refused
        return f"prompt is too long: {error.message}"
    if error.max_tokens is None:
        return f"prompt is too long: {error.num_prompt_tokens} tokens > {error.max_model_len} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {error.num_prompt_tokens} + {error.max_tokens} > "
        f"{error.max_model_len}, decrease input length or `max_tokens` and try again"
    )
