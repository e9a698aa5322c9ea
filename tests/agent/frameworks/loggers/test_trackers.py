"""W&B, MLflow, trackio and tensorboardX themselves: every scalar they log is in the run, exactly, once, at its step.

They are large and no dependency of ours (the group `loggers`), and take seconds to begin.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from agent.frameworks.running import logged_once, trained

SCRIPT = Path(__file__).with_name("scripts") / "trackers.py"
pytestmark = pytest.mark.long
BOTH = {"depth": 3, "width": 8}


@pytest.mark.parametrize("tracker", ["wandb", "mlflow", "trackio", "tensorboardX"])
def test_scalars_and_settings_of_a_tracker_are_in_the_run_once(tracker):
    if importlib.util.find_spec(tracker) is None:
        pytest.skip(f"{tracker} is not installed: scripts/install --all installs it")
    for part in [tracker, *(["untrained"] if tracker in ("wandb", "trackio") else [])]:
        recording, names = logged_once(trained(SCRIPT, tracker, fresh=True) / part)
        assert {name for name in recording.names() if name.startswith("logged/")} <= names
        assert not {"note", "image", "text"} & recording.names()
        if tracker != "tensorboardX":
            configs = [context["config"] for context in recording.events("context") if "config" in context]
            settings = configs[-1][tracker]
            late = {"late": 5} if part == "untrained" else {}  # changed right before the tracker finished
            assert {name: int(value) for name, value in settings.items()} == BOTH | late
