import asyncio
import zlib

import pytest
from frames import frame, rows

from perfagent.errors import WireError
from perfagent.wire import Event, encode
from perfagent.wire.limits import MAX_EVENTS, MAX_GROUPS
from perfagent_server.ingest.decode import TooLarge, UnknownEncoding, decode_body, inflate, read_body


@pytest.mark.parametrize("encoding", [None, "identity", "deflate", " Deflate "])
def test_a_frame_comes_back_from_each_encoding(encoding: str | None) -> None:
    sent = frame(7, rows({"loss": [1.0, float("nan")]}, [1, 2]))
    body = encode(sent)
    found = decode_body(zlib.compress(body, 1) if encoding and "eflate" in encoding else body, encoding)
    assert (found.frame, found.rejected, found.size) == (sent, [], len(body))


@pytest.mark.fault
def test_x02_a_bomb_is_refused_before_it_unpacks() -> None:
    bomb = zlib.compress(b"\0" * (200 * 2**20), 9)
    with pytest.raises(TooLarge, match="100 times"):
        decode_body(bomb, "deflate")
    with pytest.raises(TooLarge):
        inflate(zlib.compress(bytes(2**20)), 2**19)


@pytest.mark.fault
@pytest.mark.parametrize(
    ("body", "encoding", "sentence"),
    [
        (b"\x93\x01\x02\x03", None, "not a frame"),
        (b"\xc1", None, "not a frame"),
        (b"", None, "not a frame"),
        (b"garbage", "deflate", "not deflate"),
        (zlib.compress(b"x" * 1000)[:-3], "deflate", "cut short"),
        (zlib.compress(b"x" * 10) + b"more", "deflate", "something follows"),
        (b"\x81\xa7version\x05", None, "version 5"),
        (b"\x81\xa1x" + b"\x91" * 2_000_000 + b"\x01", None, "not a frame"),
    ],
)
def test_x02_what_is_no_frame_is_refused_with_a_sentence(body: bytes, encoding: str | None, sentence: str) -> None:
    with pytest.raises(WireError, match=sentence):
        decode_body(body, encoding)


def test_an_unknown_encoding_is_named() -> None:
    with pytest.raises(UnknownEncoding, match=r"'gzip'.*deflate"):
        decode_body(b"", "gzip")


@pytest.mark.parametrize("field", ["project", "run", "source"])
@pytest.mark.parametrize("value", ["", "x" * 300, "a\nb", "a\x00b"])
def test_identities_that_cannot_be_shown_are_refused(field: str, value: str) -> None:
    sent = frame(1)
    setattr(sent, field, value)
    with pytest.raises(WireError, match=field):
        decode_body(encode(sent), None)


@pytest.mark.fault
@pytest.mark.parametrize("run", ["../x", "a/b", "..", "a?b", "a#b", "a%2fb"])
def test_x03_a_run_id_must_fit_an_address(run: str) -> None:
    with pytest.raises(WireError, match="run"):
        decode_body(encode(frame(1, run=run, source="s")), None)


@pytest.mark.parametrize("run", ["my run 1", "überlauf", "a-b_c.d:e@f+g=h"])
def test_readable_run_ids_are_fine(run: str) -> None:
    assert decode_body(encode(frame(1, run=run, source="s")), None).frame.run == run


@pytest.mark.parametrize(
    ("field", "value"), [("attempt", -1), ("rank", -1), ("rank", 2**31), ("seq", -1), ("seq", 0), ("attempt", 2**60)]
)
def test_numbers_that_no_table_holds_are_refused(field: str, value: int) -> None:
    sent = frame(1)
    setattr(sent, field, value)
    with pytest.raises(WireError, match=str(value)):
        decode_body(encode(sent), None)


def test_a_frame_of_more_events_than_any_agent_sends_is_refused_with_what_is_allowed() -> None:
    sent = frame(1)
    sent.events = [Event(kind="context", time=1.0)] * MAX_EVENTS
    assert len(decode_body(encode(sent), None).frame.events) == MAX_EVENTS
    sent.events = [Event(kind="context", time=1.0)] * (MAX_EVENTS + 1)
    with pytest.raises(TooLarge, match=f"{MAX_EVENTS + 1} events; {MAX_EVENTS} are allowed"):
        decode_body(encode(sent), None)


def test_a_frame_of_more_groups_than_any_agent_sends_is_refused_with_what_is_allowed() -> None:
    """200,000 groups of one row, 46 kB when deflated, held the writer for a second."""
    sent = frame(1)
    sent.groups = [rows({"x": [1.0]}, [1])] * (MAX_GROUPS + 1)
    with pytest.raises(TooLarge, match=f"{MAX_GROUPS + 1} groups; {MAX_GROUPS} are allowed"):
        decode_body(encode(sent), None)


@pytest.mark.parametrize(("rows_sent", "leaves_the_loop"), [(10, False), (12_000, True)])
def test_a_body_that_becomes_large_is_not_decoded_on_the_loop(rows_sent: int, leaves_the_loop: bool) -> None:
    """As sent, both are small."""
    body = zlib.compress(encode(frame(1, rows({"loss": [1.0] * rows_sent}, list(range(rows_sent))))), 9)

    async def others_had_a_turn() -> bool:
        turns: list[int] = []
        asyncio.get_running_loop().call_soon(turns.append, 1)
        assert (await read_body(body, "deflate")).frame.samples == rows_sent
        return bool(turns)

    assert len(body) < 100_000
    assert asyncio.run(others_had_a_turn()) == leaves_the_loop
