"""What is asked while the compactor moves samples from the tail into blocks: each answer is of one state of the data."""

from __future__ import annotations

import threading

import pytest
from frames import frame, rows

ROWS = 7  # a frame


@pytest.mark.parametrize("questions", [60, pytest.param(651, marks=pytest.mark.long)])
def test_no_sample_is_missing_or_doubled_while_it_moves(shelf, questions: int) -> None:
    acknowledged, stop = [0], threading.Event()

    def write() -> None:
        for seq in range(1, 4000):
            if stop.is_set():
                return
            steps = range((seq - 1) * ROWS + 1, seq * ROWS + 1)
            shelf.append(frame(seq, rows({"loss": [step / 8 for step in steps]}, steps)))
            acknowledged[0] = seq * ROWS
            if seq % 5 == 0:
                shelf.compact()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for number in range(questions):
            before = acknowledged[0]
            found = shelf.store.series("r1", "loss", points=(200, 2000, 20_000)[number % 3])
            after = acknowledged[0] + ROWS  # a frame may be stored and not yet acknowledged
            count = sum(found.count)
            total = sum(mean * many for mean, many in zip(found.mean, found.count, strict=True))
            assert before <= count <= after
            assert total == pytest.approx(count * (count + 1) / 16)
    finally:
        stop.set()
        writer.join()
