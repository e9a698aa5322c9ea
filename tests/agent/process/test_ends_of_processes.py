"""A run in the life of a process: what scripts do with imports, workers, signals, exits and files, in processes of
their own."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from agent_recorded import Recording, recorded
from builders import job_environment
from whole_end import IN_A_SCRIPT

from perfagent_server.rules.causes import reason_words

pytestmark = pytest.mark.real


def run(
    folder: Path, body: str, *command: str, begin: str = IN_A_SCRIPT, **more: str
) -> subprocess.CompletedProcess[str]:
    """begin: comes before the body, but not under `perfagent run`, whose watcher writes what the end has left."""
    script = folder / "script.py"
    script.write_text(("" if command else begin) + textwrap.dedent(body), encoding="utf-8")
    environment = job_environment(folder, PERFAGENT_RECORD=str(folder / "record"), OMP_NUM_THREADS="1", **more)
    words = [sys.executable, *command, str(script)]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False)


def ends(record: Path) -> list[tuple[str, str]]:
    """(state, reason) of each run's end, in order. Nobody may be writing any more."""
    last = (source.states[-1] for source in recorded(record))
    return sorted((one["state"], reason_words(one.get("reason"))) for one in last)


# ---- workers


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_the_end_of_a_worker_process_is_told(tmp_path: Path, start: str) -> None:
    body = f"""
        import multiprocessing, sys

        def train(number):
            import perfagent
            {IN_A_SCRIPT.strip()}
            run = perfagent.init(run_id=f"worker-{{number}}")
            for step in range(50):
                run.log({{"x": step}}, step=step)
            if number == 1:
                raise ValueError("no such file")
            if number == 2:
                sys.exit(3)

        if __name__ == "__main__":
            context = multiprocessing.get_context("{start}")
            workers = [context.Process(target=train, args=(number,)) for number in range(3)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            assert [worker.exitcode for worker in workers] == [0, 1, 3]
    """
    done = run(tmp_path, body, begin="")  # each worker imports perfagent itself
    assert done.returncode == 0, done.stderr
    assert ends(tmp_path / "record") == [
        ("failed", "ValueError: no such file"),
        ("failed", "exit code 3"),
        ("finished", ""),
    ]
    assert len(Recording(tmp_path / "record").series("x")) == 150


def test_workers_that_import_the_script_anew_begin_no_runs(tmp_path: Path) -> None:
    body = """
        import multiprocessing, perfagent
        run = perfagent.init(name="top level")
        perfagent.log({"imported": 1.0})

        def square(x):
            return x * x

        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(2) as pool:
                assert pool.map(square, [2, 3]) == [4, 9]
            run.log({"x": 1.0})
    """
    done = run(tmp_path, body)
    assert (done.returncode, done.stderr) == (0, "")
    assert ends(tmp_path / "record") == [("finished", "")]


# ---- the end

