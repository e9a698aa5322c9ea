"""What a reply means. That a sender obeys is in test_handoff.py and tests/faults/test_answers.py."""

from __future__ import annotations

import pytest

from perfagent.delivery.transport import Reply, judge, packed


def reply(status: int, text: bytes = b"", **headers: str) -> Reply:
    return Reply(status, {k.replace("_", "-"): v for k, v in headers.items()}, text)


@pytest.mark.fault
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("7", 7.0), ("1", 1.0), ("0", 1.0), ("-5", 1.0), ("300", 300.0), ("301", 300.0), ("1e9", 300.0), ("9" * 400, 300.0),
        ("inf", 300.0), ("nan", None), ("soon", None), ("", None), ("Fri, 31 Dec 9999 23:59:59 GMT", None),
    ],
)  # fmt: skip
def test_a06_pause_is_kept_within_one_second_and_five_minutes(value: str, expected: float | None) -> None:
    for status in (408, 425, 429, 500, 503):
        answer = judge(reply(status, retry_after=value))
        assert (answer.kind, answer.pause_s) == ("retry", expected), status


@pytest.mark.fault
@pytest.mark.parametrize(
    ("status", "kind"),
    [(413, "too_large"), (400, "refused"), (422, "refused"), (401, "unauthorized"), (403, "unauthorized")],
)
def test_a07_to_a09_status_says_what_to_do_with_the_frame(status: int, kind: str) -> None:
    answer = judge(reply(status, b'{"error": {"code": "bad", "message": "column loss is too short"}}'))
    assert (answer.kind, answer.reason) == (kind, f"status {status}: column loss is too short")
    assert answer.pause_s == (60.0 if kind == "unauthorized" else None)


FOREIGN = (
    reply(200, b"<html>Please log in</html>"), reply(200), reply(200, b"{}"), reply(200, b"[]"), reply(200, b"\xff\xfe"),
    reply(200, b'{"stored": "many", "duplicate": 0}'), reply(200, b'{"stored": 1}'),
    reply(200, b'{"stored": -1, "duplicate": 0}'), reply(200, b'{"stored": 1, "duplicate": true}'),
    reply(200, b'{"stored": %d, "duplicate": 0}' % 2**53), reply(200, b"[" * 100_000), reply(204),
    reply(200, b'{"stored": 1, "duplicate": 0, "rejected": [{"name": "x", "count": -50}]}'),
    reply(200, b'{"stored": 1, "duplicate": 0, "rejected": [{"count": 1e400}]}'),
    reply(200, b'{"stored": 1, "duplicate": 0, "commands": 3}'),
    reply(201, b'{"stored": 1, "duplicate": 0}'), reply(302, location="https://login.example"),
    reply(301, b'{"stored": 1, "duplicate": 0}', location="/"), reply(404, b"no such page"), reply(405),
)  # fmt: skip


@pytest.mark.fault
def test_a10_what_is_not_our_reply_is_no_acknowledgement() -> None:
    for given in FOREIGN:
        assert judge(given).kind == "foreign", given
    redirect = judge(reply(302, location="https://login.example/start?state=secret"))
    assert redirect.reason == "status 302 to https://login.example/start"
    ours = judge(
        reply(200, b'{"stored": %d, "duplicate": 0, "rejected": [{"name": "x", "count": 7}, {}]}' % (2**53 - 1))
    )
    assert (ours.kind, ours.stored, [one.count for one in ours.rejected]) == ("acked", 2**53 - 1, [7, 1])


def test_deflate_is_used_only_where_it_helps() -> None:
    zeros = bytes(10_000)
    assert packed(zeros, loopback=False)[1] == "deflate"
    assert packed(zeros, loopback=True) == (zeros, None)
    assert packed(bytes(2**21), loopback=True)[1] == "deflate"
    assert packed(b"x" * 1024, loopback=False) == (b"x" * 1024, None)
