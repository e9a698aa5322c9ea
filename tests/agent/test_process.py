"""A run in the life of a process: what scripts do with imports, workers, signals, exits and files, in processes of
their own."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from agent.frameworks.recordings import recorded
from agent_recorded import Recording
from builders import job_environment, until
from whole_end import IN_A_SCRIPT

from perfagent.boundary import guard

STEPS = """
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(20):
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def run(
    folder: Path, body: str, *command: str, begin: str = IN_A_SCRIPT, **more: str
) -> subprocess.CompletedProcess[str]:
    """begin: comes before the body, but not under `perfagent run`, whose watcher writes what the end has left."""
    script = folder / "script.py"
    script.write_text(("" if command else begin) + textwrap.dedent(body), encoding="utf-8")
    environment = job_environment(folder, PERFAGENT_RECORD=str(folder / "record"), OMP_NUM_THREADS="1", **more)
    words = [sys.executable, *command, str(script)]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False)


def ends(folder: Path) -> list[tuple[str, str]]:
    """(state, reason) of each run's end, in the order of the folders' names. Nobody may be writing any more."""
    found = []
    for source in sorted((folder / "record").iterdir()):
        only = folder / "one"
        only.mkdir(exist_ok=True)
        moved = source.rename(only / source.name)
        last = Recording(only).events("state")[-1]
        found.append((last["state"], last.get("reason", "")))
        moved.rename(source)
    return found


# ---- imports


@pytest.mark.long
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["-m", "perfagent", "run"], id="perfagent run", marks=pytest.mark.long),
        pytest.param([], id="init before torch"),
    ],
)
def test_a_look_for_torch_before_its_import_hides_nothing(tmp_path: Path, command: list[str]) -> None:
    begin = "" if command else "import perfagent; perfagent.init()\n"
    looks = "import importlib.util, sys\nbefore = len(sys.meta_path)\nassert importlib.util.find_spec('torch')\nimport torch\n"
    done = run(tmp_path, f"{begin}{looks}{STEPS}", *command)
    assert done.returncode == 0, done.stderr
    assert [step for step, _ in Recording(tmp_path / "record").series("loss")] == [*range(1, 21)]


@pytest.mark.long
@pytest.mark.parametrize(
    "call",
    [
        "execv(words[0], words)",
        pytest.param("execve(words[0], words, os.environ)", marks=pytest.mark.long),
        pytest.param("execvp(words[0], words)", marks=pytest.mark.long),
    ],
)
def test_a_script_that_starts_itself_anew_before_it_imports_torch_is_monitored(tmp_path: Path, call: str) -> None:
    begin = f"""
import os, sys
words = [sys.executable, *sys.argv]
if "PYTHONHASHSEED" not in os.environ:
    os.environ["PYTHONHASHSEED"] = "0"
    os.{call}
assert not any("startup" in entry for entry in sys.path)
assert "PERFAGENT_RUN_LAUNCH" not in os.environ and os.environ["PYTHONPATH"] == "/nowhere"
import torch
"""
    done = run(tmp_path, begin + STEPS, "-m", "perfagent", "run", PYTHONPATH="/nowhere")
    assert done.returncode == 0, done.stderr
    assert [step for step, _ in Recording(tmp_path / "record").series("loss")] == [*range(1, 21)]


