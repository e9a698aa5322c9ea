"""`perfagent demo`: a server, a dashboard, a real training job, and the verdict on it as it goes."""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
import webbrowser
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Literal

from perfagent.command_line.option_types import port, positive
from perfagent.errors import ResourceError
from perfagent.wire.quantities import some
from perfagent_tools.demo import faults
from perfagent_tools.demo.ranks import Ranks
from perfagent_tools.demo.server import DemoServer

__all__ = ["command"]

ENDED = ("finished", "failed", "oom", "killed", "preempted", "lost")
STACKS_S = (
    6.0  # so long after the verdict a hanging job is stopped: its stacks, which the alert asks for, have come then
)
LEFT_S = 3.0
"""If the server has not seen the end so long after it, the job has left its last frames for `perfagent sync`."""
_PROGRESS = re.compile(r"step (\d+)/(\d+) loss (\S+)")


def command(parser: argparse.ArgumentParser) -> None:
    parser.description = "Start a server, train a small GPT on the sources of Python's standard library, and watch it."
    parser.add_argument("--steps", type=positive, default=400, help="optimizer steps (default 400)")
    names = f"what goes wrong: {', '.join(faults.FAULTS)}. Rules that watch for long make these take their time: {_long_ones()}"
    parser.add_argument("--fault", default="none", metavar="NAME", help=names)
    parser.add_argument(
        "--exit", action="store_true", help="end by itself: 0 if the demo did what it should, 1 otherwise"
    )
    parser.add_argument("--port", type=port, help="where to start the server (default 8420; 0 for any free port)")
    parser.add_argument("--data", type=Path, help="folder for the server's data (default: the server's own)")
    parser.add_argument("--no-browser", action="store_true", help="print the dashboard's address only")
    parser.set_defaults(run=demo)


def demo(arguments: argparse.Namespace) -> int:
    """0 when the run ended as the fault says and the verdict is the one that it must have; 1 otherwise."""
    fault = faults.named(arguments.fault)
    if find_spec("torch") is None:
        raise ResourceError("the demo trains with torch, and torch is missing here; pip install torch")
    steps = arguments.steps
    if steps < fault.min_steps and fault.name != "none":
        steps = fault.min_steps
        print(f"{fault.name} does not stand out from noise in {some(arguments.steps, 'step')}: training {steps}")
    run = f"demo-{fault.name}-{secrets.token_hex(4)}"
    # The server and the ranks do not get these signals: each has a session of its own.
    for ends in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ends) is signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(ends, lambda number, _: sys.exit(128 + number))

    with DemoServer(data=arguments.data, port=arguments.port, log=_state_folder() / "demo-server.log") as server:
        if server.moved_from is not None:
            print(f"port {server.moved_from} is taken by another program; using another")
        print(f"{'using the server that runs' if server.found else 'server started'} at {server.url}")
        page = f"{server.url}/run/{run}"
        print(f"dashboard: {page}")
        if not (arguments.exit or arguments.no_browser) and sys.stdout.isatty() and _has_display():
            webbrowser.open(page)
        print(
            f"training a GPT of half a million parameters for {some(steps, 'step')}; fault: {fault.name} ({fault.story})"
        )
        if fault.usual_s:
            print(f"the verdict takes about {_spelled(fault.usual_s)}, as its rule watches for long before it judges")
        code, stayed = _train(server, run, steps, fault, stays=not arguments.exit)
        done = _report(server, run, steps, fault, code)
        if server.found or not (arguments.exit or stayed):
            print(f"dashboard: {page}")
        else:
            here = "perfagent" if shutil.which("perfagent") else f"{sys.executable} -m perfagent"
            folder = "" if arguments.data is None else f" --data {arguments.data}"
            print(f"the demo's server stops now; to see the run again: {here} up{folder}")
        if not (arguments.exit or stayed):
            _wait_for_interrupt(server)
    return 0 if done else 1


# ---- training


