"""`perfagent run` beside plain Python: real processes, everything they print and how they end compared."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from builders import free_port, job_environment, until
from commands import perfagent
from ingest_server import IngestServer

from perfagent.launch.run import start
from perfagent.launch.words import as_python_takes_them
from perfagent.process import launch_options

LONG = pytest.mark.long
REAL = pytest.mark.real
ENDS = ("finished", "failed", "killed", "preempted", "oom")
PERFAGENT = [sys.executable, "-m", "perfagent", "run"]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port"]


@pytest.fixture
def server():
    with IngestServer() as running:
        yield running


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    return tmp_path / "state" / "perfagent" / "spool"


def environment(folder: Path, server: IngestServer, **more: str) -> dict[str, str]:
    """With this Python's programs found first."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return job_environment(folder, PERFAGENT_SERVER=server.url, OMP_NUM_THREADS="1", PATH=path, **more)


def ran(
    folder: Path, server: IngestServer, *words: str, command: list[str] | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*(PERFAGENT if command is None else command), *words],
        cwd=folder, env=environment(folder, server, **more), capture_output=True, text=True, timeout=170,
    )  # fmt: skip


def ended(server: IngestServer) -> str:
    """The last state that was sent, once there is a final one."""
    return until(lambda: [one for one in server.states() if one in ENDS], within_s=30, why="no final state")[-1]


SEES = """
import atexit, json, os, sys, threading
print(json.dumps({
    "argv": sys.argv, "file": __file__, "name": __name__, "package": __package__, "path": sys.path, "flags": str(sys.flags),
    "environ": {k: v for k, v in os.environ.items() if k not in ("_", "OLDPWD", "SHLVL")},
    "main": sys.modules["__main__"].__dict__ is globals(), "loader": type(__loader__).__name__, "orig": sys.orig_argv[1:],
    "sitecustomize": os.environ.get("SITE_RAN"), "warnings": sys.warnoptions,
}, sort_keys=True))
atexit.register(lambda: print("at exit", sys.modules["__main__"].SEEN.daemon))
SEEN = threading.Thread(target=print, args=("in a thread",))
SEEN.start()
SEEN.join()
try:
    print(os.waitpid(-1, os.WNOHANG))
except ChildProcessError as error:
    print(error)
"""
SCRIPTS = {
    "sees": (f"{SEES}\nraise SystemExit(7)", "failed"),
    "os-exit": ("import os; os._exit(5)", "failed"),
    "raise": ("try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('k') from e", "failed"),
    "syntax": ("def f(:\n    pass", "failed"),
    "ctrl-c": ("raise KeyboardInterrupt", "killed"),
    "sigterm": ("import os; os.kill(os.getpid(), 15)", "preempted"),
    "sigkill": ("import os; os.kill(os.getpid(), 9)", "killed"),
}


@REAL
@pytest.mark.fault
@pytest.mark.parametrize("case", SCRIPTS)
def test_a13_script_runs_and_ends_as_under_plain_python(case: str, tmp_path: Path, server: IngestServer) -> None:
    script, end = SCRIPTS[case]
    (tmp_path / "script.py").write_text(script)
    plain, ours = (ran(tmp_path, server, "script.py", "a", "--b=c", command=one) for one in ([sys.executable], None))
    assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr)
    assert ended(server) == end


@REAL
def test_exception_before_torch_is_imported_is_the_reason(tmp_path: Path, server: IngestServer) -> None:
    (tmp_path / "script.py").write_text("import missing_torch")
    ran(tmp_path, server, "script.py")
    assert ended(server) == "failed"
    (last,) = [data for data in server.events("state") if data["state"] == "failed"]
    assert (last["exception"], last["reason"]) == (
        "ModuleNotFoundError",
        "ModuleNotFoundError: No module named 'missing_torch'",
    )
    assert 'script.py", line 1' in last["traceback"]


