"""POST /v1/messages: Anthropic's form of a chat."""
