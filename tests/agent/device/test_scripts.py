"""What needs processes of its own: ranks of DistributedDataParallel, each on its own device."""

from __future__ import annotations

from pathlib import Path

import pytest
from agent_recorded import Recording
from fake_accelerator import Missing, library
from two_ranks import of_two_ranks

SCRIPTS = Path(__file__).parents[2] / "data" / "scripts"
pytestmark = pytest.mark.real


@pytest.fixture(autouse=True)
def compiled() -> None:
    try:
        library()
    except Missing as missing:
        pytest.skip(str(missing))


def test_ranks_train_and_wait_alike_with_and_without_the_agent(tmp_path: Path) -> None:
    alone = of_two_ranks(SCRIPTS / "fake_ddp.py", tmp_path / "alone")
    watched = of_two_ranks(SCRIPTS / "fake_ddp.py", tmp_path / "watched", "--attach")
    assert alone[0]["weights"] == alone[1]["weights"]
    assert watched == alone
    for rank in (0, 1):
        recording = Recording(tmp_path / "watched" / str(rank) / "record")
        assert [loss.hex() for _, loss in recording.series("loss")] == alone[rank]["losses"]
