"""The agent changes nothing that training produces: losses, weights, batch statistics and both random states, bit by bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from builders import job_environment

SCRIPT = Path(__file__).parents[1] / "data" / "scripts" / "bit_equality.py"


def digest(folder: Path, *arguments: str) -> str:
    environment = job_environment(folder, PERFAGENT_RECORD=str(folder / "record"))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize("threads", ["1", "2"])
def test_training_is_bit_equal_with_and_without_the_agent(tmp_path, threads):
    assert digest(tmp_path, threads) == digest(tmp_path, threads, "--attach")
    assert any((tmp_path / "record").rglob("*.frames")), "the agent recorded nothing: there was nothing to compare"
