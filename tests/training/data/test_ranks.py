"""Two processes train on batches by token budget."""

from __future__ import annotations

import json
from pathlib import Path

from builders import job_environment
from preloaded import run

JOB = Path(__file__).with_name("ranks_job.py")


def test_ranks_find_their_batches_by_themselves_and_step_together(tmp_path: Path) -> None:
    environments = [job_environment(tmp_path, RANK=str(rank)) for rank in range(2)]
    ranks = run([str(JOB), str(tmp_path / "store"), "2"], tmp_path, environments)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks
    first, second = (json.loads(rank.stdout.splitlines()[-1]) for rank in ranks)
    assert first["steps"] == second["steps"] > 0
    assert first["weights"] == second["weights"]
    for epoch in range(2):
        assert sorted(first["seen"][epoch] + second["seen"][epoch]) == [*range(61)]
    assert first["seen"][0] != first["seen"][1]
