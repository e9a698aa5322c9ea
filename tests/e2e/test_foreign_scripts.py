"""Scripts of someone else under `perfagent run`, unchanged, against a real server."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import pytest
from builders import ServerProcess
from e2e.launching import SCRIPTS, monitored, printed_losses, python, values

pytestmark = pytest.mark.real
EXACT = "gpt_own_batching_timed.py"
SUMMED = "accumulation_timed.py"


@pytest.mark.parametrize("script", [EXACT, pytest.param(SUMMED, marks=pytest.mark.long)])
def test_a_foreign_script_runs_unchanged_and_arrives_exactly(
    shared_server: ServerProcess, tmp_path: Path, script: str
) -> None:
    run = f"foreign-{Path(script).stem}"
    output = monitored(shared_server, run, SCRIPTS / script, folder=tmp_path / "with")
    alone = python(str(SCRIPTS / script), folder=tmp_path / "without")
    assert without_timers(output) == without_timers(alone), "the agent changed what the script prints"

    losses = printed_losses(output)
    assert losses
    summary = shared_server.wait_for_state(run, "finished", "failed", "lost")
    assert summary["state"] == "finished"
    assert summary["step"] == len(losses)

    arrived = values(shared_server, run, "loss")
    assert sorted(arrived) == list(range(1, len(losses) + 1))
    for step, loss in enumerate(losses, start=1):
        # A mean over micro-batches is added up in float32 on one side and in Python's floats on the other.
        same = arrived[step] == loss if script == EXACT else math.isclose(arrived[step], loss, rel_tol=1e-6)
        assert same, f"step {step}: printed {loss}, arrived {arrived[step]}"


def without_timers(output: str) -> list[str]:
    return [line for line in output.splitlines() if not line.startswith("TIMERS ")]


@pytest.mark.long
@pytest.mark.parametrize("script", [EXACT, SUMMED])
def test_phases_are_within_five_percent_of_the_scripts_timers(
    shared_server: ServerProcess, tmp_path: Path, script: str
) -> None:
    run = f"timed-{Path(script).stem}"
    output = monitored(shared_server, run, SCRIPTS / script, folder=tmp_path, OMP_NUM_THREADS="1")
    shared_server.wait_for_state(run, "finished")
    assert list(values(shared_server, run, "loss").values()) == pytest.approx(printed_losses(output), rel=1e-6)
    timers = json.loads(next(line[7:] for line in output.splitlines() if line.startswith("TIMERS ")))
    for phase in ("data", "forward", "backward", "optimizer"):
        measured = values(shared_server, run, f"phase/{phase}_s")
        if phase not in timers[0]:
            assert not measured, f"{phase} is reported although the script has none"
            continue
        steps = [step for step in measured if step > 3]  # the agent finds the model during the first steps
        assert len(steps) >= len(timers) - 4, f"{phase}: only steps {steps} of {len(timers)}"
        # The typical step: one in which the machine does something else between the two clocks says nothing about
        # either.
        apart = statistics.median(measured[step] - timers[step - 1][phase] for step in steps)
        own = statistics.median(timers[step - 1][phase] for step in steps)
        assert abs(apart) <= 0.05 * own, f"{phase}: the agent is {apart:+.6f} s off the script's own {own:.6f} s"
