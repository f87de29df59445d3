"""`/openapi.json`, the API's OpenAPI document, and `/docs`, the same as a page."""
