"""Compressed request bodies: `Content-Encoding: gzip` and `zstd`."""

from __future__ import annotations

import io
import zlib

import zstandard

from cluster.errors import InvalidRequestError
from services.router.errors import PayloadTooLargeError, UnsupportedMediaTypeError, excerpt
from services.router.http.large_work import run_in_thread

_MAX_WINDOW_BYTES = 8 * 2**20  # window of zstd; RFC 9659's limit for HTTP
_MAX_MEMBERS = 16  # of a gzip body: each one costs time, even an empty one
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
    return await run_in_thread(len(body), lambda: _decode(body, coding, max_bytes))


def _decode(body: bytes, coding: str, max_bytes: int) -> bytes:
    try:
        if coding == "gzip":
            decoded = _gunzip(body, max_bytes + 1)
        else:
            decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
            with decompressor.stream_reader(io.BytesIO(body), read_across_frames=True) as reader:
                decoded = reader.read(max_bytes + 1)
    except (zlib.error, zstandard.ZstdError) as error:
        raise InvalidRequestError(f"the body is not valid {coding}: {error}") from error
    if len(decoded) > max_bytes:
        raise PayloadTooLargeError(f"the body is over the limit of {max_bytes} bytes when it is decompressed")
    return decoded


def _gunzip(body: bytes, most: int) -> bytes:
    """Returns the first `most` bytes of the members of `body`. Raises zlib.error if it is invalid."""
    decoded = b""
    for _ in range(_MAX_MEMBERS):
        member = zlib.decompressobj(wbits=31)
        decoded += member.decompress(body, most - len(decoded))
        if len(decoded) == most:
            return decoded
        if not member.eof:
            raise zlib.error("it ends too early")
        body = member.unused_data
        if not body.strip(b"\0"):
            return decoded
    raise zlib.error(f"it has more than {_MAX_MEMBERS} members")
