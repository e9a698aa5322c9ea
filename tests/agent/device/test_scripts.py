"""Scripts in processes: DistributedDataParallel with one device a rank, and a training that forks."""

from __future__ import annotations

from pathlib import Path

import fake_accelerator
import pytest
from agent_recorded import Recording
from builders import job_environment
from fake_accelerator import Missing, library
from preloaded import run
from two_ranks import of_two_ranks

SCRIPTS = Path(__file__).parents[2] / "data" / "scripts"
pytestmark = pytest.mark.real


@pytest.fixture(autouse=True)
def compiled() -> None:
    try:
        library()
    except Missing as missing:
        pytest.skip(str(missing))


def test_ranks_train_and_wait_alike_with_the_agent(tmp_path: Path) -> None:
    alone = of_two_ranks(SCRIPTS / "fake_ddp.py", tmp_path / "alone")
    watched = of_two_ranks(SCRIPTS / "fake_ddp.py", tmp_path / "watched", "--attach")
    assert alone[0]["weights"] == alone[1]["weights"]
    assert watched == alone
    for rank in (0, 1):
        recording = Recording(tmp_path / "watched" / str(rank) / "record")
        assert [loss.hex() for _, loss in recording.series("loss")] == alone[rank]["losses"]


def test_a_child_forked_while_values_are_under_way_ends_well(tmp_path: Path) -> None:
    """A child that destroys an event of its parent is aborted."""
    record = tmp_path / "record"
    environment = job_environment(tmp_path, PYTHONPATH=str(Path(fake_accelerator.__file__).parents[1]))
    [done] = run([str(SCRIPTS / "fake_fork.py"), str(record)], tmp_path, [environment])
    assert done.stdout.split() == ["3"], done
    assert [step for step, _ in Recording(record).series("loss")] == [*range(1, 21)]
