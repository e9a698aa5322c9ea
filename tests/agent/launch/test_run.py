"""`perfagent run` beside plain Python: real processes, everything they print and how they end compared."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_recorded import Recording
from builders import free_port, job_environment, until
from ingest_server import IngestServer, Scripted
from whole_end import IN_A_SCRIPT

from perfagent import launch_options
from perfagent.launch.run import start

LONG = pytest.mark.long
ENDS = ("finished", "failed", "killed", "preempted", "oom")
PERFAGENT = [sys.executable, "-m", "perfagent", "run"]


@pytest.fixture
def server() -> Iterator[IngestServer]:
    with IngestServer() as running:
        yield running


def environment(folder: Path, server: IngestServer | str, **more: str) -> dict[str, str]:
    url = server if isinstance(server, str) else server.url
    return job_environment(folder, PERFAGENT_SERVER=url, OMP_NUM_THREADS="1", **more)


def ended(server: IngestServer) -> str:
    """The last state that was told, once there is a final one and nothing is left to send."""
    return str(
        until(
            lambda: next((s for s in reversed(server.states()) if s in ENDS), None), within_s=30, why="no final state"
        )
    )


SEES = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv, "file": __file__, "name": __name__, "package": __package__, "path": sys.path, "flags": str(sys.flags),
    "environ": {k: v for k, v in os.environ.items() if k not in ("_", "OLDPWD", "SHLVL")},
    "main": sys.modules["__main__"].__dict__ is globals(), "loader": type(__loader__).__name__, "orig": sys.orig_argv[1:],
    "sitecustomize": os.environ.get("SITE_RAN"), "warnings": sys.warnoptions,
}, sort_keys=True))
"""
MATRIX = {
    "end": "print('x')",
    "exit-0": "import sys; sys.exit(0)",
    "exit-3": "import sys; sys.exit(3)",
    "exit-text": "import sys; sys.exit('why')",
    "os-exit": "import os; os._exit(5)",
    "raise": "def f():\n    raise ValueError('no')\nf()",
    "chain": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('k') from e",
    "group": "raise ExceptionGroup('g', [ValueError('a'), TypeError('b')])",
    "syntax": "def f(:\n    pass",
    "ctrl-c": "raise KeyboardInterrupt",
    "sigterm": "import os; os.kill(os.getpid(), 15)",
    "sigkill": "import os; os.kill(os.getpid(), 9)",
    "abort": "import os; os.abort()",
    "atexit": "import atexit, sys; x = 1; atexit.register(lambda: print(sys.modules['__main__'].x))",
    "threads": "import threading; t = threading.Thread(target=lambda: print('t')); t.start(); t.join(); raise SystemExit(7)",
    "sees": SEES,
    "children": "import os\ntry:\n    print(os.waitpid(-1, os.WNOHANG))\nexcept ChildProcessError as e:\n    print(e)",
}


@pytest.mark.fault
@pytest.mark.parametrize("case", MATRIX)
def test_a13_a_script_sees_and_says_and_ends_the_same_as_under_plain_python(
    case: str, tmp_path: Path, server: IngestServer
) -> None:
    (tmp_path / "script.py").write_text(MATRIX[case])
    env = environment(tmp_path, server)
    plain, ours = (
        subprocess.run([*command, "script.py", "a", "--b=c"], cwd=tmp_path, env=env, capture_output=True, timeout=60)
        for command in ([sys.executable], PERFAGENT)
    )
    assert ours.returncode == plain.returncode
    assert ours.stdout == plain.stdout
    assert ours.stderr == plain.stderr
    expected = {0: "finished", -9: "killed", -6: "killed", -15: "preempted", -2: "killed"}.get(
        plain.returncode, "failed"
    )
    assert ended(server) == expected


def test_modules_and_packages_run_as_with_python_m(tmp_path: Path, server: IngestServer) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "other.py").write_text("VALUE = 3")
    (package / "job.py").write_text(SEES + "\nfrom .other import VALUE; print(VALUE)")
    env = environment(tmp_path, server)
    plain, ours = (
        subprocess.run([*command, "-m", "pkg.job", "-x", "--m"], cwd=tmp_path, env=env, capture_output=True, timeout=60)
        for command in ([sys.executable], PERFAGENT)
    )
    assert (ours.returncode, ours.stderr) == (0, b"")
    assert ours.stdout == plain.stdout


