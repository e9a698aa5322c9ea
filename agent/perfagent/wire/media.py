"""Images, audio, tables and histograms of a run: the kinds there are, how large one may be, and what its bytes may hold.

A type is known from the first bytes alone, on both sides. What is none of these is refused: SVG and HTML would run in
the browser of whoever looks at them.
"""

from __future__ import annotations

from typing import Literal, get_args

__all__ = [
    "JSON_TYPE", "MAX_BINS", "MAX_CAPTION_CHARACTERS", "MAX_MEDIA_BYTES", "MAX_TABLE_COLUMNS", "MAX_TABLE_ROWS", "MEDIA_KINDS",
    "MediaKind", "media_type",
]  # fmt: skip

MediaKind = Literal["image", "audio", "table", "histogram"]
MEDIA_KINDS: tuple[MediaKind, ...] = get_args(MediaKind)
MAX_MEDIA_BYTES = 2 * 2**20
"""Most bytes of one item, encoded. Four of them fit into a frame."""
MAX_CAPTION_CHARACTERS = 500
MAX_TABLE_ROWS, MAX_TABLE_COLUMNS = 1000, 100
MAX_BINS = 512
JSON_TYPE = "application/json"
"""Type of tables and histograms."""

_KNOWN = {
    "image": (
        (0, b"\x89PNG\r\n\x1a\n", "image/png"), (0, b"\xff\xd8\xff", "image/jpeg"), (0, b"GIF87a", "image/gif"),
        (0, b"GIF89a", "image/gif"), (8, b"WEBP", "image/webp"),
    ),
    "audio": ((0, b"OggS", "audio/ogg"), (0, b"ID3", "audio/mpeg"), (8, b"WAVE", "audio/wav")),
}  # fmt: skip
"""Where its mark stands; those of RIFF stand behind that word."""


def media_type(kind: MediaKind, data: bytes) -> str | None:
    """The media type of an image or a sound, from its first bytes; None for what is not of this kind, or not allowed."""
    if kind not in _KNOWN:
        return None
    head = data[:12]
    if kind == "audio" and len(head) > 1 and head[0] == 0xFF and head[1] & 0xE6 == 0xE2:  # MPEG audio, layer III
        return "audio/mpeg"
    found = (
        name for at, magic, name in _KNOWN[kind] if head[at:].startswith(magic) and (not at or head[:4] == b"RIFF")
    )
    return next(found, None)
