"""POST /v1/responses: OpenAI's newer form of a chat, as far as it needs nothing stored."""
