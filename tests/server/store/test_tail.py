"""What a tail row holds comes back bit by bit."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from perfagent.errors import WireError
from perfagent.wire import Group
from perfagent_server.store.codec.tail import last_step, pack_tail, unpack_tail, unpack_whole

REGULAR = 1.79e9 + 0.25 * np.arange(3000)


def group(step: np.ndarray, time: np.ndarray, values: dict[str, bytes] | None = None) -> Group:
    stamps = time.astype("<f8").tobytes()
    values = values or {"loss": np.arange(len(step), dtype="<f4").tobytes()}
    return Group(step.astype("<i8").tobytes(), stamps, stamps, values)


def comes_back(frame: bytes, sent: Group) -> int:
    """Checks that the group is as it came (the tail keeps no monotonic times); answers the bytes of its times."""
    [whole], events = unpack_whole(frame)
    columns = dict(zip(whole.names, whole.columns(), strict=True))
    assert (whole.steps.tobytes(), whole.times.tobytes(), columns, events) == (sent.step, sent.time, sent.values, [])
    [kept] = unpack_tail(frame)
    assert (kept.rows, kept.times.tobytes(), list(kept.names)) == (sent.rows, sent.time, list(sent.values))
    assert last_step(frame) == max(sent.steps())
    return len(kept.stamps)


@pytest.mark.parametrize(
    ("time", "bytes_per_row"),
    [
        (REGULAR[:640], 2),
        (REGULAR[:640] + 0.02 * np.sin(np.arange(640) ** 2), 4),  # some 10 ms around
        (REGULAR[:640] + 600.0 * (np.arange(640) > 300), 8),  # a long pause
        (np.where(np.arange(640) == 7, np.nan, REGULAR[:640]), 8),
        (np.where(np.arange(640) == 639, -np.inf, REGULAR[:640]), 8),
        (np.where(np.arange(640) < 320, 0.0, -1.7e308), 8),  # far apart as integers
        (REGULAR[:640][::-1], 2),
        (np.zeros(640), 2),
        (REGULAR[:63], 8),  # so few are not worth it
        (REGULAR[:64], 2),
    ],
)
def test_times_take_as_many_bytes_as_they_need(time: np.ndarray, bytes_per_row: int) -> None:
    sent = group(np.arange(5, 5 + len(time)), time)
    assert comes_back(pack_tail([sent], []), sent) == bytes_per_row * (len(time) - (bytes_per_row < 8))


@pytest.mark.parametrize("count", [1, 63, 64])
def test_steps_with_gaps_and_columns_of_any_width_come_back(count: int) -> None:
    for step in (np.arange(count) + 9, np.arange(count) * 3, np.arange(count)[::-1].copy()):
        for kinds in (("<f4",) * 3, ("<f4", "<f8", "<f8")):
            columns = {f"name{at}": (np.arange(count) + 9 * at).astype(kind).tobytes() for at, kind in enumerate(kinds)}
            sent = group(step, REGULAR[:count], columns)
            frame = pack_tail([sent], [])
            comes_back(frame, sent)
            [kept] = unpack_tail(frame)
            assert (kept.columns(), kept.row(0)) == (list(columns.values()), [0.0, 9.0, 18.0])


def test_newer_formats_are_refused() -> None:
    with pytest.raises(WireError, match="format 4"):
        unpack_tail(msgspec.msgpack.encode((4, [], [])))
