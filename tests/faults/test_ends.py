"""A11 to A13: how a training process ends. The kernel's out-of-memory killer (A12) is in
tests/agent/launch/test_oom.py."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from builders import job_environment, sync, until
from faults import loops
from faults.accounts import Accounts, row

pytestmark = [pytest.mark.fault, pytest.mark.real]


# ---- A11


def test_a11_kill_9_loses_at_most_the_last_tick(fault: Accounts, tmp_path: Path) -> None:
    """The next start delivers the rest. 3 kills here, 200 in scripts/faults. The bar is 200 ms there; here, where a test
    beside may delay both threads, it is what the ticks have taken, whenever they came."""
    server = fault.server()
    seeded = random.Random(11)
    ticks = tmp_path / "ticks"
    ticks.mkdir()
    variables = job_environment(tmp_path, PERFAGENT_SERVER=server.url, TICKS=str(ticks))
    found = [loops.kill(number, seeded, variables) for number in range(3)]
    spools = fault.state / "perfagent" / "spool"
    successor = fault.sender(server, state_dir=fault.state / "perfagent")
    successor.rows.append(row(1))
    until(lambda: [folder.name for folder in spools.iterdir()] == [successor.identity.source], why="orphans are left")
    for one in found:
        stored = {}
        for frame in server.stored.values():
            for group in frame.groups if frame.run == one.run else ():
                if "value" in group.values:
                    stored |= dict(zip(group.steps(), group.column("value"), strict=True))
        one.lost(stored)  # fails on a hole before the end
        newest = [1, *map(int, (ticks / one.run).read_text().split())][-1]
        assert len(stored) >= newest - 1, f"{one.run}: what a tick has taken is gone"
    assert successor.config.spool_tick_s <= 0.2


# ---- A13


WHAT = """
import os, signal, sys, threading, time
def own(told, last=threading.excepthook): print("own hook", told.exc_type, flush=True); last(told)
threading.excepthook = own
{start}
def quiet(*_): pass
{body}
for work in ([].pop, sys.exit):
    thread = threading.Thread(target=work, args=(3,), name="saver"); thread.start(); thread.join()
print(signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), sys.excepthook, flush=True)
{end}
print("end", flush=True)
"""
ENDINGS: dict[str, tuple[str, str, str | None]] = {
    # name: (before, the end, the last state that the server hears; None: nothing tells it, the server itself finds
    # "lost").
    "end": ("", "", "finished"),
    "raise": ("", "raise ValueError('no')", "failed"),
    # an import or exec of ours after the interrupt would turn 130 into 1: CPython resets its flag
    "ctrl-c": ("", "os.kill(os.getpid(), signal.SIGINT); time.sleep(5)", "failed"),
    "sigterm": ("", "os.kill(os.getpid(), signal.SIGTERM); time.sleep(5)", None),
    "own-handlers": (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); signal.signal(signal.SIGINT, signal.SIG_IGN)",
        "os.kill(os.getpid(), signal.SIGINT); os.kill(os.getpid(), signal.SIGTERM); time.sleep(5)",
        "failed",
    ),
    "handler-logs": (
        "def note(*_):\n    run and run.log({'from': 1.0})\n"
        "signal.signal(signal.SIGALRM, note); signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003)",
        "for n in range(2000): run and run.log({'x': n})\nsignal.setitimer(signal.ITIMER_REAL, 0)",
        "finished",
    ),
}


@pytest.mark.parametrize("case", ENDINGS)
def test_a13_process_ends_as_without_us_and_the_server_hears_how(case: str, fault: Accounts, tmp_path: Path) -> None:
    body, end, state = ENDINGS[case]
    server = fault.server()
    variables = job_environment(tmp_path, PERFAGENT_SERVER=server.url)
    ours = "import perfagent; run = perfagent.init(run_id='r'); run._sender.settled.wait(20)"
    both = []
    for name, start in (("plain", "run = None"), ("ours", ours)):
        script = tmp_path / name / "script.py"
        script.parent.mkdir()
        script.write_text(WHAT.format(start=start, body=body, end=end))
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        both.append(subprocess.Popen([sys.executable, str(script)], env=variables, **pipes))
    (plain_out, plain_err), (out, err) = (process.communicate(timeout=60) for process in both)
    sync(
        variables
    )  # the last frame has a second and a half; what could not be sent by then lies in the spool, as is said
    assert both[0].returncode == both[1].returncode
    assert _without_addresses(out) == _without_addresses(plain_out)
    usual = ("not all of this run has reached", "perfagent: watch it at")
    said = [line for line in _without_addresses(err) if not any(words in line for words in usual)]
    crash = [line for line in said if line.startswith("perfagent: the job crashed")]
    assert [line for line in said if line not in crash] == _without_addresses(plain_err)
    assert [f"{server.url}/run/r" in line and "ValueError: no" in line for line in crash] == [True] * ("raise V" in end)
    died = [told["reason"] for told in server.events("thread")]
    assert died == ["IndexError: pop from empty list"] or (state is None and not died), "of the last tick"
    states = [told for told in server.states() if told != "starting"]
    assert states[-1:] == ([state] if state else [])
    assert case != "ctrl-c" or server.events("state")[-1]["reason"] == "KeyboardInterrupt"


def _without_addresses(text: str) -> list[str]:
    """Lines of output; addresses, files and line numbers differ from run to run."""
    return [line for line in text.splitlines() if "0x" not in line and not line.startswith('  File "')]
