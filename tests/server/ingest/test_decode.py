from __future__ import annotations

import zlib
from typing import Any

import pytest
from frames import frame, rows

from perfagent.errors import WireError
from perfagent.wire import Event, Frame, encode
from perfagent.wire.limits import MAX_EVENTS, MAX_GROUPS
from perfagent_server.ingest.decode import TooLarge, UnknownEncoding, decode_body, inflate


def decoded(**changes: Any) -> Frame:
    """A frame with these fields, sent and decoded."""
    sent = frame(1)
    for field, value in changes.items():
        setattr(sent, field, value)
    return decode_body(encode(sent), None).frame


@pytest.mark.parametrize("encoding", [None, "identity", "deflate", " Deflate "])
def test_a_frame_comes_back_from_each_encoding(encoding: str | None) -> None:
    sent = frame(7, rows({"loss": [1.0, float("nan")]}, [1, 2]))
    body = encode(sent)
    found = decode_body(zlib.compress(body, 1) if encoding and "eflate" in encoding else body, encoding)
    assert (found.frame, found.rejected, found.size) == (sent, [], len(body))


@pytest.mark.fault
def test_x02_a_bomb_is_refused_before_it_unpacks() -> None:
    with pytest.raises(TooLarge, match="100 times"):
        decode_body(zlib.compress(bytes(50 * 2**20), 1), "deflate")
    with pytest.raises(TooLarge):
        inflate(zlib.compress(bytes(2**20)), 2**20 - 1)
    assert len(inflate(zlib.compress(bytes(2**16), 0), 2**16)) == 2**16


@pytest.mark.fault
@pytest.mark.parametrize(
    ("body", "encoding", "said"),
    [
        (b"\x93\x01\x02\x03", None, "not a frame"),
        (b"\xc1", None, "not a frame"),
        (b"", None, "not a frame"),
        (encode(frame(1))[:-3], None, "not a frame"),
        (b"garbage", "deflate", "not deflate"),
        (zlib.compress(b"x" * 1000)[:-3], "deflate", "cut short"),
        (zlib.compress(b"x" * 10) + b"more", "deflate", "something follows"),
        (b"\x81\xa7version\x05", None, "version 5"),
        (b"\x81\xa1x" + b"\x91" * 2_000_000 + b"\x01", None, "not a frame"),
    ],
)
def test_x02_what_is_no_frame_is_refused_with_a_sentence(body: bytes, encoding: str | None, said: str) -> None:
    with pytest.raises(WireError, match=said):
        decode_body(body, encoding)


def test_an_unknown_encoding_is_named() -> None:
    with pytest.raises(UnknownEncoding, match=r"'gzip'.*deflate"):
        decode_body(b"", "gzip")


@pytest.mark.fault
def test_x03_identities_that_cannot_be_shown_are_refused() -> None:
    for field in ("project", "run", "source"):
        for value in ("", "x" * 257, "a\nb", "a\x00b"):
            with pytest.raises(WireError, match=field):
                decoded(**{field: value})
    for run in ("../x", "a/b", "..", "a?b", "a#b", "a%2fb"):  # they do not fit an address
        with pytest.raises(WireError, match="run"):
            decoded(run=run)
    for run in ("my run 1", "überlauf", "a-b_c.d:e@f+g=h", "x" * 128):
        assert decoded(run=run).run == run


@pytest.mark.parametrize(
    ("field", "value"), [("attempt", -1), ("rank", -1), ("rank", 2**31), ("seq", -1), ("seq", 0), ("attempt", 2**60)]
)
def test_numbers_that_no_table_holds_are_refused(field: str, value: int) -> None:
    with pytest.raises(WireError, match=str(value)):
        decoded(**{field: value})


@pytest.mark.parametrize(
    ("field", "most", "one"),
    [("events", MAX_EVENTS, Event(kind="context", time=1.0)), ("groups", MAX_GROUPS, rows({"x": [1.0]}, [1]))],
)
def test_more_events_or_groups_than_agents_send_are_refused(field: str, most: int, one: Any) -> None:
    """200,000 groups of one row, 46 kB when deflated, held the writer for a second."""
    assert len(getattr(decoded(**{field: [one] * most}), field)) == most
    with pytest.raises(TooLarge, match=f"{most + 1} {field}; {most} are"):
        decoded(**{field: [one] * (most + 1)})
