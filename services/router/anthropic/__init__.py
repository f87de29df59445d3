"""POST /v1/messages: Anthropic's chat API."""