def _train(server: DemoServer, run: str, steps: int, fault: faults.Fault, *, stays: bool) -> tuple[int, bool]:
    """Runs the training processes to their end and shows how far they are: their exit code, negative for a signal, and
    whether a job that hangs was there to look at until Ctrl-C. stays: whether it may be.

    Raises KeyboardInterrupt for a Ctrl-C that comes before the verdict. All processes have ended then.
    """
    environment = {
        key: value for key, value in os.environ.items() if key not in ("PERFAGENT_RECORD", "PERFAGENT_DISABLED")
    }
    environment |= {"PERFAGENT_SERVER": server.url, "PERFAGENT_RUN_ID": run, "PYTHONUNBUFFERED": "1"}
    launcher = ["-m", "perfagent", "run", "-m"] if fault.launcher else ["-m"]
    words = [*launcher, "perfagent_tools.demo.job", "--steps", str(steps), "--fault", fault.name]
    screen = _Screen(steps)
    ranks = Ranks(words, fault.ranks, environment, screen.read)
    vigil = _Vigil(fault, stays=stays)
    try:
        while not ranks.ended(within_s=0.5):
            finding = server.get(f"/runs/{run}/verdict")
            if finding is not None and screen.step and _judged(finding):
                screen.verdict(finding)
            screen.draw()
            match vigil.look(trains=screen.step > 0, is_named=_is_named(server, run, fault)):
                case "let go":
                    ranks.let_go()
                case "stop":
                    ranks.stop(signal.SIGTERM)
                case "stay":
                    screen.print(
                        f"the job hangs on, to be looked at: `perfagent stacks {run}`; press Ctrl-C to stop it"
                    )
    except KeyboardInterrupt:
        screen.is_open = False  # for the tracebacks of the ranks that are interrupted
        ranks.stop(signal.SIGTERM if vigil.stays else signal.SIGINT)
        if not vigil.stays:
            raise
    except BaseException:
        ranks.stop(signal.SIGTERM)
        raise
    screen.draw()
    screen.close()
    return ranks.code, vigil.stays


def _is_named(server: DemoServer, run: str, fault: faults.Fault) -> bool:
    """By an alert: the verdict speaks of a standstill before its rule is sure."""
    found = server.get(f"/runs/{run}/alerts") or {"alerts": ()}
    return any(alert["rule"] in fault.expects for alert in found["alerts"])