@REAL
def test_module_of_a_package_runs_as_with_python_m(tmp_path: Path, server: IngestServer) -> None:
    """With the user's own sitecustomize, options of Python, and a local rank that a launcher puts in front."""
    for folder in ("pkg", "site"):
        (tmp_path / folder).mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import os; os.environ['SITE_RAN'] = 'yes'")
    (tmp_path / "pkg" / "__init__.py").write_text("")
    (tmp_path / "pkg" / "other.py").write_text("VALUE = 3")
    (tmp_path / "pkg" / "job.py").write_text(SEES + "\nfrom .other import VALUE; print(VALUE)")
    python, words = [sys.executable, "-O", "-W", "ignore", "-Xdev"], ("-x", "--m")
    ours = [*python, "-m", "perfagent", "--local_rank=1", "run", "-m", "pkg.job"]
    done, plain = (
        ran(tmp_path, server, *words, command=command, PYTHONPATH=str(tmp_path / "site"))
        for command in (ours, [*python, "-m", "pkg.job", "--local_rank=1"])
    )
    assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout) == (0, plain.stdout), done.stderr
    assert '"sitecustomize": "yes"' in done.stdout


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "must follow"),
        (["--name", "x"], "must follow"),
        (["./train.sh"], "./train.sh is none"),
        (["sh", "train.sh"], "sh is none"),
        (["python", "-c", "pass"], "neither nothing nor - nor -c"),
        (["python", "-I", "script.py"], "perfagent.attach()"),
        (["other/python", "script.py"], "another Python"),
    ],
)
def test_command_that_is_not_pythons_is_wrong_use(
    words: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.sh").write_text("#!/bin/sh\npython script.py\n")
    (tmp_path / "script.py").write_text("print('ran')")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "python").symlink_to(sys.executable)
    done = perfagent(tmp_path, "run", *words, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert (done.returncode, done.stdout) == (2, "")
    assert why in done.stderr


def test_python_in_front_of_a_script_is_left_out() -> None:
    assert as_python_takes_them([sys.executable, "-O", "-mjob", "a"]) == (["-O"], ["-m", "job", "a"])


def test_script_that_is_missing_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    became = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execve", lambda _, words, environ: became.append((words[-1], environ)))
    start(["missing.py"], launch_options.LaunchOptions(pid=os.getpid()))
    ((script, environ),) = became
    assert script == "missing.py", "Python says that it is missing"
    assert not launch_options.read(environ[launch_options.VARIABLE]).watched


WRITTEN = """
import threading
from perfagent import session
sender, written = session.current()._sender, threading.Event()
collector = sender.send_loop._collector
sender.add_source(lambda: sender.events or collector.waits or written.set())  # what an earlier tick took, it wrote
written.wait(60)
"""
KILL = f"{WRITTEN}\nos.kill(os.getpid(), 9)\n"
TRAIN = """
import os, sys, time, torch
while len(sys.argv) > 1 and not open(sys.argv[1]).read():
    time.sleep(0.02)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(60):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).pow(2).mean().backward()
    optimizer.step()
    time.sleep(0.01)
print("trained", flush=True)
"""


@REAL
@pytest.mark.fault
@pytest.mark.parametrize(
    ("end", "state", "reason"),
    [
        ("os.kill(os.getpid(), 9)", "killed", "SIGKILL"),
        ("os.abort()", "failed", "SIGABRT"),
    ],
    ids=["kill", "abort"],
)
def test_a13_server_learns_how_a_training_ended_and_the_rest(
    tmp_path: Path, server: IngestServer, end: str, state: str, reason: str
) -> None:
    (tmp_path / "train.py").write_text(TRAIN + WRITTEN + end)
    ran(tmp_path, server, "train.py")
    assert ended(server) == state
    (last,) = [data for data in server.events("state") if data["state"] == state]
    assert last["reason"]["signal"] == reason
    assert sorted(server.values("loss")) == list(range(1, 61))
    assert len({frame.run for frame in server.frames}) == 1


@REAL
def test_watcher_holds_neither_pipe_nor_terminal(tmp_path: Path, server: IngestServer) -> None:
    (tmp_path / "script.py").write_text("import sys; print('up', flush=True); sys.stdin.read()")
    env = environment(tmp_path, server)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([*PERFAGENT, "script.py"], cwd=tmp_path, env=env, **pipes) as process:
        assert process.stdout.readline() == "up\n"
        watcher = until(lambda: waiter_of(process.pid), why="there is no watcher")
        # an interpreter that is starting has files open for a moment
        until(lambda: open_files(watcher) == {"/dev/null", "anon_inode:[pidfd]"}, why="it holds more than it needs")
        rollup = Path(f"/proc/{watcher}/smaps_rollup").read_text().splitlines()
        assert int(next(line for line in rollup if line.startswith("Pss:")).split()[1]) <= 6 * 1024
        os.kill(watcher, signal.SIGSTOP)
        process.stdin.close()
        assert process.stdout.read() == "", "ends with the script, although the watcher lives on"
    os.kill(watcher, signal.SIGKILL)


def open_files(pid: int) -> set[str] | None:
    """None where one was closed meanwhile."""
    try:
        return {str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()}
    except OSError:
        return None


def waiter_of(pid: int) -> int | None:
    for one in psutil.process_iter(["cmdline"]):
        words = one.info["cmdline"] or []
        if any(word.endswith("launch/wait.py") for word in words) and any(word.startswith(f"{pid} ") for word in words):
            return int(one.pid)
    return None


ELSEWHERE = """
import os, time, perfagent
first = perfagent.init()
assert perfagent.attach(server=os.environ["PERFAGENT_SERVER"] + "/") is first
run = perfagent.attach({place})
assert perfagent.attach() is run and first.ended and run.id == first.id
run.log({{"x": 1.0}}, step=1)
{end}
"""
GIVEN = ["--project", "vision", "--name", "first", "--tag", "a", "--tag", "b"]


@REAL
@pytest.mark.parametrize(("more", "end"), [(["--run-id", "mine"], ""), ([], KILL)], ids=["id", "killed"])
def test_script_that_names_another_server_keeps_the_run(
    tmp_path: Path, server: IngestServer, spool: Path, more: list[str], end: str
) -> None:
    with IngestServer() as other:
        (tmp_path / "train.py").write_text(ELSEWHERE.format(place=f"server={other.url!r}, name='mine'", end=end))
        done = ran(tmp_path, server, *GIVEN, *more, "train.py")
        assert done.returncode == (-signal.SIGKILL if end else 0), done.stderr
        assert ended(other) == ("killed" if end else "finished")
        until(lambda: not list(spool.iterdir()), why="the watcher left a folder behind")
        ((project, run, name, source),) = {(f.project, f.run, f.name, f.source) for f in other.frames}
        assert (project, name) == ("vision", "mine"), "the script's name wins over the command's"
        assert other.events("state")[0]["tags"] == ["a", "b"]
        assert other.values("x") == {1: 1.0}
    assert server.states() == ["starting", "finished"]
    assert {frame.run for frame in server.frames} == {run}
    assert run == "mine" or not more
    assert source not in {frame.source for frame in server.frames}
    assert not server.values("x")


DDP = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(20):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).pow(2).mean().backward()
    optimizer.step()
    time.sleep(0.01)