ANEW = """
import os, sys
import torch
words = [sys.executable, *sys.argv]
if "THREADS" not in os.environ:
    os.environ["THREADS"] = "1"
    {before}
    os.{call}
assert not any("startup" in entry for entry in sys.path)
assert "PERFAGENT_RUN_LAUNCH" not in os.environ and os.environ["PYTHONPATH"] == "/nowhere"
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "call",
    [
        pytest.param("execv(words[0], words)", marks=pytest.mark.long),
        "execve(words[0], words, os.environ)",
        pytest.param("execlp(words[0], *words)", marks=pytest.mark.long),
    ],
)
def test_a_script_that_starts_itself_anew_after_it_has_imported_torch_is_monitored(tmp_path: Path, call: str) -> None:
    done = run(tmp_path, ANEW.format(call=call, before="") + STEPS, "-m", "perfagent", "run", PYTHONPATH="/nowhere")
    assert done.returncode == 0, done.stderr
    assert [step for step, _ in Recording(tmp_path / "record").series("loss")] == [*range(1, 21)]
    assert Recording(tmp_path / "record").events("state")[-1]["state"] == "finished"


@pytest.mark.long
def test_a_training_that_starts_itself_anew_is_another_attempt_of_the_run(tmp_path: Path) -> None:
    waits = "while sender.counters['rows'] < 20: time.sleep(0.3)"  # a process that execs is gone without a last tick
    begin = ["exec(os.environ['STEPS'])", "import perfagent, time", "sender = perfagent.attach()._sender"]
    before = "\n    ".join([*begin, waits, "time.sleep(0.3)"])
    script = ANEW.format(call="execv(words[0], words)", before=before) + STEPS
    done = run(tmp_path, script, "-m", "perfagent", "run", PYTHONPATH="/nowhere", STEPS=STEPS)
    assert done.returncode == 0, done.stderr
    first, second = sorted(recorded(tmp_path / "record"), key=lambda one: one.attempt)
    assert (first.run, first.attempt < second.attempt) == (second.run, True)
    assert [states[-1]["state"] for states in (first.states, second.states)] == ["running", "finished"]
    assert sorted(second.series["loss"]) == [*range(1, 21)]


@pytest.mark.long
def test_an_exec_that_fails_or_is_a_childs_changes_nothing(tmp_path: Path) -> None:
    script = """
import os, sys
import torch
try:
    os.execv("/nowhere/python", ["python"])
except FileNotFoundError as error:
    assert error.filename == "/nowhere/python" or error.errno == 2
child = os.fork()
if not child:
    os.execv(sys.executable, [sys.executable, "-c", "import os; assert 'PERFAGENT_RUN_LAUNCH' not in os.environ"])
assert os.waitpid(child, 0)[1] == 0
"""
    done = run(tmp_path, script + STEPS, "-m", "perfagent", "run")
    assert done.returncode == 0, done.stderr
    assert [step for step, _ in Recording(tmp_path / "record").series("loss")] == [*range(1, 21)]
    assert len(recorded(tmp_path / "record")) == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("secrets.py", ["-m", "perfagent", "run"]),
        ("statistics.py", []),
        pytest.param("statistics.py", ["-m", "perfagent", "run"], marks=pytest.mark.long),
        pytest.param("secrets.py", [], marks=pytest.mark.long),
    ],
    ids=[
        "secrets under perfagent run",
        "statistics beside attach",
        "statistics under perfagent run",
        "secrets beside attach",
    ],
)
def test_a_file_beside_the_script_may_have_the_name_of_a_module_that_we_could_need(
    tmp_path: Path, name: str, command: list[str]
) -> None:
    """torch's optimizers need the standard ones themselves, so this script has none."""
    (tmp_path / name).write_text("API_KEY = 'mine'\n")
    begin = "import torch\n" if command else "import torch, perfagent\nperfagent.attach()\n"
    loop = "weight = torch.ones(3, requires_grad=True)\nfor _ in range(5):\n    (weight * 2).sum().backward()\n"
    done = run(tmp_path, begin + loop, *command)
    assert (done.returncode, done.stderr) == (0, "")
    assert ends(tmp_path) == [("finished", "")]


# ---- files


def test_many_runs_in_one_process_leave_no_files_open(tmp_path: Path) -> None:
    body = """
        import os, perfagent
        counts = []
        for trial in range(6):
            run = perfagent.init(name=f"trial {trial}")
            run._sender.settled.wait(30)
            while run._sampler._readers is None:
                pass
            run.log({"x": 1.0})
            run.finish()
            counts.append(len(os.listdir("/proc/self/fd")))
        assert counts[5] == counts[1], counts
    """
    done = run(tmp_path, body)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("closed", ["1", "2", "0"])
