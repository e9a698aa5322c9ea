from __future__ import annotations

import pytest
from frames import BEGIN, frame, rows, state

from perfagent_server.store import tables
from perfagent_server.store.write.ledger_trim import LedgerTrim


def trim(shelf, now: float = BEGIN + 600) -> int:
    """By a server that has seen nothing before, as after a restart. Answers what is left in the ledger."""
    LedgerTrim(shelf.database, clock=lambda: now).run_when_due()
    return shelf.count(tables.ledger)


def sample(seq: int, **more):
    return frame(seq, rows({"loss": [1.0]}, [seq]), **more)


@pytest.mark.parametrize("ending", [[state("finished")], []], ids=["ended", "silent"])
def test_the_ledger_of_a_source_that_sends_no_more_is_trimmed(shelf, ending) -> None:
    shelf.append(frame(1, state("running")), *(sample(seq) for seq in range(2, 6)), frame(6, *ending))
    assert trim(shelf, BEGIN + 1 if ending else BEGIN + 600) == 0


@pytest.mark.sql
def test_a_trimmed_ledger_still_knows_every_frame(shelf) -> None:
    shelf.append(*(sample(seq) for seq in (1, 2, 3, 5)))
    assert trim(shelf) == 1
    assert [shelf.append(sample(seq))[0].stored for seq in (1, 3, 4, 5)] == [0, 0, 1, 0]
    assert trim(shelf) == 0
    assert [step for step, _ in shelf.samples()] == [1, 2, 3, 4, 5]