WAYS = """
import atexit, sys, threading, perfagent
def leave(status):
    sys.exit(status)
def fail(error):
    raise error
class Exit(RuntimeError):
    "As click and typer have one."
def exits():
    try:
        try:
            fail(ValueError("boom"))
        except Exception:
            raise Exit(1)
    except Exit:
        sys.exit(1)
perfagent.init()
perfagent.log({"x": 1}, step=1)
"""
CAUGHT = "try:\n    {}\nexcept BaseException:\n    {}\nsys.exit(8)"
BOOM, FULL = "fail(ValueError('boom'))", "fail(MemoryError('too much'))"
ENDS = {
    "at its end": ("", "finished", ""),
    "sys.exit": ("sys.exit(3)", "failed", "exit code 3"),
    "as a shell tells SIGTERM": ("sys.exit(143)", "preempted", "exit code 143, which stands for SIGTERM"),
    "with words": ("sys.exit('no data')", "failed", "exit code 1: no data"),
    "with any object": ("import numpy; sys.exit(numpy.ones(2))", "failed", "exit code 1: [1. 1.]"),
    "well": ("sys.exit(0)", "finished", ""),
    "by an error": ("fail(ValueError('boom'))", "failed", "ValueError: boom"),
    "by a full memory": ("raise MemoryError", "oom", "MemoryError"),
    "a log at exit": ("atexit.register(lambda: perfagent.log({'x': 2}, step=2))\nsys.exit(3)", "failed", "exit code 3"),
    "caught": ("try:\n    sys.exit(2)\nexcept SystemExit:\n    pass\nperfagent.log({'x': 2}, step=9)", "finished", ""),
    "a log in finally": ("try:\n    sys.exit(3)\nfinally:\n    perfagent.log({'x': 2}, step=2)", "failed", "exit code 3"),
    "raised again": ("try:\n    sys.exit(2)\nexcept SystemExit as e:\n    held = e\n    raise", "failed", "exit code 2"),
    "in another thread": ("t = threading.Thread(target=sys.exit, args=(7,))\nt.start()\nt.join()", "finished", ""),
    # because of an exception: Hydra prints what a job raised, and calls sys.exit(1) in the handler
    "error": (CAUGHT.format(BOOM, "leave(4)"), "failed", "ValueError: boom (exit code 4)"),
    "no memory": (CAUGHT.format(FULL, "sys.exit(7)"), "oom", "MemoryError: too much (exit code 7)"),
    "no memory, in a function": (CAUGHT.format(FULL, "leave(7)"), "oom", "MemoryError: too much (exit code 7)"),
    "a way to leave, because of it": (CAUGHT.format(BOOM, "exits()"), "failed", "ValueError: boom (exit code 1)"),
    "error, and leaves well": (CAUGHT.format(BOOM, "sys.exit(0)"), "finished", ""),
    "exit, and another": (CAUGHT.format("sys.exit(2)", "sys.exit(6)"), "failed", "exit code 6"),
    "error, and goes on": (CAUGHT.format(BOOM, "perfagent.log({'x': 2}, step=2)"), "failed", "exit code 8"),
}  # fmt: skip


EACH = """
import os, sys
for number, way in enumerate({ways!r}):
    child = os.fork()  # before anything of ours is imported
    if not child:
        os.environ["PERFAGENT_RECORD"] = f"record-{{number}}"
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
{begin}
exec(way)
"""


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, int]]:
    """Where each way to leave was recorded, and the exit code."""
    folder = tmp_path_factory.mktemp("ways")
    ways = [way for way, _, _ in ENDS.values()]
    (folder / "script.py").write_text(EACH.format(ways=ways, begin=IN_A_SCRIPT + WAYS))
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=folder, env=job_environment(folder), capture_output=True, text=True, timeout=170)
    records = [folder / f"record-{number}" for number in range(len(ENDS))]
    return dict(zip(ENDS, zip(records, map(int, done.stdout.split()), strict=True), strict=True))


@pytest.mark.parametrize("case", ENDS)
def test_process_that_leaves_is_recorded_with_why(left: dict[str, tuple[Path, int]], case: str) -> None:
    record, code = left[case]
    _, state, reason = ENDS[case]
    assert ends(record) == [(state, reason)]
    expected = re.search(r"exit code (\d+)", reason)
    assert code == (int(expected[1]) if expected else int(state in ("failed", "oom"))), "as without us"
    if "boom" in reason:
        last = Recording(record).events("state")[-1]
        assert last["exception"] == "ValueError" and "in fail" in last["traceback"]


def test_ctrl_c_in_the_midst_of_the_end_loses_nothing(tmp_path: Path) -> None:
    body = """
        import perfagent
        run = perfagent.init()
        for value in range(100):
            run.log({"x": value}, step=value)
        close = run._context.close

        def interrupted():
            run._context.close = close
            raise KeyboardInterrupt

        run._context.close = interrupted
        try:
            run.finish()
        except KeyboardInterrupt:
            print("interrupted")
    """
    done = run(tmp_path, body)
    assert (done.returncode, done.stdout) == (0, "interrupted\n")
    assert ends(tmp_path / "record") == [("finished", "")]
    assert len(Recording(tmp_path / "record").series("x")) == 100


# ---- the start


def test_nothing_is_imported_once_a_run_has_started(tmp_path: Path) -> None:
    """An import of ours beside the training would take the interpreter from its first steps, and stay locked in a
    fork."""
    body = """
        import sys, time, torch
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        import perfagent
        run = perfagent.attach(model, optimizer)
        there = set(sys.modules)
        begin = time.monotonic()
        while time.monotonic() < begin + 2.0:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            run.log({"x": 1.0})
            time.sleep(0.01)
        print([name for name in set(sys.modules) - there if not name.startswith('torch.')])  # torch's profiler has one of its own
    """
    assert run(tmp_path, body, begin="").stdout.strip() == "[]"
