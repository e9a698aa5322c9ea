"""Where an attempt begins that its agent did not tell: what older attempts have is hidden from there on, and no
earlier."""

from __future__ import annotations

import pytest
from frames import frame, rows, state

from perfagent_server.store.sql import SqlStore

WHOLE = [(step, 1.0) for step in range(1, 101)]
CUT = [(step, 1.0) for step in range(1, 90)] + [(step, 2.0) for step in range(90, 100)]
SAMPLERS = rows({"host/cpu_pct": [1.0]}, [0]), rows({"disk/work_used_pct": [1.0]}, [0])


def losses(first: int, end: int):
    return rows({"loss": [2.0] * (end - first)}, range(first, end))


@pytest.fixture
def shelf(shelf):
    """With a first attempt of a hundred steps."""
    shelf.append(frame(1, state("starting", start_step=None), rows({"loss": [1.0] * 100}, range(1, 101))))
    return shelf


@pytest.mark.parametrize(
    "first",
    [
        frame(1, state("starting", start_step=None), attempt=2),
        frame(1, *SAMPLERS, attempt=2),
        frame(1, rows({"eval": [0.5]}, [20]), attempt=2, source="http-1"),  # without an agent
    ],
    ids=["starting", "samplers", "no agent"],
)
def test_what_has_no_step_does_not_say_where_it_begins(shelf, first) -> None:
    shelf.append(first)
    assert shelf.samples() == WHOLE
    shelf.append(frame(2, losses(90, 100), attempt=2))
    assert shelf.samples() == CUT


@pytest.mark.sql
def test_what_an_agent_told_is_moved_by_nothing_else(shelf) -> None:
    """Neither by rows below it nor by another rank, nor after a restart of the server."""
    shelf.append(frame(1, state("starting", start_step=90), losses(90, 100), attempt=2))
    shelf.append(frame(1, state("starting", start_step=0), attempt=2, rank=1))
    for seq in (2, 3):
        shelf.append(frame(seq, rows({"eval": [2.0]}, [60 - 10 * seq]), attempt=2))
        assert shelf.samples() == CUT
        shelf.store = SqlStore(shelf.database)
