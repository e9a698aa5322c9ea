"""Images, audio, tables and histograms of a run: the kinds there are, how large one may be, and what its bytes may hold.

A type is told from the first bytes alone, on both sides. What is none of these is refused: SVG and HTML would run in
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
"""Of one item, encoded. Four of them fit into a frame."""
MAX_CAPTION_CHARACTERS = 500
MAX_TABLE_ROWS, MAX_TABLE_COLUMNS = 1000, 100
MAX_BINS = 512
JSON_TYPE = "application/json"
"""Of tables and histograms."""

_IMAGES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
)
_SOUNDS = ((b"OggS", "audio/ogg"), (b"ID3", "audio/mpeg"))


def media_type(kind: MediaKind, data: bytes) -> str | None:
    """The media type of an image or a sound, from its first bytes; None for what is not of this kind, or not allowed."""
    head = data[:12]
    if kind == "image":
        riff, known = (b"WEBP", "image/webp"), _IMAGES
    elif kind == "audio":
        riff, known = (b"WAVE", "audio/wav"), _SOUNDS
        if head[:1] == b"\xff" and len(head) > 1 and head[1] & 0xE6 == 0xE2:  # a frame of MPEG audio, layer III
            return "audio/mpeg"
    else:
        return None
    if head[:4] == b"RIFF" and head[8:12] == riff[0]:
        return riff[1]
    return next((name for magic, name in known if head.startswith(magic)), None)