@pytest.mark.parametrize(
    ("words", "stem"), [(["broken.py"], "broken"), (["-m", "pkg.broken"], "broken"), (["-m", "pkg"], "pkg")]
)
def test_a_script_that_python_cannot_run_has_a_name_all_the_same(
    words: list[str], stem: str, tmp_path: Path, server: IngestServer
) -> None:
    (tmp_path / "pkg").mkdir()
    for place in ("broken.py", "pkg/broken.py", "pkg/__main__.py", "pkg/__init__.py"):
        (tmp_path / place).write_text("" if "init" in place else "def f(:\n    pass")
    done = subprocess.run(
        [*PERFAGENT, *words], cwd=tmp_path, env=environment(tmp_path, server), capture_output=True, timeout=60
    )
    assert done.returncode == 1
    assert ended(server) == "failed"
    (run,) = {frame.run for frame in server.frames}
    assert {data["name"] for data in server.events("state") if "name" in data} == {f"{stem}-{run[:4]}"}


@pytest.mark.parametrize("words", [["missing.py"], ["-m", "missing_module"]])
def test_what_is_missing_is_told_by_python_itself(words: list[str], tmp_path: Path, server: IngestServer) -> None:
    env = environment(tmp_path, server)
    plain, ours = (
        subprocess.run([*command, *words], cwd=tmp_path, env=env, capture_output=True, timeout=60)
        for command in ([sys.executable], PERFAGENT)
    )
    assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr)


def test_the_users_own_sitecustomize_and_python_path_are_kept(tmp_path: Path, server: IngestServer) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import os; os.environ['SITE_RAN'] = 'yes'")
    (tmp_path / "script.py").write_text(SEES)
    env = environment(tmp_path, server, PYTHONPATH=str(site))
    plain, ours = (
        subprocess.run([*command, "script.py"], cwd=tmp_path, env=env, capture_output=True, timeout=60)
        for command in ([sys.executable], PERFAGENT)
    )
    assert b'"sitecustomize": "yes"' in plain.stdout
    assert ours.stdout == plain.stdout
    (site / "sitecustomize.py").write_text("raise RuntimeError('theirs')")
    plain, ours = (
        subprocess.run([*command, "script.py"], cwd=tmp_path, env=env, capture_output=True, timeout=60)
        for command in ([sys.executable], PERFAGENT)
    )
    assert b"theirs" in plain.stderr
    # twice: the interpreter that ran `perfagent run` has met it too, before it became the script's
    assert (ours.stdout, ours.stderr) == (plain.stdout, 2 * plain.stderr)


