"""Steps that answers with a JSON schema take: `python -m bench.schemas --set target.model=DIR --set draft.model=NAME`.

An instruct model (`bench.models --instruct`) answers with an example of each of 50 schemas, one after the other: with
nothing drafted, with what the grammar makes likely, and with that and a draft model. All three answers must be equal.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.result import describe_machine, write_result
from bench.workload import read_counters
from cluster.config.file import load_config
from services.launch.local import LocalCluster

NUM_SCHEMAS = 50
Schema = dict[str, Any]
_TEXT = {"type": "string", "maxLength": 40}
_FIELDS: dict[str, Schema] = {
    "name": _TEXT,
    "first_name": _TEXT,
    "email": {"type": "string", "format": "email"},
    "age": {"type": "integer", "minimum": 0, "maximum": 120},
    "is_active": {"type": "boolean"},
    "date_of_birth": {"type": "string", "format": "date"},
    "created_at": {"type": "string", "format": "date-time"},
    "phone_number": {"type": "string", "pattern": r"^\+[0-9]{8,12}$"},
    "street_address": _TEXT,
    "postal_code": {"type": "string", "pattern": "^[0-9]{5}$"},
    "country_code": {"enum": ["DE", "FR", "US", "GB"]},
    "status": {"enum": ["pending", "in_progress", "completed", "cancelled"]},
    "priority": {"enum": ["low", "medium", "high"]},
    "quantity": {"type": "integer", "minimum": 1, "maximum": 99},
    "unit_price": {"type": "number", "minimum": 0, "maximum": 1000},
    "description": _TEXT,
    "temperature_celsius": {"type": "number", "minimum": -60, "maximum": 60},
    "tags": {"type": "array", "items": {"type": "string", "maxLength": 10}, "maxItems": 3},
    "sentiment": {"enum": ["positive", "neutral", "negative"]},
    "invoice_number": {"type": "string", "pattern": "^INV-[0-9]{4}$"},
    "latitude": {"type": "number", "minimum": -90, "maximum": 90},
    "manager_id": {"type": ["integer", "null"]},
    "file_path": _TEXT,
    "error_message": {"type": ["string", "null"]},
    "should_retry": {"type": "boolean"},
    "query": _TEXT,
    "max_results": {"type": "integer", "minimum": 1, "maximum": 50},
}
_NESTED = ("customer", "shipping_address", "metadata", "items")
_MAX_TOKENS = 400


@dataclass(frozen=True, slots=True)
class Found:
    """The answers of one way to draft, and what they took."""

    answers: list[list[int]]  # token IDs
    num_steps: float
    num_drafts: float
    num_accepted: float

    def row(self, name: str) -> dict[str, Any]:
        num_tokens = sum(map(len, self.answers))
        return {
            "drafts": name,
            "tokens": num_tokens,
            "steps": round(self.num_steps),
            "tokens_per_step": round(num_tokens / self.num_steps, 2),
            "drafts_per_step": round(self.num_drafts / self.num_steps, 2),
            "accepted": round(self.num_accepted / self.num_drafts, 2) if self.num_drafts else None,
        }


def draw_schema(rng: random.Random, depth: int = 1) -> Schema:
    """Returns an object of three to six everyday fields, half of the time with another object or some in it."""
    properties = {name: _FIELDS[name] for name in rng.sample(sorted(_FIELDS), rng.randint(3, 6))}
    if depth and rng.random() < 0.5:
        inner = draw_schema(rng, depth - 1)
        several = {"type": "array", "items": inner, "minItems": 1, "maxItems": 2}
        properties[rng.choice(_NESTED)] = rng.choice((inner, several))
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def measure(settings: Sequence[str], **fields: Any) -> Found:
    """Asks a cluster with `settings` for an answer to each schema; `fields` are added to every request."""
    answers = []
    with LocalCluster(load_config(None, ["router.port=0", *settings])) as cluster:
        cluster.wait_ready(300)
        metrics_url = cluster.targets[0].metrics_url
        with httpx.Client(base_url=cluster.url, timeout=600) as client:
            before = read_counters(metrics_url) | read_counters(f"{cluster.url}/metrics")
            for number in range(NUM_SCHEMAS):
                schema = draw_schema(random.Random(number))
                question = f"Answer with one JSON object, a plausible example of this schema: {json.dumps(schema)}"
                body = {
                    "messages": [{"role": "user", "content": question}],
                    "response_format": {"type": "json_schema", "json_schema": {"name": "example", "schema": schema}},
                    "max_tokens": _MAX_TOKENS,
                    "temperature": 0.7 * (number % 2),
                    "seed": number,
                    "return_token_ids": True,
                }
                response = client.post("/v1/chat/completions", json=body | fields)
                response.raise_for_status()
                answers.append(response.json()["choices"][0]["token_ids"])
        after = read_counters(metrics_url) | read_counters(f"{cluster.url}/metrics")

    def gained(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    return Found(
        answers,
        gained("outrider_steps_total"),
        gained("vllm:spec_decode_num_draft_tokens_total"),
        gained("vllm:spec_decode_num_accepted_tokens_total"),
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.schemas", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--set", action="append", default=[], metavar="a.b=v", help="settings of the cluster")
    parser.add_argument("--out", type=Path, default=Path("bench/results/schemas.json"))
    arguments = parser.parse_args(argv)
    found = {
        "none": measure(arguments.set, num_speculative_tokens=0),
        "grammar": measure([*arguments.set, "draft.replicas=0"]),
        "grammar and draft model": measure(arguments.set),
    }
    num_different = sum(
        answer != plain
        for one in found.values()
        for answer, plain in zip(one.answers, found["none"].answers, strict=True)
    )
    rows = [one.row(name) for name, one in found.items()]
    for row in rows:
        print(json.dumps(row))
    print(f"answers that differ: {num_different}")
    told = {"machine": describe_machine(), "settings": arguments.set, "rows": rows, "different": num_different}
    write_result(arguments.out, told)
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())