def test_a_closed_standard_stream_changes_nothing_and_the_end_is_told(tmp_path: Path, closed: str) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; sys.exit(4)\n")
    environment = job_environment(tmp_path, PERFAGENT_RECORD=str(tmp_path / "record"))
    shell = f'exec "{sys.executable}" -m perfagent run script.py {closed}>&-'
    done = subprocess.run(["sh", "-c", shell], cwd=tmp_path, env=environment, timeout=60, check=False)
    assert done.returncode == 4
    record = tmp_path / "record"
    states: list[dict[str, object]] = []

    def told() -> bool:
        with contextlib.suppress(OSError):  # it is being written
            states[:] = Recording(record).events("state")
        return bool(states)

    until(told, within_s=30, why="nobody told the end")
    assert [(state["state"], state["reason"]) for state in states] == [("failed", "exit code 4")]


# ---- signals


def test_a_signal_that_the_script_blocks_waits_for_it(tmp_path: Path) -> None:
    body = """
        import os, signal, time, perfagent
        perfagent.init()._sender.settled.wait(30)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.3)
        print("saved", signal.sigtimedwait({signal.SIGUSR1}, 5).si_signo == signal.SIGUSR1, flush=True)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    """
    done = run(tmp_path, body)
    assert done.stdout == "saved True\n"
    assert done.returncode == -signal.SIGTERM


class TimeIsUpError(Exception):
    pass


def _time_is_up(_signal: int, _frame: object) -> None:
    raise TimeIsUpError


class Slow:
    """A mapping; the signal comes while it is copied."""

    def keys(self) -> list[str]:
        signal.raise_signal(signal.SIGALRM)
        return ["x"]

    def __getitem__(self, name: str) -> float:
        return 1.0


def test_what_a_handler_of_the_script_raises_in_the_midst_of_ours_reaches_the_script(record) -> None:  # type: ignore[no-untyped-def]
    recorded = record()
    before = signal.signal(signal.SIGALRM, _time_is_up)
    try:
        with pytest.raises(TimeIsUpError):
            recorded.run.log(Slow())
        with pytest.raises(TimeIsUpError):
            guard.guarded(lambda: signal.raise_signal(signal.SIGALRM))()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not guard.failures
    recorded.run.log({"x": 2.0})
    assert [value for _, value in recorded.of("x")] == [2.0]


# ---- workers