dist.destroy_process_group()
"""


@REAL
@pytest.mark.parametrize("form", ["inside", pytest.param("outside", marks=LONG)])
def test_all_ranks_of_a_torchrun_job_are_one_run(tmp_path: Path, server: IngestServer, form: str) -> None:
    (tmp_path / "ddp.py").write_text(DDP)
    torchrun = [*TORCHRUN, str(free_port())]
    if form == "inside":
        done = ran(tmp_path, server, *torchrun, "-m", "perfagent", "run", "ddp.py", command=[sys.executable])
    else:
        done = ran(tmp_path, server, "torchrun", *torchrun[2:], "ddp.py")
    assert done.returncode == 0, done.stderr[-2000:]
    until(lambda: len(server.sources_that("finished")) == 2, within_s=30)
    assert len({(frame.run, frame.attempt) for frame in server.frames}) == 1
    assert {frame.rank for frame in server.frames} == {0, 1}
    for source in {frame.source for frame in server.frames}:
        assert sorted(server.values("loss", source=source)) == list(range(1, 21))
    speaks = {frame.rank for frame in server.frames for group in frame.groups if "host/load1" in group.values}
    assert speaks == {0}


def opened(folder: Path, script: str, server: IngestServer, heard: Any) -> None:
    """Runs a script that waits for a file to have words, which it gets once the server has heard of it."""
    (folder / "train.py").write_text(script)
    gate = folder / "gate"
    gate.write_text("")
    process = subprocess.Popen([*PERFAGENT, "train.py", str(gate)], cwd=folder, env=environment(folder, server))
    try:
        until(heard, within_s=60, why="nobody spoke for the script")
    finally:
        gate.write_text("go")
        process.wait(150)
    assert ended(server) == "finished"


@REAL
def test_one_start_is_one_attempt_however_long_imports_take(tmp_path: Path, server: IngestServer, spool: Path) -> None:
    """Before torch is there, the watcher speaks for the script."""
    late = TRAIN.replace(", torch\n", "\n").replace("model =", "import torch\nmodel =", 1)
    opened(tmp_path, late, server, lambda: "running" in server.states())
    assert len({(frame.run, frame.attempt, frame.source) for frame in server.frames}) == 1
    assert sorted(server.values("loss")) == list(range(1, 61))
    until(lambda: not list(spool.iterdir()), why="the watcher left a folder behind")


DRIVER = """
import subprocess, sys
waits = "import sys, time\\nwhile not open(sys.argv[1]).read():\\n    time.sleep(0.02)"
subprocess.run([sys.executable, "-c", waits, sys.argv[1]])
"""


@REAL
def test_run_without_a_step_reports_the_processes_it_started(tmp_path: Path, server: IngestServer) -> None:
    opened(tmp_path, DRIVER, server, server.states)
    (alert,) = server.events("alert")
    assert (alert["level"], alert["unrecorded"]) == ("info", 1)


SPAWNED = """
import sys, torch, torch.distributed as dist, torch.multiprocessing as mp
import perfagent

def rank_of(rank, port):
    {before}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{{port}}", rank=rank, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.ones(20, 4), num_workers=1, multiprocessing_context="spawn")
    for batch in loader:
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        optimizer.step()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(rank_of, args=(int(sys.argv[1]),), nprocs=2)
"""


@LONG
@pytest.mark.parametrize("before", ["", "perfagent.attach()"])
def test_ranks_that_a_script_spawns_are_ranks_of_its_run(tmp_path: Path, server: IngestServer, before: str) -> None:
    (tmp_path / "train.py").write_text(SPAWNED.format(before=before))
    done = ran(tmp_path, server, "train.py", str(free_port()))
    assert done.returncode == 0, done.stderr[-2000:]
    until(lambda: len(server.sources_that("finished")) == 3, within_s=30)
    assert len({(frame.run, frame.attempt) for frame in server.frames}) == 1
    trained = [source for source in {frame.source for frame in server.frames} if server.values("loss", source=source)]
    assert {frame.rank for frame in server.frames if frame.source in trained} == {0, 1}
    assert len(trained) == 2
    assert all(sorted(server.values("loss", source=source)) == list(range(1, 21)) for source in trained)
