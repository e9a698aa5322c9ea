"""What is saved when a training is ended from outside, or by an exception, and how the process ends then."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_recorded import Recording
from builders import free_port, job_environment, until
from preloaded import Running, started
from resumable import small_loop

from perfagent_loop.folder import Folder

HERE = Path(__file__).resolve().parent
TERMINATED = -signal.SIGTERM
pytestmark = pytest.mark.real


@contextlib.contextmanager
def jobs(folder: Path, mode: str = "default", *ranks: dict[str, str]) -> Iterator[list[Running]]:
    common = {"PYTHONPATH": str(HERE.parents[1]), "PERFAGENT_RECORD": str(folder / "record")}
    environments = [job_environment(folder, **common, **rank) for rank in ranks or ({},)]
    words = [str(HERE / "emergency_job.py"), str(folder / "runs"), mode]
    with started(words, folder / "streams", environments) as children:
        yield children


def reached(child: Running, steps: int) -> None:
    """The child has made so many steps and waits in the next one."""
    child.stdin.write("\n" * steps)
    child.stdin.flush()
    assert [int(child.stdout.readline()) for _ in range(steps + 1)] == [*range(steps + 1)]


def saved(folder: Path) -> list[tuple[int, str]]:
    return [(manifest.step, manifest.reason) for _, manifest in Folder(folder / "runs").candidates()]


def states(folder: Path) -> list[str]:
    return [str(event["state"]) for event in Recording(folder / "record").events("state") if "state" in event]


@pytest.mark.parametrize(
    ("mode", "signaled_at", "lines", "code", "left", "state", "said"),
    [
        ("default", 3, "\n", TERMINATED, [(4, "sigterm")], "preempted", ""),
        ("handler", 2, "\n", 7, [(3, "sigterm")], "", "mine 15"),  # the user's own handler comes after the save
        ("ignored", 2, "\n\nend\n", 0, [(3, "sigterm")], "finished", "3\n4\n"),
        ("grace", 2, None, TERMINATED, [], "preempted", ""),  # a step longer than the grace time delays nothing
        ("default", None, "\n\n\nraise\n", 1, [(3, "exception")], "", "checkpoint: of step 3"),
        ("in the step", None, "\n\n\n\n", 1, [], "", "ZeroDivision"),  # weights have changed, and are not counted yet
        ("late", None, "\n\nend\n", TERMINATED, [(2, "sigterm")], "preempted", ""),  # saved when it is closed
        ("default", None, "\n\nend\n", 0, [], "", "closed True True"),  # nothing of ours is left after close()
    ],
)
def test_an_ended_training_leaves_its_last_whole_step(
    tmp_path: Path, mode: str, signaled_at: int | None, lines: str | None, code: int, left: Any, state: str, said: str
) -> None:
    with jobs(tmp_path, mode) as [child]:
        if signaled_at is not None:
            reached(child, signaled_at)
            child.send_signal(signal.SIGTERM)
        if lines is None:
            assert child.wait() == code
        else:
            ended = child.communicate(lines)
            assert ended.returncode == code
            assert said in ended.stdout + ended.stderr
    assert saved(tmp_path) == left
    if left:
        assert small_loop(tmp_path / "runs").resume() == left[0][0]
    if state:
        assert states(tmp_path)[-1] == state
        alerts = Recording(tmp_path / "record").events("alert")
        assert {told["level"] for told in alerts} <= {"info"}, "a save at SIGTERM is no trouble"


def test_a_second_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    """Two that come before the first one's handler are one to Python: they are sent until one was the second."""
    with jobs(tmp_path) as [child]:
        reached(child, 2)

        def is_gone() -> bool:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGTERM)
                return False
            return True

        until(is_gone, within_s=30, why="it waits for the end of its grace time")
        assert child.wait() == TERMINATED
    assert saved(tmp_path) == []


def test_a_signal_to_one_rank_saves_and_ends_all_at_one_step(tmp_path: Path) -> None:
    together = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with jobs(tmp_path, "default", {"RANK": "0"} | together, {"RANK": "1"} | together) as ranks:
        assert [child.stdout.readline() for child in ranks] == ["3\n", "3\n"]
        ranks[1].send_signal(signal.SIGTERM)
        assert [child.wait() for child in ranks] == [TERMINATED, TERMINATED]
    [(step, reason)] = saved(tmp_path)
    assert reason == "sigterm"
    assert step > 3
    assert states(tmp_path).count("preempted") == 2
