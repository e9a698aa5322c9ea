"""What is saved when a training is ended from outside, or by an exception, and how the process ends then."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from agent_recorded import Recording
from builders import free_port, job_environment, until
from preloaded import Running, started
from resumable import small_loop

from perfagent.training.folder import Folder

HERE = Path(__file__).resolve().parent
TESTS = str(HERE.parents[1])


pytestmark = pytest.mark.real


@contextmanager
def jobs(folder: Path, mode: str, *ranks: dict[str, str]) -> Iterator[list[Running]]:
    arguments = [str(HERE / "emergency_job.py"), str(folder / "runs"), mode]
    common = {"PYTHONPATH": TESTS, "PERFAGENT_RECORD": str(folder / "record")}
    environments = [job_environment(folder, **common, **variables) for variables in ranks]
    with started(arguments, folder / "streams", environments) as children:
        yield children


@contextmanager
def job(folder: Path, mode: str) -> Iterator[Running]:
    with jobs(folder, mode, {}) as [child]:
        yield child


def states(folder: Path) -> list[str]:
    return [str(event["state"]) for event in Recording(folder / "record").events("state") if "state" in event]


def reached(child: Running, steps: int) -> None:
    """The child has made so many steps and waits in the next one."""
    for number in range(steps + 1):
        assert child.stdout.readline().strip() == str(number)
        if number < steps:
            child.stdin.write("\n")
            child.stdin.flush()


def saved(folder: Path) -> list[tuple[int, str]]:
    return [(manifest.step, manifest.reason) for _, manifest in Folder(folder / "runs").candidates()]


@pytest.mark.parametrize("mode", ["default", pytest.param("asynchronous", marks=pytest.mark.long)])
def test_sigterm_saves_after_the_step_and_ends_the_process(tmp_path: Path, mode: str) -> None:
    with job(tmp_path, mode) as child:
        reached(child, 3)
        child.send_signal(signal.SIGTERM)
        assert child.communicate("\n").returncode == -signal.SIGTERM
    assert saved(tmp_path) == [(4, "sigterm")]
    assert small_loop(tmp_path / "runs").resume() == 4
    assert states(tmp_path)[-1] == "preempted"
    alerts = Recording(tmp_path / "record").events("alert")
    assert {told["level"] for told in alerts} <= {"info"}, "a save at SIGTERM is no trouble"


def test_the_users_own_handler_is_called_after_the_save(tmp_path: Path) -> None:
    with job(tmp_path, "handler") as child:
        reached(child, 2)
        child.send_signal(signal.SIGTERM)
        ended = child.communicate("\n")
    assert "mine 15" in ended.stdout
    assert ended.returncode == 7
    assert saved(tmp_path) == [(3, "sigterm")]


def test_a_signal_that_the_user_ignores_saves_and_goes_on(tmp_path: Path) -> None:
    with job(tmp_path, "ignored") as child:
        reached(child, 2)
        child.send_signal(signal.SIGTERM)
        ended = child.communicate("\n\nend\n")
    assert ended.returncode == 0
    assert ended.stdout.split()[:2] == ["3", "4"]
    assert saved(tmp_path) == [(3, "sigterm")]
    assert states(tmp_path)[-1] == "finished"


def test_a_second_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    with job(tmp_path, "default") as child:
        reached(child, 2)
        threads = Path(f"/proc/{child.pid}/task")
        before = len(list(threads.iterdir()))
        child.send_signal(signal.SIGTERM)
        # Its handler has run when the thread of the grace time is there: two signals before that are one to Python.
        until(lambda: len(list(threads.iterdir())) > before)
        child.send_signal(signal.SIGTERM)
        assert child.wait() == -signal.SIGTERM
    assert saved(tmp_path) == []


def test_a_step_longer_than_the_grace_time_delays_nothing(tmp_path: Path) -> None:
    with job(tmp_path, "grace") as child:
        reached(child, 2)
        child.send_signal(signal.SIGTERM)
        assert child.wait() == -signal.SIGTERM
    assert saved(tmp_path) == []
    assert states(tmp_path)[-1] == "preempted"


def test_an_uncaught_exception_saves_the_last_whole_step(tmp_path: Path) -> None:
    with job(tmp_path, "default") as child:
        reached(child, 3)
        ended = child.communicate("raise\n")
    assert ended.returncode == 1
    assert "ValueError: broken on purpose" in ended.stderr
    assert "checkpoint: of step 3" in ended.stderr
    assert saved(tmp_path) == [(3, "exception")]


def test_an_exception_within_a_step_saves_nothing(tmp_path: Path) -> None:
    with job(tmp_path, "in the step") as child:
        ended = child.communicate("\n\n\n\n")
    assert ended.returncode == 1
    assert "half-way" in ended.stderr
    assert saved(tmp_path) == []


def test_a_signal_after_the_last_step_saves_at_close(tmp_path: Path) -> None:
    with job(tmp_path, "late") as child:
        ended = child.communicate("\n\nend\n")
    assert ended.returncode == -signal.SIGTERM
    assert "closed" not in ended.stdout
    assert saved(tmp_path) == [(2, "sigterm")]
    assert states(tmp_path)[-1] == "preempted"


def test_after_close_nothing_of_ours_is_left_in_the_process(tmp_path: Path) -> None:
    with job(tmp_path, "default") as child:
        ended = child.communicate("\n\nend\n")
    assert ended.stdout.splitlines()[-1] == "closed True True"
    assert saved(tmp_path) == []


@contextmanager
def two_ranks(folder: Path, mode: str) -> Iterator[list[Running]]:
    together = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with jobs(folder, mode, *({"RANK": rank, **together} for rank in ("0", "1"))) as ranks:
        yield ranks


def test_a_signal_to_one_rank_saves_and_ends_all_at_one_step(tmp_path: Path) -> None:
    with two_ranks(tmp_path, "default") as ranks:
        for child in ranks:
            assert child.stdout.readline() == "3\n"
        ranks[1].send_signal(signal.SIGTERM)
        assert [child.wait() for child in ranks] == [-signal.SIGTERM, -signal.SIGTERM]
    [(step, reason)] = saved(tmp_path)
    assert reason == "sigterm"
    assert step > 3
    assert states(tmp_path).count("preempted") == 2


def test_an_exception_on_all_ranks_at_the_same_step_saves_it(tmp_path: Path) -> None:
    with two_ranks(tmp_path, "exception") as ranks:
        errors = [child.communicate().stderr for child in ranks]
    assert all("broken on purpose on rank" in one for one in errors)
    assert saved(tmp_path) == [(5, "exception")], errors[0][-2000:]
