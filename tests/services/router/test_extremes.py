"""Every field of every route, with every extreme of a number or a list, is answered or is a 400 naming the field.

The fields are those of the OpenAPI document, so a new one is covered by itself.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from cluster.engine.limits import StepLimits
from services.router.openapi.document import OPERATIONS, openapi_document
from services.target.requests import to_engine
from tests.services.target.test_servicer import HandDrivenTarget

from .conftest import MAX_MODEL_LEN, MAX_SPECULATIVE_TOKENS, Router, ScriptedTarget, running_router, wait_for_health

HUGE = "9" * 4300  # Python converts no longer number to text
NUMBERS = ["0", "-1", *map(str, (2**31, 2**32, 2**63, 2**64, -(2**63) - 1)), HUGE, f"-{HUGE}", HUGE * 2]
FLOATS = ["1.5", "-0.0", "1e308", "1e400", "5e-324"]
OTHERS = ["true", "[]", "[[]]", "[[[]]]", "{}", '""', "[null]", "[true]", "[1.5]", "[{}]", '[""]']
LONG = [f"[{','.join([item] * 3_000)}]" for item in ("0", '"a"', "[0]", "{}")]
VALUES = [
    *NUMBERS,
    *FLOATS,
    *OTHERS,
    *LONG,
    *(form % number for form in ("[%s]", "[[%s]]", '{"a":%s}', '{"%s":1}') for number in ("-1", f"{2**32}", HUGE)),
]
USER = {"role": "user", "content": "fox"}
BASES: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [{"prompt": "fox"}, {"prompt": [70, 71], "max_tokens": 2, "stream": True}],
    "/v1/chat/completions": [{"messages": [USER]}, {"messages": [USER], "max_tokens": 2, "logprobs": True}],
    "/v1/responses": [{"input": "fox"}],
    "/v1/messages": [{"messages": [USER], "max_tokens": 2}],
    "/v1/messages/count_tokens": [{"messages": [USER]}],
    "/v1/responses/input_tokens": [{"input": "fox"}],
    **{key: [{"prompt": "fox"}] for key in ("/tokenize", "/v1/tokenize")},
    **{key: [{"tokens": [1]}] for key in ("/detokenize", "/v1/detokenize")},
}
PATHS = [operation.path for operation in OPERATIONS if operation.body is not None]


TARGET = HandDrivenTarget()
TARGET.limits = StepLimits(max_model_len=MAX_MODEL_LEN, max_num_seqs=64, max_num_batched_tokens=512)


@pytest.fixture(scope="module")
def asked(background, model_folder, tokenizer) -> Iterator[tuple[Router, ScriptedTarget]]:
    target = ScriptedTarget(tokenizer)
    target.tokens_per_reply = MAX_MODEL_LEN
    background.run(target.start())
    with running_router(background, model_folder, [target.address]) as router:
        wait_for_health(router)
        yield router, target
    background.run(target.stop())


@pytest.fixture(scope="module")
def fields() -> dict[str, list[str]]:
    """The fields of each route's body."""
    document = openapi_document("0")
    found = {}
    for path in PATHS:
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        found[path] = list(document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]["properties"])
    return found


@pytest.mark.parametrize("path", PATHS)
def test_an_extreme_is_answered_or_refused_by_name(asked, fields, path, caplog) -> None:
    router, target = asked
    caplog.set_level(logging.WARNING)
    complaints = []
    for base in BASES[path]:
        for field in fields[path]:
            others = json.dumps({name: value for name, value in base.items() if name != field})[1:-1]
            for value in VALUES:
                body = f'{{{others}{", " if others else ""}"{field}": {value}}}'
                if (complaint := wrong(router, path, body, field)) is not None:
                    complaints.append(f"{field}={value[:40]}: {complaint}")
    assert not complaints, f"{len(complaints)}:\n" + "\n".join(complaints[:50])
    assert [
        record.getMessage() for record in caplog.records if record.exc_info or record.levelno > logging.WARNING
    ] == []
    for request in target.requests:
        to_engine(request, "id", TARGET, MAX_SPECULATIVE_TOKENS)  # the target accepts what the router sends
    target.requests.clear()


def wrong(router: Router, path: str, body: str, field: str) -> str | None:
    """Returns what is wrong with the answer to `body`, which has an extreme `field`; None if nothing is."""
    try:
        response = router.client.post(path, content=body, headers={"content-type": "application/json"})
    except httpx.TransportError as error:  # the router closes the connection after a traceback
        return repr(error)
    if response.status_code == 200 and '"error":{' not in response.text:
        return None
    if response.status_code == 404 and field == "model":
        return None
    message = response.json()["error"]["message"] if response.status_code != 200 else response.text
    if response.status_code == 400 and (field in message or "is not valid JSON" in message):
        return None
    return f"{response.status_code} {message[:200]}"
