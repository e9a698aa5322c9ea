"""Two processes train on batches by token budget."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

JOB = Path(__file__).with_name("ranks_job.py")


def test_ranks_find_their_batches_by_themselves_and_step_together(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, str(JOB), str(tmp_path / "store"), str(rank), "2"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=150) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in said)
    assert first["steps"] == second["steps"] > 0
    assert first["weights"] == second["weights"]
    for epoch in range(2):
        assert sorted(first["seen"][epoch] + second["seen"][epoch]) == [*range(61)]
    assert first["seen"][0] != first["seen"][1]
