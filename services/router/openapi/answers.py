"""The JSON schemas of answers.

Answers are not built from pydantic models, so their schemas are written by hand. A test checks real answers against
them.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}
ANY_OBJECT: Schema = {"type": "object"}


def reference(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def items(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def structure(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    return {"type": "object", "properties": required | (optional or {}), "required": list(required)}


def _constant(value: str | bool) -> Schema:
    return {"const": value}


_SPECULATION = {
    "speculation": {"type": "object", "description": "with `return_speculation_stats`: statistics of speculation"},
    "rounds": items(reference("Round")) | {"description": "with `return_rounds`: the steps that added the tokens"},
    "token_ids": items(INTEGER) | {"description": "with `return_token_ids`"},
}
_STOP_REASON = {"stop_reason": {"description": "the requested stop token or string that ended it"}}
_FINISH_REASON = nullable({"enum": ["stop", "length", "tool_calls"]})
_LOGPROBS = nullable(ANY_OBJECT)
_FRAME: dict[str, Schema] = {
    "id": TEXT,
    "created": INTEGER,
    "model": TEXT,
    "seed": INTEGER,
    "system_fingerprint": TEXT,
}
_METRICS = {"metrics": {"type": "object", "description": "vLLM's statistics of speculation"}}
_FUNCTION = structure({"name": TEXT, "arguments": TEXT})

ANSWERS: dict[str, Schema] = {
    "Error": structure(
        {"error": structure({"message": TEXT, "type": TEXT, "param": nullable(TEXT), "code": nullable(TEXT)})}
    ),
    "Round": structure({"num_draft_tokens": INTEGER, "num_accepted_tokens": INTEGER, "tokens": items(TEXT)}),
    "Usage": structure(
        {
            "prompt_tokens": INTEGER,
            "completion_tokens": INTEGER,
            "total_tokens": INTEGER,
            "prompt_tokens_details": structure({"cached_tokens": INTEGER}),
            "completion_tokens_details": structure({"reasoning_tokens": INTEGER}),
        }
    ),
    "Completion": structure(
        _FRAME
        | {
            "object": _constant("text_completion"),
            "choices": items(
                structure(
                    {"index": INTEGER, "text": TEXT, "logprobs": _LOGPROBS, "finish_reason": _FINISH_REASON},
                    _SPECULATION | _STOP_REASON,
                )
            ),
        },
        {"usage": nullable(reference("Usage"))} | _METRICS,
    ),
    "AnsweredToolCall": structure({"id": TEXT, "type": _constant("function"), "function": _FUNCTION}),
    "AssistantMessage": structure(
        {"role": _constant("assistant"), "content": nullable(TEXT), "refusal": nullable(TEXT)},
        {
            "reasoning_content": TEXT,
            "reasoning": TEXT,
            "tool_calls": items(reference("AnsweredToolCall")),
        },
    ),
    "ChatCompletion": structure(
        _FRAME
        | {
            "object": _constant("chat.completion"),
            "choices": items(
                structure(
                    {
                        "index": INTEGER,
                        "message": reference("AssistantMessage"),
                        "logprobs": _LOGPROBS,
                        "finish_reason": _FINISH_REASON,
                    },
                    _SPECULATION | _STOP_REASON,
                )
            ),
            "usage": reference("Usage"),
        },
        _METRICS,
    ),
    "MessageDelta": structure(
        {},
        {
            "role": _constant("assistant"),
            "content": TEXT,
            "reasoning_content": TEXT,
            "reasoning": TEXT,
            "tool_calls": items(
                structure(
                    {"index": INTEGER, "function": structure({}, {"name": TEXT, "arguments": TEXT})},
                    {"id": TEXT, "type": _constant("function")},
                )
            ),
        },
    ),
    "ChatCompletionChunk": structure(
        _FRAME
        | {
            "object": _constant("chat.completion.chunk"),
            "choices": items(
                structure(
                    {
                        "index": INTEGER,
                        "delta": reference("MessageDelta"),
                        "logprobs": _LOGPROBS,
                        "finish_reason": _FINISH_REASON,
                    },
                    _SPECULATION | _STOP_REASON,
                )
            ),
        },
        {"usage": nullable(reference("Usage"))} | _METRICS,
    ),
    "ResponseItem": structure(
        {"id": TEXT, "type": {"enum": ["message", "reasoning", "function_call", "custom_tool_call"]}, "status": TEXT},
        {
            "role": TEXT,
            "content": items(structure({"type": TEXT, "text": TEXT})),
            "summary": items(ANY_OBJECT),
            "call_id": TEXT,
            "name": TEXT,
            "arguments": TEXT,
            "input": TEXT,
        },
    ),
    "Response": structure(
        {
            "id": TEXT,
            "object": _constant("response"),
            "created_at": INTEGER,
            "status": {"enum": ["in_progress", "completed", "incomplete", "failed"]},
            "error": nullable(structure({"code": TEXT, "message": TEXT})),
            "incomplete_details": nullable(structure({"reason": TEXT})),
            "model": TEXT,
            "output": items(reference("ResponseItem")),
            "store": {"const": False},
            "seed": INTEGER,
            "system_fingerprint": TEXT,
            "usage": nullable(
                structure(
                    {
                        "input_tokens": INTEGER,
                        "input_tokens_details": ANY_OBJECT,
                        "output_tokens": INTEGER,
                        "output_tokens_details": ANY_OBJECT,
                        "total_tokens": INTEGER,
                    }
                )
            ),
        }
    ),
    "ResponseEvent": structure(
        {"type": TEXT, "sequence_number": INTEGER},
        {
            "response": reference("Response"),
            "item": reference("ResponseItem"),
            "item_id": TEXT,
            "output_index": INTEGER,
            "content_index": INTEGER,
            "delta": TEXT,
        },
    ),
    "AnthropicError": structure(
        {"type": _constant("error"), "error": structure({"type": TEXT, "message": TEXT})}, {"request_id": TEXT}
    ),
    "ContentBlock": structure(
        {"type": {"enum": ["text", "thinking", "tool_use"]}},
        {"text": TEXT, "thinking": TEXT, "signature": TEXT, "id": TEXT, "name": TEXT, "input": ANY_OBJECT},
    ),
    "MessageUsage": structure(
        {
            "input_tokens": INTEGER,
            "cache_creation_input_tokens": INTEGER,
            "cache_read_input_tokens": INTEGER,
            "output_tokens": INTEGER,
        }
    ),
    "Message": structure(
        {
            "id": TEXT,
            "type": _constant("message"),
            "role": _constant("assistant"),
            "model": TEXT,
            "content": items(reference("ContentBlock")),
            "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use", None]},
            "stop_sequence": nullable(TEXT),
            "usage": reference("MessageUsage"),
            "seed": INTEGER,
            "system_fingerprint": TEXT,
        }
    ),
    "MessageEvent": structure(
        {"type": TEXT},
        {
            "message": reference("Message"),
            "index": INTEGER,
            "content_block": reference("ContentBlock"),
            "delta": ANY_OBJECT,
            "usage": reference("MessageUsage"),
            "error": structure({"type": TEXT, "message": TEXT}),
        },
    ),
    "TokenCount": structure({"input_tokens": INTEGER}, {"object": _constant("response.input_tokens")}),
    "Model": structure(
        {"id": TEXT, "object": _constant("model"), "created": INTEGER, "owned_by": TEXT, "root": TEXT},
        {
            "parent": nullable(TEXT),
            "max_model_len": INTEGER,
            "context_length": INTEGER,
            "type": _constant("model"),
            "display_name": TEXT,
            "created_at": TEXT,
        },
    ),
    "ModelList": structure(
        {"object": _constant("list"), "data": items(reference("Model"))},
        {"first_id": TEXT, "last_id": TEXT, "has_more": _constant(False)},
    ),
    "Tokens": structure(
        {
            "count": INTEGER,
            "max_model_len": nullable(INTEGER),
            "tokens": items(INTEGER),
            "token_strs": nullable(items(nullable(TEXT))),
        }
    ),
    "Text": structure({"prompt": TEXT}),
    "Health": structure(
        {
            "status": {"enum": ["ok", "draining", "unavailable"]},
            "model": TEXT,
            "targets": items(structure({"status": TEXT, "problem": nullable(TEXT)}, {"address": TEXT})),
        },
        {"reason": TEXT},
    ),
    "Liveness": structure({"status": _constant("ok")}),
    "Version": structure({"version": TEXT}),
}
