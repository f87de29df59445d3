"""`/openapi.json`, what the API is in OpenAPI's words, and `/docs`, the same as a page."""
