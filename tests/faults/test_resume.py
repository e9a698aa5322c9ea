"""A training that is killed with SIGKILL and resumed, once of each kind. scripts/faults does it a hundred times."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults.resume_rows import TRIALS, killed_and_resumed

pytestmark = [pytest.mark.fault, pytest.mark.real]


EVERY_TIME = ("plain", "ddp")


@pytest.mark.parametrize(
    "kind", [kind if kind in EVERY_TIME else pytest.param(kind, marks=pytest.mark.long) for kind in TRIALS]
)
def test_t01_killed_and_resumed_training_has_the_same_losses(tmp_path: Path, kind: str) -> None:
    outcome = killed_and_resumed(tmp_path, kind, trials=1)
    assert outcome.good, outcome.figures
