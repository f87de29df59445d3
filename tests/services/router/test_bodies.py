"""Compressed bodies, within the same limits as others."""

from __future__ import annotations

import gzip
import json

import httpx
import pytest
import zstandard

from .conftest import Router

BODY = json.dumps({"prompt": [70, 71], "max_tokens": 2, "return_token_ids": True}).encode()


def post(router: Router, body: bytes, coding: str, path: str = "/v1/completions") -> httpx.Response:
    headers = {"content-type": "application/json", "content-encoding": coding}
    return router.client.post(path, content=body, headers=headers)


@pytest.mark.parametrize(
    ("coding", "compressed"),
    [
        ("gzip", gzip.compress(BODY, mtime=0)),
        ("GZIP", gzip.compress(BODY[:9], mtime=0) + gzip.compress(BODY[9:], mtime=0)),
        ("zstd", zstandard.compress(BODY)),
        ("zstd", zstandard.compress(BODY[:9]) + zstandard.compress(BODY[9:])),
        ("identity", BODY),
    ],
)
def test_compressed_bodies_are_read(shared_router: Router, coding: str, compressed: bytes) -> None:
    response = post(shared_router, compressed, coding)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["token_ids"] == [70, 71]


def test_bodies_that_are_not_admitted_by_paths_are_read_too(shared_router: Router) -> None:
    response = post(shared_router, gzip.compress(b'{"prompt": "the fox"}', mtime=0), "gzip", "/tokenize")
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("coding", ["br", "deflate", "gzip, zstd"])
def test_other_codings_are_refused_by_name(shared_router: Router, coding: str) -> None:
    response = post(shared_router, BODY, coding)
    assert response.status_code == 415
    assert coding in response.json()["error"]["message"]


@pytest.mark.parametrize(("coding", "compress"), [("gzip", gzip.compress), ("zstd", zstandard.compress)])
def test_the_limit_is_of_what_comes_out(shared_router: Router, coding: str, compress) -> None:
    body = compress(b'{"prompt": "' + b"a" * 10_000_000 + b'"}')
    assert len(body) < 20_000  # the limit
    response = post(shared_router, body, coding)
    assert response.status_code == 413
    assert "decompressed" in response.json()["error"]["message"]


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
@pytest.mark.parametrize("body", [b"", BODY, gzip.compress(BODY, mtime=0)[:-9], zstandard.compress(BODY)[:-5]])
def test_what_cannot_be_decompressed_is_an_error_of_the_client(shared_router: Router, coding: str, body: bytes) -> None:
    response = post(shared_router, body, coding)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
