"""I3, I4, I7 for every row that can be done to a training process: see trainings.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults import trainings

pytestmark = [pytest.mark.fault, pytest.mark.real]


def test_a01_to_a24_training_is_bit_equal_and_ends_in_time(tmp_path: Path) -> None:
    found = trainings.run(tmp_path / "first")
    # The quicker end of two counts: other tests run beside this one.
    late = tuple(case for case in trainings.CASES if found[case.name].startswith("I7") and ";" not in found[case.name])
    if late:
        found |= trainings.run(tmp_path / "again", late)
    wrong = {name: what for name, what in found.items() if what}
    assert not wrong, "\n".join(f"{name}: {what}" for name, what in wrong.items())