@pytest.mark.parametrize("start", ["fork", "forkserver", "spawn"])
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
    assert sorted(ends(tmp_path)) == [
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
    assert ends(tmp_path) == [("finished", "")]


# ---- logs that cannot be taken


@pytest.mark.parametrize("step", ["2**63", "2**53 + 1", "-1"])
def test_a_step_that_nobody_can_take_is_refused_by_name_and_the_next_logs_count_on(tmp_path: Path, step: str) -> None:
    body = f"import perfagent\nrun = perfagent.init()\nrun.log({{'x': 1}})\nrun.log({{'x': 2}}, {step})\nrun.log({{'x': 3}})\n"
    done = run(tmp_path, body)
    assert done.stderr.count("from 0 to 2**53") == 1
    assert [value for _, value in Recording(tmp_path / "record").series("x")] == [1, 3]


def test_a_log_after_the_end_is_left_out_and_that_is_said_once(tmp_path: Path) -> None:
    done = run(
        tmp_path, "import perfagent\nrun = perfagent.init()\nrun.finish()\nrun.log({'x': 1})\nrun.log({'x': 2})\n"
    )
    assert done.stderr.count("log() was called after the end of the run") == 1


# ---- the end


LEAVES = {
    "sys.exit": ("sys.exit(3)", "failed", "exit code 3"),
    "with words": ("sys.exit('no data')", "failed", "exit code 1: no data"),
    "exit()": ("exit(4)", "failed", "exit code 4"),
    "quit() in a function": ("(lambda: quit(5))()", "failed", "exit code 5"),
    "with any object": ("import numpy; sys.exit(numpy.ones(2))", "failed", "exit code 1: [1. 1.]"),
    "well": ("sys.exit(0)", "finished", ""),
    "a log in finally": (
        "try:\n    sys.exit(3)\nfinally:\n    perfagent.log({'x': 2}, step=2)",
        "failed",
        "exit code 3",
    ),
    "a log at exit": ("atexit.register(lambda: perfagent.log({'x': 2}, step=2))\nsys.exit(3)", "failed", "exit code 3"),
    "caught": ("try:\n    sys.exit(2)\nexcept SystemExit:\n    pass\nperfagent.log({'x': 2}, step=2)", "finished", ""),
    "caught, and nothing follows": ("try:\n    sys.exit(2)\nexcept SystemExit:\n    pass", "finished", ""),
    "caught and raised again": ("try:\n    sys.exit(2)\nexcept SystemExit:\n    raise", "failed", "exit code 2"),
    "raised again, held": (
        "try:\n    sys.exit(2)\nexcept SystemExit as e:\n    held = e\n    raise",
        "failed",
        "exit code 2",
    ),
    "caught, then another": ("try:\n    sys.exit(2)\nexcept SystemExit:\n    sys.exit(6)", "failed", "exit code 6"),
    "in another thread": ("t = threading.Thread(target=sys.exit, args=(7,))\nt.start()\nt.join()", "finished", ""),
}


@pytest.mark.parametrize("case", LEAVES)
def test_how_a_process_leaves(tmp_path: Path, case: str) -> None:
    statement, state, reason = LEAVES[case]
    body = (
        f"import atexit, sys, threading, perfagent\nperfagent.init()\nperfagent.log({{'x': 1}}, step=1)\n{statement}\n"
    )
    code = run(tmp_path, body).returncode
    assert code == (int(reason.split()[2].rstrip(":")) if reason else 0), "as without us"
    assert ends(tmp_path) == [(state, reason)]


CATCHES = {
    "an error": ("raise ValueError('boom')", "sys.exit(1)", "failed", "ValueError: boom (exit code 1)"),
    "with words": (
        "raise ValueError('boom')",
        "sys.exit('gave up')",
        "failed",
        "ValueError: boom (exit code 1: gave up)",
    ),
    "no memory": ("raise MemoryError('too much')", "sys.exit(7)", "oom", "MemoryError: too much (exit code 7)"),
    "in a function": ("raise ValueError('boom')", "leave(4)", "failed", "ValueError: boom (exit code 4)"),
    "no memory, in a function": (
        "raise MemoryError('too much')",
        "leave(7)",
        "failed",
        "MemoryError: too much (exit code 7)",
    ),
    "another attempt": ("raise MemoryError('too much')", "attempt()", "failed", "exit code 3"),
    "a way to leave, because of it": (
        "raise ValueError('boom')",
        "exits()",
        "failed",
        "ValueError: boom (exit code 1)",
    ),
    "and leaves well": ("raise ValueError('boom')", "sys.exit(0)", "finished", ""),
    "a way to leave": ("sys.exit(2)", "sys.exit(6)", "failed", "exit code 6"),
    "and goes on": ("raise ValueError('boom')", "perfagent.log({'x': 2}, step=2)", "failed", "exit code 8"),
}


@pytest.mark.parametrize("case", CATCHES)
def test_who_leaves_because_of_an_exception_says_which(tmp_path: Path, case: str) -> None:
    """Hydra prints what a job raised, and calls sys.exit(1) in the handler; so do many a script's own `main`."""
    raised, handled, state, reason = CATCHES[case]
    body = f"""
        import sys, perfagent
        perfagent.init()
        class Exit(RuntimeError):
            "As click and typer have one."
        def leave(status):
            sys.exit(status)
        def attempt():
            (lambda: (lambda: leave(3))())()
        def exits():
            try:
                try:
                    work()
                except Exception:
                    raise Exit(1)
            except Exit:
                sys.exit(1)
        def work():
            {raised}
        try:
            work()
        except BaseException:
            {handled}
        sys.exit(8)
    """
    run(tmp_path, textwrap.dedent(body))
    assert ends(tmp_path) == [(state, reason)]
    if "boom" in reason:
        [told] = [event for event in Recording(tmp_path / "record").events("state") if event["state"] == state]
        assert told["exception"] == "ValueError"
        assert "in work" in told["traceback"]


def test_leaving_is_otherwise_as_without_us(tmp_path: Path) -> None:
    """A worker's SystemExit reaches its parent, sys.exit can be sent to a process, and any object may be a status."""
    body = """
        import copy, inspect, multiprocessing, pickle, sys, numpy, perfagent
        from concurrent.futures import ProcessPoolExecutor
        original = inspect.signature(sys.exit)
        def work():
            sys.exit(3)
        perfagent.init()
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
            assert repr(pool.submit(work).exception()) == "SystemExit(3)"
        assert pickle.loads(pickle.dumps(sys.exit)) is sys.exit
        assert inspect.signature(sys.exit) == original
        try:
            sys.exit(4)
        except SystemExit as error:
            assert copy.deepcopy(error).code == pickle.loads(pickle.dumps(error)).code == 4
        try:
            sys.exit(numpy.ones(3))
        except SystemExit as error:
            assert error.code.shape == (3,)
    """
    assert run(tmp_path, textwrap.dedent(body)).returncode == 0
    assert ends(tmp_path) == [("finished", "")]


@pytest.mark.long
def test_an_exit_that_was_caught_and_kept_is_not_the_end_where_training_goes_on(tmp_path: Path) -> None:
    body = """
        import sys, torch, perfagent
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        perfagent.attach(model, optimizer)
        kept = []
        for step in range(4):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            try:
                sys.exit(2)
            except SystemExit as error:
                kept.append(error)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    """
    assert run(tmp_path, body).returncode == 0
    assert ends(tmp_path) == [("finished", "")]


def test_an_error_at_the_prompt_that_was_mended_is_not_the_end(tmp_path: Path) -> None:
    lines = f"{IN_A_SCRIPT}import perfagent\nrun = perfagent.init()\nrun.log({{'x': 1}})\n1 / 0\nrun.log({{'x': 2}})\n"
    environment = job_environment(tmp_path, PERFAGENT_RECORD=str(tmp_path / "record"))
    done = subprocess.run(
        [sys.executable, "-i"], input=lines, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert ends(tmp_path) == [("finished", "")]
    assert len(Recording(tmp_path / "record").series("x")) == 2


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
    assert ends(tmp_path) == [("finished", "")]
    assert len(Recording(tmp_path / "record").series("x")) == 100


@pytest.mark.long
def test_a_script_that_closes_every_descriptor_keeps_the_files_that_get_their_numbers(tmp_path: Path) -> None:
    """As daemons begin: our files are gone then, and their numbers are the script's own."""
    body = f"""
        import os, time, torch, perfagent
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        run = perfagent.attach(model, optimizer)
        run._sender.settled.wait(30)

        def step():
            model(torch.ones(1, 2)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.02)

        for _ in range(30):
            step()
        os.closerange(3, 1024)
        files = [open({str(tmp_path)!r} + f"/own{{number}}", "wb", buffering=0) for number in range(30)]
        for _ in range(100):
            step()
            for file in files:
                file.write(b"x")
        for file in files:
            file.close()
    """
    done = run(tmp_path, body)
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.read_bytes() for path in sorted(tmp_path.glob("own*"))] == [b"x" * 100] * 30
    steps = [step for step, _ in Recording(tmp_path / "record").series("loss")]
    assert len(steps) == len(set(steps)) >= 120  # what was written in the tick of that moment may be lost
    assert ends(tmp_path) == [("finished", "")]


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


def test_nor_does_the_look_up_of_a_servers_name_import_anything(tmp_path: Path) -> None:
    """A child that is forked in the midst of it would hang in its own first look-up."""
    body = """
        import os, sys
        import perfagent
        del os.environ["PERFAGENT_RECORD"]
        run = perfagent.init(server="http://localhost:9")
        there = set(sys.modules)
        run.log({"x": 1.0})
        while not run._sender.counters["failed"]:
            run._sender.closed.wait(0.05)
        print(sorted(set(sys.modules) - there))
    """
    assert run(tmp_path, body).stdout.strip() == "[]"