def test_python_options_are_passed_on(tmp_path: Path, server: IngestServer) -> None:
    (tmp_path / "script.py").write_text(
        "import sys; print(sys.flags.optimize, sys.flags.unbuffered, sys.warnoptions, sys._xoptions)"
    )
    env = environment(tmp_path, server)
    env.pop("PYTHONUNBUFFERED")
    flags = ["-O", "-u", "-W", "ignore", "-Xdev"]
    plain = subprocess.run(
        [sys.executable, *flags, "script.py"], cwd=tmp_path, env=env, capture_output=True, timeout=60
    )
    ours = subprocess.run(
        [sys.executable, *flags, "-m", "perfagent", "run", "script.py"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        timeout=60,
    )
    assert ours.stdout == plain.stdout


def test_a_leading_local_rank_is_passed_on_to_the_script(tmp_path: Path, server: IngestServer) -> None:
    (tmp_path / "script.py").write_text("import sys; print(sys.argv[1:])")
    command = [sys.executable, "-m", "perfagent", "--local_rank=1", "run", "script.py", "--lr", "1"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(tmp_path, server), capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "['--local_rank=1', '--lr', '1']\n"


@pytest.mark.parametrize("words", [[], ["-m"], ["--name", "x"]])
def test_nothing_to_run_is_wrong_use(words: list[str], tmp_path: Path) -> None:
    done = subprocess.run([*PERFAGENT, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "must follow" in done.stderr


SHELL = "#!/bin/sh\npython script.py\n"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["./train.sh"], "./train.sh is run by sh"),
        (["sh", "train.sh"], "sh is a program of its own"),
        (["python", "-c", "pass"], "neither nothing nor - nor -c"),
        (["python", "-I", "script.py"], "perfagent.attach()"),
        (["other/python", "script.py"], "another Python"),
    ],
)
def test_a_command_that_is_not_pythons_is_wrong_use_and_no_run(
    words: list[str], why: str, tmp_path: Path, server: IngestServer
) -> None:
    (tmp_path / "train.sh").write_text(SHELL)
    (tmp_path / "script.py").write_text("print('ran')")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "python").symlink_to(sys.executable)
    env = environment(tmp_path, server, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    done = subprocess.run([*PERFAGENT, *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert why in done.stderr
    assert done.stdout == ""
    assert server.frames == []


@pytest.mark.parametrize(
    "words", [["python", "-O", "script.py"], ["python3", "-O", "-m", "script"], [sys.executable, "-O", "script.py"]]
)
def test_a_command_that_is_python_is_what_it_starts(words: list[str], tmp_path: Path, server: IngestServer) -> None:
    (tmp_path / "script.py").write_text("import sys; print(sys.argv[1:], sys.flags.optimize)")
    env = environment(tmp_path, server, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    done = subprocess.run(
        [*PERFAGENT, *words, "a", "-m"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "['a', '-m'] 1\n"), done.stderr


def test_a_script_that_is_not_there_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    became = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execve", lambda _, words, environ: became.append((words[-1], environ)))
    start(["missing.py"])
    ((script, environ),) = became
    assert script == "missing.py", "Python says that it is missing"
    assert not launch_options.read(environ[launch_options.VARIABLE]).watched, "and nobody tells of a run that failed"


def test_isolated_python_is_refused_with_the_way_out(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-m", "perfagent", "run", "x.py"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "perfagent.attach()" in done.stderr


WRITTEN = """
import threading
from perfagent import session
sender, written = session.current()._sender, threading.Event()
collector = sender.dispatcher._collector
sender.add_source(lambda: sender.events or collector.waits or written.set())  # what an earlier tick took, it wrote
written.wait(60)
"""
KILL = f"{WRITTEN}\nos.kill(os.getpid(), 9)\n"
TRAIN = """
import os, sys, time, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(60):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).pow(2).mean().backward()
    optimizer.step()
    time.sleep(0.01)
print("trained", flush=True)
{end}
"""


def test_a_training_script_is_a_run_with_all_its_steps(tmp_path: Path, server: IngestServer) -> None:
    (tmp_path / "train.py").write_text(TRAIN.format(end=""))
    command = [
        *PERFAGENT,
        "--project",
        "vision",
        "--name",
        "first",
        "--tag",
        "a",
        "--tag",
        "b",
        "--run-id",
        "mine",
        "train.py",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(tmp_path, server), capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", "")
    assert ended(server) == "finished"
    assert sorted(server.values("loss")) == list(range(1, 61))
    assert {(f.project, f.run, f.name) for f in server.frames} == {("vision", "mine", "first")}
    assert server.events("state")[0]["tags"] == ["a", "b"]
    spool = tmp_path / "state" / "perfagent" / "spool"
    until(lambda: not list(spool.iterdir()), why="the watcher left the folder behind")


@pytest.mark.long
def test_a_script_that_begins_to_train_late_and_ends_soon_leaves_no_folder(
    tmp_path: Path, server: IngestServer
) -> None:
    """By then the watcher has spoken for it, with numbers beyond those of the script's frames."""
    (tmp_path / "train.py").write_text("import time\ntime.sleep(6)\n" + TRAIN.format(end=""))
    done = subprocess.run(
        [*PERFAGENT, "train.py"], cwd=tmp_path, env=environment(tmp_path, server), capture_output=True, timeout=120
    )
    assert done.returncode == 0
    assert ended(server) == "finished"
    first, *rest = server.frames
    assert {frame.source for frame in rest} == {first.source}
    assert first.seq > max(frame.seq for frame in rest), "no watcher has spoken"
    spool = tmp_path / "state" / "perfagent" / "spool"
    until(lambda: not list(spool.iterdir()), why="the watcher left a folder behind")


@pytest.mark.fault
@pytest.mark.parametrize(
    ("end", "state", "reason"),
    [
        ("os.kill(os.getpid(), 9)", "killed", "SIGKILL"),
        pytest.param("os.kill(os.getpid(), 15)", "preempted", "SIGTERM", marks=LONG),
        pytest.param("os.kill(os.getpid(), 11)", "killed", "SIGSEGV", marks=LONG),
        pytest.param("os._exit(143)", "preempted", "SIGTERM", marks=LONG),
        pytest.param("os._exit(7)", "failed", "exit code 7", marks=LONG),
        pytest.param("sys.exit(7)", "failed", "exit code 7", marks=LONG),
        pytest.param("raise ValueError('broken')", "failed", "ValueError: broken", marks=LONG),
    ],
    ids=["kill", "term", "segv", "_exit-term", "_exit", "exit", "raise"],
)
def test_a13_however_a_training_ends_the_server_learns_the_truth_and_gets_the_rest(
    tmp_path: Path, server: IngestServer, end: str, state: str, reason: str
) -> None:
    (tmp_path / "train.py").write_text(TRAIN.format(end=WRITTEN + end))
    env = environment(tmp_path, server)
    subprocess.run([*PERFAGENT, "train.py"], cwd=tmp_path, env=env, capture_output=True, timeout=120)
    assert ended(server) == state
    (last,) = [data for data in server.events("state") if data["state"] == state]
    assert reason in last["reason"]
    assert sorted(server.values("loss")) == list(range(1, 61))
    assert len({frame.run for frame in server.frames}) == 1


def test_an_end_has_its_own_time_however_long_the_watcher_takes_to_load(tmp_path: Path, server: IngestServer) -> None:
    """By it the server tells which of several ranks was the first: the others fail some milliseconds later."""
    (tmp_path / "site").mkdir()
    says = f"print(time.time(), file=open({str(tmp_path / 'loads')!r}, 'w'))"
    loads = f"import sys, time\nif 'perfagent.launch.watcher' in sys.orig_argv: {says}\n"
    (tmp_path / "site" / "sitecustomize.py").write_text(loads)
    (tmp_path / "train.py").write_text("import os, time\nprint(time.time(), flush=True)\nos._exit(7)\n")
    env = environment(tmp_path, server)
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path / "site"), env.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run([*PERFAGENT, "train.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert ended(server) == "failed"
    (told,) = [event for f in server.stored.values() for event in f.events if event.data.get("state") == "failed"]
    end, loaded = float(done.stdout.split()[-1]), float((tmp_path / "loads").read_text())
    assert end <= told.time
    assert told.time <= loaded or loaded < end, "after 5 s without a session it loads before the end"


@pytest.mark.parametrize("leaves", [False, pytest.param(True, marks=LONG)], ids=["while it runs", "until it leaves"])
def test_the_watcher_holds_neither_pipe_nor_terminal_and_leaves_without_a_server(tmp_path: Path, leaves: bool) -> None:
    (tmp_path / "script.py").write_text("import sys; print('up', flush=True); sys.stdin.read()")
    env = environment(tmp_path, f"http://127.0.0.1:{free_port()}")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([*PERFAGENT, "script.py"], cwd=tmp_path, env=env, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        watcher = until(lambda: waiter_of(process.pid), why="there is no watcher")
        # an interpreter that is starting has files open for a moment
        until(lambda: open_files(watcher) == {"/dev/null", "anon_inode:[pidfd]"}, why="it holds more than it needs")
        rollup = Path(f"/proc/{watcher}/smaps_rollup").read_text().splitlines()
        assert int(next(line for line in rollup if line.startswith("Pss:")).split()[1]) <= 6 * 1024
        process.stdin.close()
        assert process.stdout.read() == ""  # ends with the script, although the watcher lives on
    if not leaves:  # that takes it 20 seconds
        os.kill(watcher, signal.SIGKILL)
        return
    began = time.monotonic()
    until(lambda: not Path(f"/proc/{watcher}").exists(), within_s=25, why="the watcher never gave up")
    assert time.monotonic() - began <= 22
    assert list((tmp_path / "state" / "perfagent" / "spool").iterdir())


def open_files(pid: int) -> set[str] | None:
    """None where one was closed meanwhile."""
    try:
        return {str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()}
    except OSError:
        return None


def waiter_of(pid: int) -> int | None:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if any(word.endswith(b"launch/wait.py") for word in words) and any(
            word.split(b" ")[0] == str(pid).encode() for word in words
        ):
            return int(path.parent.name)
    return None


@pytest.mark.long
def test_recorded_runs_are_complete_and_sync_again_stores_nothing_twice(tmp_path: Path, server: IngestServer) -> None:
    (tmp_path / "train.py").write_text(
        TRAIN.format(end="os.kill(os.getpid(), signal.SIGKILL)").replace("import os,", "import os, signal,")
    )
    env = environment(tmp_path, server)
    command = [*PERFAGENT, "--record", "records", "train.py"]
    assert (
        subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, timeout=120).returncode == -signal.SIGKILL
    )
    assert server.frames == []
    until(lambda: list((tmp_path / "records").glob("*/*.frames")), why="the watcher never wrote the end")
    for _ in range(2):
        sync = [sys.executable, "-m", "perfagent", "sync", "records"]
        done = until(
            lambda sync=sync: (
                (
                    r := subprocess.run(sync, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
                ).returncode
                == 0
                and "skipped" not in r.stdout
                and r
            ),
            why="sync never succeeded",
        )
        assert done.stderr == ""
    stored = sorted(server.values("loss"))
    assert stored == list(range(1, len(stored) + 1))
    assert len(stored) >= 30  # the kill came right after the last step: at most the last tick's rows are missing
    assert server.states()[-1] == "killed"
    assert {(frame.source, frame.seq) for frame in server.frames} == set(server.stored), (
        "the same frames under the same numbers"
    )
    assert "nothing new for this server" in done.stdout


def test_runs_one_after_the_other_in_one_script_are_runs_of_their_own(tmp_path: Path, server: IngestServer) -> None:
    (tmp_path / "sweep.py").write_text(
        "import perfagent\nfor lr in range(3):\n    with perfagent.init(name=f'lr {lr}') as run:\n        run.log({'lr': lr})\n"
    )
    env = environment(tmp_path, server)
    done = subprocess.run([*PERFAGENT, "sweep.py"], cwd=tmp_path, env=env, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    until(lambda: len({frame.run for frame in server.frames}) == 3)


def test_of_runs_one_after_the_other_only_the_last_ends_with_its_process(tmp_path: Path, server: IngestServer) -> None:
    (tmp_path / "sweep.py").write_text(
        "import os, time, perfagent\nfor lr in range(4):\n    with perfagent.init(name=f'lr {lr}') as run:\n"
        "        run.log({'lr': lr})\nperfagent.init(name='last')\n" + KILL
    )
    subprocess.run(
        [*PERFAGENT, "sweep.py"], cwd=tmp_path, env=environment(tmp_path, server), capture_output=True, timeout=120
    )
    until(lambda: "killed" in server.states(), within_s=30, why="the watcher never told the end")
    killed = [f for f in server.stored.values() for event in f.events if event.data.get("state") == "killed"]
    assert [frame.name for frame in killed] == ["last"]
    spool = tmp_path / "state" / "perfagent" / "spool"
    until(lambda: not list(spool.iterdir()), why="the watcher left a folder behind")


LOOK = """
import os, time, perfagent
run = perfagent.attach(project="look", name="mine")
run.log({"x": 1.0}, step=1)
assert run.settings.project == "look"
"""


@pytest.mark.parametrize("end", ["", KILL], ids=["end", "kill"])
def test_the_scripts_project_and_name_win_over_the_commands(tmp_path: Path, end: str) -> None:
    (tmp_path / "train.py").write_text(LOOK + end)
    away = [True] if end else []  # what a killed script has not sent is sent by the watcher
    command = [*PERFAGENT, "--project", "vision", "--name", "first", "train.py"]
    with IngestServer(rule=lambda _: Scripted(status=503) if away else None) as server:
        subprocess.run(command, cwd=tmp_path, env=environment(tmp_path, server), capture_output=True, timeout=120)
        away.clear()
        assert ended(server) == ("killed" if end else "finished")
        frames = sorted(server.stored.values(), key=lambda frame: frame.seq)
    said = [any(event.data.get("name") == "mine" for event in frame.events) for frame in frames]
    assert {(frame.project, frame.name) for frame in frames[said.index(True) :]} == {("look", "mine")}
    assert len({frame.source for frame in frames}) == 1


def test_the_next_name_is_the_next_run_as_without_perfagent_run(tmp_path: Path, server: IngestServer) -> None:
    (tmp_path / "sweep.py").write_text(
        "import perfagent\nruns = {perfagent.init(name=f'lr {lr}').id for lr in range(3)}\nprint(len(runs))\n"
    )
    done = subprocess.run(
        [*PERFAGENT, "sweep.py"],
        cwd=tmp_path,
        env=environment(tmp_path, server),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "3\n", done.stderr
    until(lambda: len({frame.run for frame in server.frames}) == 3)


@pytest.mark.parametrize(("way", "end"), [("option", KILL), ("variable", "")], ids=["option-kill", "variable-end"])
def test_the_scripts_project_and_name_are_those_of_a_recording(
    tmp_path: Path, server: IngestServer, way: str, end: str
) -> None:
    (tmp_path / "train.py").write_text(LOOK + end)
    records = tmp_path / "records"
    options, variables = (["--record", "records"], {}) if way == "option" else ([], {"PERFAGENT_RECORD": str(records)})
    command = [*PERFAGENT, "--name", "first", *options, "train.py"]
    env = environment(tmp_path, server, **variables)
    subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, timeout=120)
    until(lambda: list(records.glob("*/*.frames")), why="the watcher never wrote the end")
    sync = [sys.executable, "-m", "perfagent", "sync", "records"]

    def sent() -> bool:
        done = subprocess.run(sync, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
        return done.returncode == 0 and "skipped" not in done.stdout

    until(sent, why="sync never succeeded")
    assert server.states()[-1] == ("killed" if end else "finished")
    assert {(frame.project, frame.name) for frame in server.frames} == {("look", "mine")}


def test_a_project_that_cannot_be_one_is_refused_as_without_perfagent_run(tmp_path: Path, server: IngestServer) -> None:
    (tmp_path / "script.py").write_text(
        # Only without `perfagent run` does a job warn of frames that the server has not acknowledged in time.
        IN_A_SCRIPT
        + """
import perfagent
for project in ("", "a\\nb", 3):
    try:
        perfagent.attach(project=project)
    except perfagent.ConfigError as error:
        print(error)
perfagent.init().log({"x": 1.0}, step=1)
"""
    )
    env = environment(tmp_path, server)
    plain, ours = (
        subprocess.run([*command, "script.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
        for command in ([sys.executable], PERFAGENT)
    )
    assert plain.stdout.count("project") >= 3
    assert (ours.returncode, ours.stdout, ours.stderr) == (0, plain.stdout, plain.stderr)
    assert {frame.project for frame in server.frames} == {"default"}


ELSEWHERE = """
import os, time, perfagent
first = perfagent.init()
assert perfagent.attach(server=os.environ["PERFAGENT_SERVER"] + "/") is first
run = perfagent.attach({place})
assert perfagent.attach() is run and first.ended and run.id == first.id
run.log({{"x": 1.0}}, step=1)
{end}
"""
TOLD = ["--project", "vision", "--name", "first", "--tag", "a"]


@pytest.mark.parametrize(
    ("named", "end"),
    [
        ("option", ""),
        ("drawn", KILL),
        *(
            pytest.param(*case, marks=LONG)
            for case in (("option", KILL), ("variable", ""), ("variable", KILL), ("drawn", ""))
        ),
    ],
)
def test_a_script_that_names_another_server_has_the_commands_run_there(
    tmp_path: Path, server: IngestServer, named: str, end: str
) -> None:
    with IngestServer() as other:
        (tmp_path / "train.py").write_text(ELSEWHERE.format(place=f"server={other.url!r}", end=end))
        command = [*PERFAGENT, *TOLD, *(["--run-id", "mine"] if named == "option" else []), "train.py"]
        env = environment(tmp_path, server, **({"PERFAGENT_RUN_ID": "mine"} if named == "variable" else {}))
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == (-signal.SIGKILL if end else 0), done.stderr
        assert ended(other) == ("killed" if end else "finished")
        spool = tmp_path / "state" / "perfagent" / "spool"
        until(lambda: not list(spool.iterdir()), why="the watcher left a folder behind")
        ((project, run, name, source),) = {(f.project, f.run, f.name, f.source) for f in other.frames}
        assert (project, name) == ("vision", "first")
        assert other.events("state")[0]["tags"] == ["a"]
        assert other.values("x") == {1: 1.0}
    assert server.states() == ["starting", "finished"]
    assert {frame.run for frame in server.frames} == {run}
    assert run == "mine" or named == "drawn"
    assert source not in {frame.source for frame in server.frames}
    assert not server.values("x")


def test_a_script_that_names_a_folder_is_recorded_there_to_its_end(tmp_path: Path, server: IngestServer) -> None:
    (tmp_path / "train.py").write_text(ELSEWHERE.format(place="record='records'", end=KILL))
    env = environment(tmp_path, server)
    subprocess.run([*PERFAGENT, *TOLD, "train.py"], cwd=tmp_path, env=env, capture_output=True, timeout=120)
    spool = tmp_path / "state" / "perfagent" / "spool"
    until(lambda: not list(spool.iterdir()), why="the watcher left a folder behind")
    recorded = Recording(tmp_path / "records")
    states = recorded.events("state")
    assert recorded.series("x") == [(1, 1.0)]
    assert (states[0]["name"], states[0]["tags"], states[-1]["state"]) == ("first", ["a"], "killed")
    assert server.states() == ["starting", "finished"]


def test_the_next_run_of_a_script_that_went_elsewhere_is_a_run_of_its_own(tmp_path: Path, server: IngestServer) -> None:
    with IngestServer() as other:
        (tmp_path / "sweep.py").write_text(
            f"import perfagent\nfor lr in range(3):\n    with perfagent.init(server={other.url!r}) as run:\n"
            "        run.log({'lr': lr})\n"
        )
        done = subprocess.run(
            [*PERFAGENT, "sweep.py"], cwd=tmp_path, env=environment(tmp_path, server), capture_output=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        until(lambda: len({frame.run for frame in other.frames}) == 3)
        runs = {frame.run for frame in other.frames}
        assert {frame.run for frame in server.frames} < runs


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


KILLED = """
    time.sleep(0.05)
    if os.environ["RANK"] == "1" and step == 4:
        time.sleep(1)  # it is in the spool
        os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("form", [pytest.param("no-python", marks=LONG), "module", pytest.param("outside", marks=LONG)])
def test_all_ranks_of_a_torchrun_job_are_one_run(tmp_path: Path, server: IngestServer, form: str) -> None:
    (tmp_path / "ddp.py").write_text(DDP)
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--master_port",
        str(free_port()),
    ]
    command = {
        "no-python": [*torchrun, "--no-python", *PERFAGENT, "ddp.py"],
        "module": [*torchrun, "-m", "perfagent", "run", "ddp.py"],
        "outside": [*PERFAGENT, "torchrun", *torchrun[3:], "ddp.py"],
    }[form]
    env = environment(tmp_path, server, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-2000:]
    until(lambda: len(server.sources_that("finished")) == 2, within_s=30)
    assert len({(frame.run, frame.attempt) for frame in server.frames}) == 1
    assert {frame.rank for frame in server.frames} == {0, 1}
    for source in {frame.source for frame in server.frames}:
        assert sorted(server.values("loss", source=source)) == list(range(1, 21))
    speaks = {frame.rank for frame in server.frames for group in frame.groups if "host/load1" in group.values}
    assert speaks == {0}


@pytest.mark.long
@pytest.mark.parametrize("form", ["inside", pytest.param("outside", marks=LONG)])
def test_how_a_rank_was_killed_is_told_under_a_launcher(tmp_path: Path, server: IngestServer, form: str) -> None:
    """Rank 0 waits for rank 1, which is gone, and torchrun terminates it: the run's end is the first one's."""
    (tmp_path / "ddp.py").write_text(DDP.replace("    time.sleep(0.01)", KILLED))
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())]
    inside = [sys.executable, *torchrun, "-m", "perfagent", "run", "ddp.py"]
    command = inside if form == "inside" else [*PERFAGENT, *torchrun, "ddp.py"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment(tmp_path, server),
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 1
    until(lambda: "killed" in server.states(), within_s=30, why="nobody told that rank 1 was killed")
    (source,) = {frame.source for frame in server.frames if frame.rank == 1}
    assert sorted(server.values("loss", source=source)) == list(range(1, 6)), "what was measured until then"


@LONG
def test_all_ranks_that_name_another_server_are_one_run_there(tmp_path: Path, server: IngestServer) -> None:
    with IngestServer() as other:
        (tmp_path / "ddp.py").write_text(
            DDP + f"\nimport perfagent\nperfagent.attach(server={other.url!r})\ntime.sleep(1.0)\n"
        )
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc_per_node",
            "2",
            "--master_port",
            str(free_port()),
        ]
        command = [*torchrun, "-m", "perfagent", "run", *TOLD, "ddp.py"]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment(tmp_path, server), capture_output=True, text=True, timeout=170
        )
        assert done.returncode == 0, done.stderr[-2000:]
        until(lambda: len(other.sources_that("finished")) == 2, within_s=30)
        assert len({(frame.run, frame.attempt) for frame in other.frames}) == 1
        assert {frame.run for frame in other.frames} == {frame.run for frame in server.frames}
        assert {(frame.rank, frame.project, frame.name) for frame in other.frames} == {
            (r, "vision", "first") for r in (0, 1)
        }


def test_one_start_is_one_attempt_however_long_the_imports_take(tmp_path: Path, server: IngestServer) -> None:
    """Before torch is there, the watcher speaks for the script."""
    (tmp_path / "train.py").write_text(
        """
import sys, time
while not open(sys.argv[1]).read():
    time.sleep(0.02)
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""
    )
    gate = tmp_path / "gate"
    gate.write_text("")
    process = subprocess.Popen([*PERFAGENT, "train.py", str(gate)], cwd=tmp_path, env=environment(tmp_path, server))
    try:
        until(lambda: "running" in server.states(), within_s=60, why="the watcher never spoke")
    finally:
        gate.write_text("go")
        process.wait(60)
    assert ended(server) == "finished"
    assert len({(frame.run, frame.attempt, frame.source) for frame in server.frames}) == 1
    assert sorted(server.values("loss")) == list(range(1, 11))


WAITS = "while not open(sys.argv[1]).read():\n    time.sleep(0.02)\n"
DRIVER = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {"import sys, time" + chr(10) + WAITS!r}, sys.argv[1]])
"""
FORKS = f"""
import multiprocessing, sys, time, torch
{WAITS}
child = multiprocessing.get_context("fork").Process(target=print)
child.start()
child.join()
"""


def alert_of_driver(script: str, folder: Path, server: IngestServer) -> dict[str, Any]:
    """Runs a script that starts other processes, and lets them end once the server has heard of it."""
    (folder / "train.py").write_text(script)
    gate = folder / "gate"
    gate.write_text("")
    process = subprocess.Popen([*PERFAGENT, "train.py", str(gate)], cwd=folder, env=environment(folder, server))
    try:
        until(server.states, within_s=60, why="nobody spoke for the script")
    finally:
        gate.write_text("go")
        process.wait(60)
    assert ended(server) == "finished"
    (alert,) = server.events("alert")
    return alert


@pytest.mark.parametrize("script", [DRIVER, FORKS], ids=["driver", "forks"])
def test_a_run_without_a_step_tells_of_the_processes_that_it_started(
    script: str, tmp_path: Path, server: IngestServer
) -> None:
    alert = alert_of_driver(script, tmp_path, server)
    assert alert["level"] == "info"
    assert "another process" in alert["title"]


KNOWS_HOW_OTHERS_END = tuple(map(int, platform.release().split(".")[:2])) >= (6, 15)


@pytest.mark.skipif(not KNOWS_HOW_OTHERS_END, reason="before Linux 6.15 only its parent learns how a process ended")
def test_a_driver_that_ends_well_tells_which_of_its_processes_failed(tmp_path: Path, server: IngestServer) -> None:
    script = f"""
import subprocess, sys
waits = "import sys, time" + chr(10) + {WAITS!r}
ends = ["sys.exit(0)", "sys.exit(3)", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
started = [subprocess.Popen([sys.executable, "-c", waits + end, sys.argv[1]]) for end in ends]
[one.wait() for one in started]
"""
    alert = alert_of_driver(script, tmp_path, server)
    assert alert["level"] == "warning"
    assert "3 other processes" in alert["title"] and "2 of them failed" in alert["title"]
    assert "exit code 3" in alert["text"] and "SIGKILL" in alert["text"]


SPAWNED = """
import sys, torch, torch.distributed as dist, torch.multiprocessing as mp
{imports}

def rank_of(rank, port):
    {before}
    torch.set_num_threads(1)
    {join}("gloo", init_method=f"tcp://127.0.0.1:{{port}}", rank=rank, world_size=2)
    {after}
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


AS_IT_IS = {"imports": "import perfagent", "before": "", "join": "dist.init_process_group", "after": ""}


@pytest.mark.long
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(AS_IT_IS | {"imports": ""}, id="unchanged"),
        pytest.param(
            AS_IT_IS | {"imports": "from torch.distributed import init_process_group", "join": "init_process_group"},
            id="imported by name",
            marks=LONG,
        ),
        pytest.param(AS_IT_IS | {"after": "perfagent.attach()"}, id="attaches", marks=LONG),
        pytest.param(AS_IT_IS | {"before": "perfagent.attach()"}, id="attaches before", marks=LONG),
    ],
)
def test_ranks_that_a_script_spawns_are_ranks_of_its_run(
    tmp_path: Path, server: IngestServer, script: dict[str, str]
) -> None:
    (tmp_path / "train.py").write_text(SPAWNED.format(**script))
    command = [*PERFAGENT, "train.py", str(free_port())]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(tmp_path, server), capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stderr[-2000:]
    until(lambda: len(server.sources_that("finished")) == 3, within_s=30)
    assert len({frame.run for frame in server.frames}) == 1
    trained = [source for source in {frame.source for frame in server.frames} if server.values("loss", source=source)]
    frames = [frame for frame in server.frames if frame.source in trained]
    assert {frame.rank for frame in frames} == {0, 1}
    assert len(trained) == 2
    assert len({frame.attempt for frame in server.frames}) == 1, "one start is one attempt"
    assert all(sorted(server.values("loss", source=source)) == list(range(1, 21)) for source in trained)


def test_a_spawned_child_may_name_a_run_of_its_own(tmp_path: Path, server: IngestServer) -> None:
    (tmp_path / "train.py").write_text(
        """
import multiprocessing, perfagent

def child():
    perfagent.attach(run_id="theirs").log({"x": 1.0}, step=1)

if __name__ == "__main__":
    perfagent.attach().log({"y": 1.0}, step=1)
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start()
    process.join()
"""
    )
    command = [*PERFAGENT, "train.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(tmp_path, server), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr[-2000:]
    until(lambda: len(server.sources_that("finished")) == 2, within_s=30)
    runs = {
        name: {f.run for f in server.frames if any(name in group.values for group in f.groups)} for name in ("x", "y")
    }
    assert runs["x"] == {"theirs"}
    assert len(runs["y"] - runs["x"]) == 1


@LONG
def test_a_spawned_rank_that_has_a_run_of_its_own_keeps_it(tmp_path: Path, server: IngestServer) -> None:
    (tmp_path / "train.py").write_text(SPAWNED.format(**AS_IT_IS | {"before": "perfagent.attach(run_id='theirs')"}))
    command = [*PERFAGENT, "train.py", str(free_port())]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(tmp_path, server), capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stderr[-2000:]
    until(lambda: len(server.sources_that("finished")) == 3, within_s=30)
    assert {frame.run for frame in server.frames if any("loss" in group.values for group in frame.groups)} == {"theirs"}
