"""A frame of many rows becomes several rows of the tail, and what is read of it is the same."""

from __future__ import annotations

from collections import Counter

from frames import rows, state

from perfagent.wire import Event, Group
from perfagent_server.store.write.pieces import MOST_ROWS, pieces

MANY = 3 * MOST_ROWS


def content(groups: list[Group]) -> Counter[tuple[int, float, str, float]]:
    """Each sample: step, time, name, value."""
    return Counter(
        (step, time, name, value)
        for group in groups
        for name in group.values
        for step, time, value in zip(group.steps(), group.times(), group.column(name), strict=True)
    )


def test_the_pieces_of_a_frame_hold_what_it_held() -> None:
    steps = [at // 2 for at in range(MANY)]  # two rows a step, which stay together
    groups = [rows({"loss": list(map(float, steps))}, steps), rows({"host/cpu_pct": [1.0, 2.0]}, [0, steps[-1]])]
    said = [
        state("running"),
        Event(kind="log", time=0.0),
        Event(kind="alert", time=0.0, step=steps[-1]),
        state("finished"),
    ]
    found = pieces(groups, said)
    assert len(found) >= MANY // MOST_ROWS and all(groups for groups, _ in found)
    assert content([group for some, _ in found for group in some]) == content(groups)
    of_piece = [{step for group in some for step in group.steps()} for some, _ in found]
    assert sum(map(len, of_piece)) == len(set(steps)), "no step is in two pieces"
    assert [sorted(one) for one in of_piece] == sorted(sorted(one) for one in of_piece)
    assert [event.kind for event in found[0][1]] == ["state", "log"]
    assert [event.data for event in found[-1][1]][-1] == {"state": "finished"} and said[2] in found[-1][1]


def test_a_frame_of_few_rows_stays_whole() -> None:
    groups = [rows({"loss": [1.0] * MOST_ROWS}, range(MOST_ROWS))]
    assert pieces(groups, []) == [(groups, [])]