class _Vigil:
    """Says when a job that does not end after its steps has trained, or hung, for long enough.

    stays: whether a job that hangs is left alone now, until somebody stops it.
    """

    def __init__(self, fault: faults.Fault, *, stays: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.stays = False
        self._fault, self._may_stay, self._clock = fault, stays, clock
        self._begun: float | None = None
        self._found: float | None = None

    def look(self, *, trains: bool, is_named: bool) -> Literal["", "let go", "stop", "stay"]:
        """What to do now. trains: the first steps have come; is_named: an alert has named the fault."""
        if self._fault.ends == "after its steps" or self.stays:
            return ""
        now = self._clock()
        if self._begun is None and trains:
            self._begun = now
        if self._found is None and is_named:
            self._found = now
        if self._found is None and (self._begun is None or now - self._begun < self._fault.verdict_s):
            return ""
        if self._fault.ends == "at the verdict":
            return "let go"
        if self._found is not None and self._may_stay:
            self.stays = True
            return "stay"
        return "" if self._found is not None and now - self._found < STACKS_S else "stop"


class _Screen:
    """A progress bar on a terminal; elsewhere a line for every tenth of the way. Lines of others go above the bar."""

    def __init__(self, steps: int, out: IO[str] | None = None) -> None:
        self.steps = steps
        self.step = 0
        self.loss = "-"
        self.is_open = True
        self._out = out or sys.stdout
        self._terminal = self._out.isatty()
        self._shown = -1
        self._rule = ""
        self._lock = threading.Lock()

    def read(self, line: str) -> None:
        """Takes a line of the job: how far it is, or anything else, which is shown while the screen is open."""
        match = _PROGRESS.match(line)
        if match:
            self.step, self.loss = int(match[1]), match[3]
        elif self.is_open:
            self.print(f"  | {line.rstrip()}")

    def draw(self) -> None:
        with self._lock:
            if not self._terminal:
                tenth = min(10, 10 * self.step // self.steps)
                if self.step and tenth > self._shown:
                    self._shown = tenth
                    self._line(f"step {self.step}/{self.steps}  loss {self.loss}")
                return
            columns = shutil.get_terminal_size().columns
            text = f" {self.step}/{self.steps}  loss {self.loss}  {self._rule}"
            width = max(10, min(40, columns - len(text) - 4))
            filled = min(width, width * self.step // self.steps)
            self._out.write(f"\r\x1b[2K[{'█' * filled}{'░' * (width - filled)}]{text}"[: columns + 5])
            self._out.flush()

    def verdict(self, finding: dict[str, Any]) -> None:
        """Prints the verdict when its rule is a new one. Its sentence names the step that it rests on."""
        if finding["rule"] == self._rule:
            return
        self._rule = finding["rule"]
        self.print(f"verdict: {_sentence(finding)}")

    def print(self, text: str) -> None:
        with self._lock:
            self._line(("\r\x1b[2K" if self._terminal else "") + text)

    def close(self) -> None:
        if self._terminal:
            self._line("")

    def _line(self, text: str) -> None:
        self._out.write(text + "\n")
        self._out.flush()


# ---------------------------------------------------------------------------------------------------------------------


def _report(server: DemoServer, run: str, steps: int, fault: faults.Fault, code: int) -> bool:
    """Waits until the server has seen the end and judged it, prints both, and says whether they are what they should
    be."""
    began = time.monotonic()
    synced = False
    if fault.settle_s > 30:
        print(f"waiting up to {fault.settle_s:.0f} s for the server to notice")
    while True:
        summary, finding = server.get(f"/runs/{run}"), server.get(f"/runs/{run}/verdict")
        ended = summary is not None and summary["state"] in ENDED
        judged = finding is not None and finding["rule"] in fault.expects
        waited_s = time.monotonic() - began
        if (ended and judged) or waited_s > fault.settle_s or server.stopped():
            break
        if not (ended or synced) and waited_s > LEFT_S:
            synced = True
            _sync(server)
        time.sleep(0.25)
    if summary is None or finding is None:
        print(f"the server does not know the run {run}; the training process ended with {code}")
        return False

    state, last = summary["state"], summary["step"]
    print(f"state:   {state} at step {last}{': ' + summary['reason'] if summary.get('reason') else ''}")
    print(f"verdict: {_sentence(finding)}")
    if finding.get("fix"):
        print(f"fix:     {finding['fix']}")
    wrong = []
    if state not in fault.states:
        wrong.append(f"the state is {state}, not {' or '.join(fault.states)}")
    if "finished" in fault.states and (last < steps if fault.ends == "at the verdict" else last != steps):
        wrong.append(f"{last} of {some(steps, 'step')} arrived")
    # The verdict on a healthy demo depends on the machine too (a GPU is nearly idle with so small a model): not a
    # failure.
    if fault.name != "none" and finding["rule"] not in fault.expects:
        wrong.append(f"the verdict is {finding['rule']}, not {' or '.join(fault.expects)}")
    for sentence in wrong:
        print(f"not as it should be: {sentence}")
    return not wrong


def _sync(server: DemoServer) -> None:
    """Sends the frames that the job has left."""
    environment = os.environ | {"PERFAGENT_SERVER": server.url}
    subprocess.run([sys.executable, "-m", "perfagent", "sync"], env=environment, capture_output=True, check=False)


def _judged(finding: dict[str, Any]) -> bool:
    """Whether the verdict rests on a step; before the first one has arrived the server has nothing to say."""
    return finding["rule"] != "healthy" or bool(finding.get("evidence"))


def _sentence(finding: dict[str, Any]) -> str:
    severity = "" if finding["rule"] == "healthy" else f" ({finding['severity']})"
    return f"{finding['rule']}{severity}: {finding['message']}"


def _long_ones() -> str:
    """The faults that do not end after their steps, and how long each takes."""
    return ", ".join(f"{fault.name} {_spelled(fault.usual_s)}" for fault in faults.FAULTS.values() if fault.usual_s)


def _spelled(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.2g} minutes"


def _wait_for_interrupt(server: DemoServer) -> None:
    if server.found:
        return
    print("the server stays up; press Ctrl-C to stop it")
    try:
        while not server.stopped():
            time.sleep(0.5)
    except KeyboardInterrupt:
        print()


def _state_folder() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "perfagent"


def _has_display() -> bool:
    return sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))
