"""Compressed request bodies: `Content-Encoding: gzip` and `zstd`."""

from __future__ import annotations

import gzip
import io
import zlib

import zstandard

from cluster.errors import InvalidRequestError
from services.router.errors import PayloadTooLargeError, UnsupportedMediaTypeError, excerpt
from services.router.http.large_work import run_in_thread

_MAX_WINDOW_BYTES = 8 * 2**20  # window of zstd; RFC 9659's limit for HTTP
_CODINGS = {"gzip": "gzip", "x-gzip": "gzip", "zstd": "zstd"}


def coding_of(header: str) -> str | None:
    """Returns the coding that a `Content-Encoding` header names; None: the body is not compressed.

    Raises UnsupportedMediaTypeError if it is neither gzip nor zstd.
    """
    name = header.strip().lower()
    if name in ("", "identity"):
        return None
    if name not in _CODINGS:
        raise UnsupportedMediaTypeError(
            f"the Content-Encoding {excerpt(header)} is not supported: send gzip, zstd or no Content-Encoding"
        )
    return _CODINGS[name]


async def decode(body: bytes, coding: str, max_bytes: int) -> bytes:
    """Decompresses `body` in a thread.

    Raises PayloadTooLargeError if the result exceeds `max_bytes`, and InvalidRequestError if `body` is invalid.
    """
    return await run_in_thread(lambda: _decode(body, coding, max_bytes))


def _decode(body: bytes, coding: str, max_bytes: int) -> bytes:
    source = io.BytesIO(body)
    try:
        with (
            gzip.GzipFile(fileobj=source)
            if coding == "gzip"
            else zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).stream_reader(
                source, read_across_frames=True
            )
        ) as reader:
            decoded: bytes = reader.read(max_bytes + 1)
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        raise InvalidRequestError(f"the body is not valid {coding}: {error}") from error
    if len(decoded) > max_bytes:
        raise PayloadTooLargeError(f"the body is over the limit of {max_bytes} bytes when it is decompressed")
    return decoded
