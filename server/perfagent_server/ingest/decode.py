"""Decodes the body of a request into a frame, without ever holding more than the limits allow."""

from __future__ import annotations

import asyncio
import zlib
from typing import NamedTuple

from perfagent.errors import WireError
from perfagent.wire import MAX_DECODED_BYTES, Frame
from perfagent.wire.limits import check_frame, size_problem
from perfagent_server.event_data import Rejected, read_frame

__all__ = ["LARGE_BYTES", "MAX_RATIO", "Decoded", "TooLarge", "UnknownEncoding", "decode_body", "inflate", "read_body"]

MAX_RATIO = 100  # decoded to sent; real frames reach 2 to 4, a column of equal numbers some 60
SMALL_BYTES = 64 * 1024  # below this the ratio says nothing
LARGE_BYTES = 128 * 1024
"""Decoding more than this takes longer than a loop that serves a thousand agents should be away."""


class TooLarge(WireError):  # noqa: N818 - the name of the answer (413) it becomes
    """A body is, or would become, larger than allowed, or its frame holds too much. An agent then sends halves."""


class UnknownEncoding(WireError):  # noqa: N818 - the name of the answer (415) it becomes
    """A Content-Encoding that is not spoken here."""


class Decoded(NamedTuple):
    """size: bytes of the body as MessagePack, which is what it costs; rejected: wrong events, which are not in the
    frame."""

    frame: Frame
    rejected: list[Rejected]
    size: int


async def read_body(body: bytes, encoding: str | None, *, max_decoded_bytes: int = MAX_DECODED_BYTES) -> Decoded:
    """decode_body(), on another thread where the body is or becomes large."""
    try:
        return decode_body(body, encoding, max_decoded_bytes=min(LARGE_BYTES, max_decoded_bytes))
    except TooLarge:
        return await asyncio.to_thread(decode_body, body, encoding, max_decoded_bytes=max_decoded_bytes)


def decode_body(body: bytes, encoding: str | None, *, max_decoded_bytes: int = MAX_DECODED_BYTES) -> Decoded:
    """The frame in a request's body. Raises TooLarge, UnknownEncoding or WireError, each with a sentence for the
    sender."""
    encoding = (encoding or "identity").strip().lower()
    if encoding == "deflate":
        body = inflate(body, max_decoded_bytes)
    elif encoding not in ("identity", ""):
        raise UnknownEncoding(f"Content-Encoding {encoding!r:.40} is not spoken here; deflate and identity are")
    elif len(body) > max_decoded_bytes:
        raise TooLarge(f"the body has {len(body)} bytes; {max_decoded_bytes} are allowed: send smaller frames")
    frame, wrong = read_frame(body)
    if (problem := size_problem(frame)) is not None:
        raise TooLarge(problem)
    check_frame(frame)
    return Decoded(frame, wrong, len(body))


def inflate(body: bytes, max_bytes: int) -> bytes:
    """The body without its deflate coding (zlib format, as HTTP says). Stops at the limit instead of unpacking a
    bomb."""
    limit = min(max_bytes, max(SMALL_BYTES, len(body) * MAX_RATIO))
    decompressor = zlib.decompressobj()
    try:
        decoded = decompressor.decompress(body, limit + 1)
    except zlib.error as error:
        raise WireError(f"the body is not deflate, as its Content-Encoding says: {error}") from error
    if len(decoded) > limit:
        raise TooLarge(
            f"the body unpacks to more than {limit} bytes (at most {max_bytes}, and {MAX_RATIO} times what was sent)"
        )
    if not decompressor.eof or decompressor.unused_data:
        raise WireError("the body is cut short, or something follows its deflate stream")
    return decoded
