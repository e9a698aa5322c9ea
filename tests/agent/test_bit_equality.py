"""The agent changes nothing that training produces: losses, weights, batch statistics and both random states, bit by
bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from agent.scripts import run_script
from agent_recorded import Recording

pytestmark = pytest.mark.real
SCRIPT = Path(__file__).parents[1] / "data" / "scripts" / "bit_equality.py"


def digest(folder: Path, *arguments: str) -> str:
    done = run_script(folder, SCRIPT, *arguments)
    assert done.returncode == 0, done
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("threads", "how", "recorded"),
    [
        ("1", "--attach", {"loss"}),
        ("2", "--attach", {"loss"}),
        ("1", "--attach-media", {"image samples", "histogram weights", "table table"}),
        (
            "1",
            "--attach-everything",
            {"grad_norm/0.weight", "update_ratio/0.weight", "dead_share/2", "grad/zero_share"},
        ),
    ],
)
def test_training_is_bit_equal_with_and_without_the_agent(tmp_path, threads, how, recorded):
    """In the end with media, or with all looked at, in every step."""
    assert digest(tmp_path, threads) == digest(tmp_path, threads, how)
    recording = Recording(tmp_path / "record")
    media = {f"{one['what']} {one['name']}" for one in recording.events("media")}
    assert recorded <= recording.names() | media, "else there was nothing to compare"
