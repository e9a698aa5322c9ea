"""The shipped loop, killed and started again, is one run with two attempts: by attach() and under `perfagent run`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from builders import ServerProcess, job_environment, sync, until

pytestmark = pytest.mark.real
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "loop.py")
PLAIN = [sys.executable]
LAUNCHED = [sys.executable, "-m", "perfagent", "run", "--name", "loop"]


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in folder.glob("step_*") if path.name[5:].isdigit())


@pytest.mark.parametrize("command", [PLAIN, LAUNCHED], ids=["attached", "launched"])
def test_a_killed_loop_continues_its_run(command: list[str], tmp_path: Path, server: ServerProcess) -> None:
    saved = tmp_path / "saved"
    env = job_environment(tmp_path, PERFAGENT_SERVER=server.url, OMP_NUM_THREADS="1")
    words = [*command, EXAMPLE, "--checkpoints", str(saved), "--steps"]
    first = subprocess.Popen([*words, "100000"], env=env)
    try:
        until(lambda: saved_steps(saved), within_s=60, why="no checkpoint was saved")
        stored = until(lambda: max((one["step"] or 0 for one in server.get("/runs")["runs"]), default=0), why="no step")
    finally:
        first.kill()
        first.wait()
    resumed = saved_steps(saved)[-1]
    steps = resumed + 100
    subprocess.run([*words, str(steps)], env=env, check=True, timeout=120)
    sync(env)  # what a busy machine had no time for at the end
    (run,) = until(
        lambda: [one for one in server.get("/runs")["runs"] if one["state"] == "finished"], within_s=30, why="no end"
    )
    assert [one["run"] for one in server.get("/runs")["runs"]] == [run["run"]]
    assert (run["name"], run["step"], run["attempts"]) == ("loop", steps, 2)
    found = [row["step"] for row in server.export(run["run"]) if row["name"] == "loss"]
    assert len(found) == len(set(found)), "no step twice"
    # a kill may cost what the job measured in its last 0.2 s
    assert {*range(1, stored + 1), *range(resumed + 1, steps + 1)} <= set(found) <= set(range(1, steps + 1))
