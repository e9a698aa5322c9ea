from __future__ import annotations

import pytest
from builders import until
from frames import BEGIN, frame, rows, state
from sqlalchemy import func, select

from perfagent_server.store import tables
from perfagent_server.store.write.compaction import CompactionPolicy, Compactor
from perfagent_server.store.write.ledger_trim import LedgerTrim


def in_ledger(shelf) -> int:
    with shelf.database.read() as connection:
        return int(connection.execute(select(func.count()).select_from(tables.ledger)).scalar_one())


def trim(shelf, now: float) -> None:
    """By a server that has seen nothing before, as after a restart."""
    LedgerTrim(shelf.database, clock=lambda: now).run_when_due()


def sample(seq: int):
    return rows({"loss": [1.0]}, [seq])


@pytest.mark.parametrize("ending", [[state("finished")], []], ids=["ended", "silent"])
def test_the_ledger_of_a_source_that_sends_no_more_is_trimmed_also_after_a_restart(shelf, ending) -> None:
    shelf.append(frame(1, state("running")), *(frame(seq, sample(seq)) for seq in range(2, 6)), frame(6, *ending))
    trim(shelf, BEGIN + 1 if ending else BEGIN + 600)
    assert in_ledger(shelf) == 0


def test_the_ledger_of_a_source_that_sends_on_is_left_alone_until_it_has_many_frames(shelf) -> None:
    shelf.append(*(frame(seq, state("running")) for seq in range(1, 6)))
    trim(shelf, BEGIN + 1)
    assert in_ledger(shelf) == 5
    shelf.append(*(frame(seq) for seq in range(6, 1001)))  # signs of life, of which the tail knows nothing
    trim(shelf, BEGIN + 1)
    assert in_ledger(shelf) == 0


def test_a_long_ledger_of_a_source_is_trimmed_in_several_jobs(shelf) -> None:
    shelf.append(*(frame(seq) for seq in range(1, 3501)))
    jobs = shelf.database.jobs
    trim(shelf, BEGIN + 600)
    until(lambda: shelf.database.jobs == jobs + 4)
    assert in_ledger(shelf) == 0


def test_a_trimmed_ledger_still_knows_every_frame(shelf) -> None:
    for seq in (1, 2, 3, 5):
        shelf.append(frame(seq, sample(seq)))
    trim(shelf, BEGIN + 600)
    assert in_ledger(shelf) == 1
    receipts = [shelf.append(frame(seq, sample(seq)))[0] for seq in (1, 3, 4, 5)]
    assert [receipt.stored for receipt in receipts] == [0, 0, 1, 0]
    trim(shelf, BEGIN + 600)
    assert in_ledger(shelf) == 0
    assert [row.step for row in shelf.store.samples("r1")] == [1, 2, 3, 4, 5]


def test_sources_whose_next_frame_is_missing_cost_no_write(shelf) -> None:
    shelf.append(*(frame(seq, sample(seq), rank=rank) for rank in range(3) for seq in (1, 3)))
    trim(shelf, BEGIN + 600)
    assert in_ledger(shelf) == 3
    jobs = shelf.database.jobs
    trim(shelf, BEGIN + 600)
    assert shelf.database.jobs == jobs


def test_the_compactor_trims_on_its_way(shelf) -> None:
    shelf.append(frame(1, state("finished")))
    compactor = Compactor(shelf.database, rules_enabled=False, policy=CompactionPolicy(pause_s=0.01))
    compactor.start()
    until(lambda: in_ledger(shelf) == 0)
    compactor.stop()
