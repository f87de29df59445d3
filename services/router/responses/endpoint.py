"""The routes of OpenAI's Responses API.

Nothing is stored, so earlier responses cannot be retrieved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cluster.errors import InvalidRequestError, NotFoundError
from services.router.api.reply import Reply
from services.router.chat.endpoint import ChatCompletions, ChatRequest
from services.router.chat.messages import Message
from services.router.errors import excerpt
from services.router.output.message import Reader
from services.router.responses.reply import ResponsesReply
from services.router.responses.request import ResponsesChat, renamed, to_chat
from services.router.responses.truncation import longest_that_fits

RESPONSES_PATH = "/v1/responses"
INPUT_TOKENS_PATH = "/v1/responses/input_tokens"


class Responses(ChatCompletions):
    request_type = ResponsesChat
    reply_type = ResponsesReply

    def routes(self) -> list[Route]:
        one = RESPONSES_PATH + "/{response_id}"
        return [
            Route(RESPONSES_PATH, self.create, methods=["POST"]),
            Route(INPUT_TOKENS_PATH, self.count_tokens, methods=["POST"]),
            Route(one, self.not_stored, methods=["GET", "DELETE"]),
            Route(one + "/cancel", self.not_stored, methods=["POST"]),
            Route(one + "/input_items", self.not_stored, methods=["GET"]),
        ]

    async def create(self, http_request: Request) -> Response:
        try:
            return await super().create(http_request)
        except InvalidRequestError as error:
            raise renamed(error) from error

    async def count_tokens(self, http_request: Request) -> Response:
        """Answers with the number of prompt tokens that the request would have."""
        count = await self._num_prompt_tokens(http_request, to_chat)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": count})

    async def not_stored(self, http_request: Request) -> Response:
        raise NotFoundError(
            f"the response {excerpt(http_request.path_params['response_id'])} does not exist: this server stores no "
            "responses"
        )

    def _parse(self, fields: dict[str, Any]) -> ChatRequest:
        return to_chat(fields)

    def _encode(self, request: ChatRequest) -> list[list[int]]:
        assert isinstance(request, ResponsesChat)
        if request.origin.truncation == "disabled":
            return super()._encode(request)
        room = self._serving.pool.limits().max_model_len - (request.token_limit[1] or 1)
        conversation = request.conversation

        def encode(messages: Sequence[Message]) -> list[int]:
            return self._encode_within(request, replace(conversation, messages=messages), room)

        prompt = longest_that_fits(request.messages, encode, room)
        return [prompt] if prompt else super()._encode(request)

    def _reader(self, request: ChatRequest, prompt: list[int]) -> Reader:
        return super()._reader(request, prompt) or Reader()

    def _reply(self, request: ChatRequest, reader: Reader | None, **frame: Any) -> Reply:
        assert isinstance(request, ResponsesChat)
        assert reader is not None
        return ResponsesReply(request=request, reader=reader, **frame)
