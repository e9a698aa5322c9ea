"""Where an attempt begins that its agent did not tell: what older attempts have is hidden from there on, and no
earlier."""

from __future__ import annotations

from frames import frame, rows, state

from perfagent_server.store.sql import SqlStore


def loss(shelf) -> list[tuple[int, float]]:
    answer = shelf.store.series("r1", "loss")
    return list(zip(answer.step, answer.mean, strict=True))


def first_attempt(shelf) -> None:
    shelf.append(frame(1, state("starting", start_step=None), rows({"loss": [1.0] * 100}, range(1, 101))))


EXPECTED = [(step, 1.0) for step in range(1, 90)] + [(step, 2.0) for step in range(90, 100)]


def test_an_attempt_whose_first_frame_only_says_starting_hides_nothing_before_its_rows(shelf) -> None:
    first_attempt(shelf)
    shelf.append(frame(1, state("starting", start_step=None), attempt=2))
    assert len(loss(shelf)) == 100
    shelf.append(frame(2, rows({"loss": [2.0] * 10}, range(90, 100)), attempt=2))
    assert loss(shelf) == EXPECTED


def test_rows_of_samplers_do_not_say_where_an_attempt_begins(shelf) -> None:
    first_attempt(shelf)
    shelf.append(frame(1, rows({"host/cpu_pct": [1.0]}, [0]), rows({"disk/work_used_pct": [1.0]}, [0]), attempt=2))
    assert len(loss(shelf)) == 100
    shelf.append(frame(2, rows({"loss": [2.0] * 10}, range(90, 100)), attempt=2))
    assert loss(shelf) == EXPECTED


def test_frames_of_an_attempt_may_come_in_any_order(shelf) -> None:
    first_attempt(shelf)
    shelf.append(frame(2, rows({"loss": [2.0] * 5}, range(95, 100)), attempt=2))
    shelf.append(frame(1, rows({"loss": [2.0] * 5}, range(90, 95)), attempt=2))
    assert loss(shelf) == EXPECTED


def test_what_an_agent_told_is_not_moved_by_rows_below_it_nor_by_another_rank(shelf) -> None:
    first_attempt(shelf)
    shelf.append(frame(1, state("starting", start_step=90), rows({"loss": [2.0] * 10}, range(90, 100)), attempt=2))
    shelf.append(frame(1, state("starting", start_step=0), attempt=2, rank=1))
    shelf.append(frame(2, rows({"eval": [2.0]}, [50]), attempt=2))
    assert loss(shelf) == EXPECTED
    shelf.store = SqlStore(shelf.database)  # as after a restart of the server
    shelf.append(frame(3, rows({"eval": [2.0]}, [40]), attempt=2))
    assert loss(shelf) == EXPECTED


def test_rows_without_an_agent_do_not_say_where_an_attempt_begins(shelf) -> None:
    first_attempt(shelf)
    shelf.append(frame(1, state("starting"), attempt=2))
    shelf.append(frame(1, rows({"eval": [0.5]}, [20]), attempt=2, source="http-1"))
    assert len(loss(shelf)) == 100
