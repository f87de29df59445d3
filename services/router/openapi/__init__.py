"""`/openapi.json`, the API's OpenAPI document."""
