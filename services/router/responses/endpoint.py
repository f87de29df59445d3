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

from cluster.errors import ContextLengthError, InvalidRequestError, NotFoundError
from services.router.api.reply import Reply
from services.router.chat.endpoint import ChatCompletions, ChatRequest
from services.router.chat.messages import Message
from services.router.errors import excerpt
from services.router.output.message import Reader
from services.router.responses.reply import ResponsesReply
from services.router.responses.request import ResponsesChat, renamed, to_chat

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
        prompt = self._within(request, request.messages, room) or self._truncated(request, room)
        return [prompt] if prompt else super()._encode(request)

    def _within(self, request: ResponsesChat, messages: Sequence[Message], room: int) -> list[int]:
        """Returns the prompt of `messages`; [] if it has more than `room` tokens."""
        try:
            prompt = self._encode_within(request, replace(request.conversation, messages=messages), room)
        except ContextLengthError:
            return []
        return prompt if len(prompt) <= room else []

    def _truncated(self, request: ResponsesChat, room: int) -> list[int]:
        """Returns the prompt without the oldest messages, so that it has at most `room` tokens.

        Returns [] if that is impossible.
        """
        cuts = _cuts(request.messages)
        prompt: list[int] = []
        while cuts:  # binary search for the shortest cut that suffices
            middle = len(cuts) // 2
            if attempt := self._within(request, cuts[middle], room):
                prompt, cuts = attempt, cuts[:middle]
            else:
                cuts = cuts[middle + 1 :]
        return prompt

    def _reader(self, request: ChatRequest, prompt: list[int]) -> Reader:
        return super()._reader(request, prompt) or Reader()

    def _reply(self, request: ChatRequest, reader: Reader | None, **frame: Any) -> Reply:
        assert isinstance(request, ResponsesChat)
        assert reader is not None
        return ResponsesReply(request=request, reader=reader, **frame)


def _cuts(messages: list[Message]) -> list[list[Message]]:
    """Returns versions of `messages` without the oldest ones, from the longest to the shortest.

    System messages stay, and a user message follows them, so that no tool result is left without its call. The
    shortest version begins with the last user message.
    """
    cuts = []
    for start in range(1, len(messages)):
        if messages[start]["role"] == "user":
            kept = [message for message in messages[:start] if message["role"] == "system"]
            cuts.append(kept + messages[start:])
    return cuts
