"""What a tail row holds comes back bit by bit, in every form that it has had."""

import msgspec
import numpy as np
import pytest

from perfagent.errors import WireError
from perfagent.wire import Event, Group
from perfagent_server.store.codec.tail import last_step, pack_tail, unpack_tail, unpack_whole

_REGULAR = 1.79e9 + 0.25 * np.arange(640)


def _group(step: np.ndarray, time: np.ndarray) -> Group:
    stamps = time.astype("<f8").tobytes()
    return Group(step.astype("<i8").tobytes(), stamps, stamps, {"loss": np.arange(len(step), dtype="<f4").tobytes()})


def _as_sent(frame: bytes) -> tuple[list[Group], list[Event]]:
    """The groups as they came; the tail keeps no monotonic times."""
    groups, events = unpack_whole(frame)
    return [
        Group(
            one.steps.tobytes(),
            one.times.tobytes(),
            one.times.tobytes(),
            dict(zip(one.names, one.columns(), strict=True)),
        )
        for one in groups
    ], events


@pytest.mark.parametrize(
    ("time", "bytes_per_row"),
    [
        (_REGULAR, 2),
        (_REGULAR + 0.02 * np.sin(np.arange(640) ** 2), 4),  # some 10 ms around
        (_REGULAR + 600.0 * (np.arange(640) > 300), 8),  # a long pause
        (np.where(np.arange(640) == 7, np.nan, _REGULAR), 8),
        (np.where(np.arange(640) == 639, -np.inf, _REGULAR), 8),
        (np.where(np.arange(640) < 320, 0.0, -1.7e308), 8),  # far apart as integers
        (_REGULAR[::-1], 2),
        (np.zeros(640), 2),
        (_REGULAR[:63], 8),  # so few are not worth it
    ],
)
def test_times_take_as_many_bytes_as_they_need_and_come_back_bit_by_bit(time: np.ndarray, bytes_per_row: int) -> None:
    sent = _group(np.arange(5, 5 + len(time)), time)
    frame = pack_tail([sent], [])
    (kept,) = unpack_tail(frame)
    assert kept.times.tobytes() == sent.time
    assert kept.rows == sent.rows
    assert len(kept.stamps) == bytes_per_row * (len(time) - (bytes_per_row < 8))
    assert _as_sent(frame)[0] == [sent]


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65])
def test_steps_with_gaps_and_without_come_back(count: int) -> None:
    for step in (np.arange(count) + 9, np.arange(count) * 3, np.arange(count)[::-1].copy()):
        sent = _group(step, _REGULAR[:count])
        assert _as_sent(pack_tail([sent], []))[0] == [sent]


@pytest.mark.parametrize("count", [3, 100])
@pytest.mark.parametrize("kinds", [("<f4",) * 5, ("<f8",) * 5, ("<f4", "<f8", "<f4", "<f8", "<f8")])
def test_columns_come_back_of_whatever_width(count: int, kinds: tuple[str, ...]) -> None:
    columns = {f"name{at}": (np.arange(count) + 1000 * at).astype(kind).tobytes() for at, kind in enumerate(kinds)}
    sent = Group(np.arange(count).tobytes(), _REGULAR[:count].tobytes(), _REGULAR[:count].tobytes(), columns)
    frame = pack_tail([sent], [])
    assert _as_sent(frame) == ([sent], [])
    assert last_step(frame) == count - 1
    (kept,) = unpack_tail(frame)
    assert kept.names == tuple(columns)
    assert kept.columns() == list(columns.values())
    assert kept.row(2) == [2.0 + 1000 * at for at in range(5)]


def test_rows_written_before_frames_had_a_version_are_still_read() -> None:
    sent = _group(np.arange(100), _REGULAR[:100])
    old = msgspec.msgpack.encode(([(0, b"", sent.time, sent.values)], []))
    assert _as_sent(old) == ([sent], [])
    (kept,) = unpack_tail(old)
    assert (kept.rows, last_step(old), kept.times.tobytes()) == (100, 99, sent.time)


def test_rows_of_the_version_before_values_were_packed_are_still_read() -> None:
    sent = _group(np.arange(3000), 1.79e9 + 0.25 * np.arange(3000))
    old = msgspec.msgpack.encode((2, [(0, b"", sent.time, ["loss"], b"\x04", sent.values["loss"])], []))
    assert _as_sent(old) == ([sent], [])
    assert last_step(old) == 2999


def test_rows_of_a_newer_version_are_refused_in_words() -> None:
    with pytest.raises(WireError, match="format 4"):
        unpack_tail(msgspec.msgpack.encode((4, [], [])))


@pytest.mark.parametrize(("names", "rows"), [(40, 256), (2000, 5), (4, 2560)])
def test_values_that_repeat_are_packed_and_noise_is_left_as_it_is(names: int, rows: int) -> None:
    noise = np.random.default_rng(3).standard_normal((names, rows))
    steady = np.where(np.arange(names)[:, None] % 2, 71e9, np.round(50 + noise))
    step, time = np.arange(rows), (1.79e9 + 0.25 * np.arange(rows)).astype("<f8").tobytes()

    def stored(values: np.ndarray) -> int:
        columns = {f"name{at}": value.tobytes() for at, value in enumerate(values)}
        sent = Group(step.tobytes(), time, time, columns)
        frame = pack_tail([sent], [])
        assert _as_sent(frame) == ([sent], [])
        (kept,) = unpack_tail(frame)
        assert kept.columns() == list(columns.values())
        return len(frame)

    assert stored(steady) < stored(noise) / 2
    assert stored(noise) < noise.nbytes + 20 * names + 4 * rows + 100
