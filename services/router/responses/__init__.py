"""POST /v1/responses: OpenAI's newer chat API, without features that store responses."""
