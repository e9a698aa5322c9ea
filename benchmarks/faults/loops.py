"""The loops of rows A04, A05, A11, A14, A16, A17: in a few rounds they are tests, in many they are scripts/faults."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from builders import sync, until
from faults.accounts import Accounts, left_in, row
from faults.proxy import Proxy
from ingest_server import IngestServer
from ticks import tick_of

from perfagent.delivery import records
from perfagent.delivery.spool import Header, Spool
from perfagent.wire import Event, Frame, Group, encode

HERE = Path(__file__).resolve().parent


def frame_bytes(seq: int = 1) -> bytes:
    """An empty frame."""
    return encode(Frame(project="p", run="r", source="s", attempt=1, rank=0, seq=seq))


# ---- A04


def log_through(books: Accounts, proxy: Proxy, *, cuts: int, within_s: float = 120.0) -> int:
    """Logs until the proxy has made so many cuts, then until all is delivered. Returns how many steps were logged."""
    # no real pauses after so many failures
    sender = books.sender(proxy.url, flush_s=0.01, spool_tick_s=0.01, pause_s=lambda _: 0.001)
    send_loop = sender.send_loop
    step = 0
    until_at = time.monotonic() + within_s
    while proxy.cuts < cuts and time.monotonic() < until_at:
        sender.rows.append(row(step))
        step += 1
        time.sleep(0.002)
    proxy.calm = True
    until(
        lambda: sender.spool.waiting == 0 and send_loop.exchange.busy is None,
        within_s=60,
        why="the rest was never delivered",
    )
    return step


# ---- A05


@dataclass
class Outage:
    """What an outage cost: bytes of growth and of the spool, tries; after deliver(): samples lost, seconds of
    delivery."""

    process: subprocess.Popen[str]
    state: Path
    steps: int
    seconds: float
    grown_bytes: int
    spool_bytes: int
    attempts: int
    couriers_lost: int
    names: tuple[str, ...] = ()
    lost: int = -1
    samples: int = 0
    delivered_s: float = 0.0

    def deliver(self, *, within_s: float = 60.0) -> None:
        """The server is back: waits until the agent has delivered everything and ended."""
        said, _ = self.process.communicate("\n", timeout=within_s)
        found = json.loads(said)
        self.lost, self.samples, self.delivered_s = found["lost"], found["samples"], found["seconds"]
        assert self.process.returncode == 0
        shutil.rmtree(self.state)

    def abandon(self) -> None:
        """Ends it without delivery."""
        self.process.kill()
        self.process.communicate()
        shutil.rmtree(self.state)


def outage(folder: Path, *, hours: float, port: int, shape: str = "walks") -> Outage:
    """Drives an agent through an outage in time lapse; the server's port must be closed, or refuse, until deliver() is
    called.

    shape: of what is logged (outage_agent.py).
    """
    from faults.outage_agent import SHAPES

    shared = Path("/dev/shm")  # a day has 86 400 calls of fdatasync, which time lapse cannot shorten on a real disk
    state = Path(tempfile.mkdtemp(dir=shared)) if os.access(shared, os.W_OK) else folder / "state"
    command = [sys.executable, str(HERE / "outage_agent.py"), f"http://127.0.0.1:{port}", str(state), str(hours), shape]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the agent ended before the outage did"
    return Outage(process, state, **json.loads(line), names=SHAPES[shape].names)


# ---- A11


@dataclass(frozen=True, slots=True)
class Killed:
    """One agent after SIGKILL. logged: step -> when, seconds of the monotonic clock; at: when it was killed."""

    run: str
    logged: dict[int, float]
    at: float

    def lost(self, stored: Mapping[int, float]) -> tuple[int, float]:
        """How many calls are not stored, and how long before the kill the oldest of them was made, seconds. Fails on a
        hole or a changed value."""
        assert sorted(stored) == list(range(1, len(stored) + 1)), f"{self.run}: a hole before the end"
        assert all(value == 0.5 * step for step, value in stored.items()), f"{self.run}: a changed value"
        missing = [moment for step, moment in self.logged.items() if step > len(stored)]
        return len(missing), self.at - missing[0] if missing else 0.0


def kill(number: int, seeded: random.Random, variables: Mapping[str, str]) -> Killed:
    """SIGKILL of an agent at a random moment of its first second and a half, its start included."""
    run = f"killed-{number}"
    command = [sys.executable, str(HERE / "killed_agent.py"), run]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, env=dict(variables))
    assert child.stdout is not None
    said = child.stdout.readline()
    time.sleep(1.5 * seeded.random())
    at = time.monotonic()
    child.kill()
    said += child.communicate()[0]
    whole = [line.split() for line in said.splitlines(keepends=True) if line.endswith(b"\n")]
    return Killed(run, {int(step): float(moment) for step, moment in whole}, at)


# ---- A14


def forks(method: str, count: int, variables: Mapping[str, str], *, within_s: float = 160.0) -> tuple[int, str]:
    """How many of so many children came back well, and what was said otherwise."""
    command = [sys.executable, str(HERE / "forking_agent.py"), method, str(count)]
    done = subprocess.run(command, env=dict(variables), capture_output=True, text=True, timeout=within_s, check=False)
    words = done.stdout.split()
    if done.returncode or words[:1] != ["bad"] or words[3] != "True":
        return 0, f"{done.stdout} {done.stderr[-2000:]}"
    return count - int(words[1]), done.stderr[-2000:]


# ---- A16


def damaged(folder: Path, kind: str) -> Path:
    """A spool of four ticks, or of four frames; the file."""
    kept = Spool(
        folder, Header(source=folder.name, project="p", rank=0, server="http://127.0.0.1:1", run="r", attempt=1)
    )
    for tick in range(4):
        steps = list(range(3 * tick, 3 * tick + 3))
        group = Group(
            step=steps, time=[float(s) for s in steps], monotonic=[float(s) for s in steps], values={"x": [0.1] * 3}
        )
        kept.append(*tick_of([group], [Event(kind="alert", time=1.0, data={"title": str(tick)})]), now=0.0)
        if kind == "frames":
            kept.hold(now=0.0, force=True)
    kept.abandon()
    (path,) = folder.glob(f"*.{kind}")
    return path


def steps_in(folder: Path) -> list[int]:
    return [step for frame in left_in(folder) for group in frame.groups for step in group.steps()]


def survives_damage(folder: Path, seeded: random.Random) -> bool:
    """Damages a spool somewhere; whether what is whole before the fault comes out, at the first start and at the
    second."""
    path = damaged(folder, seeded.choice(["ticks", "frames"]))
    for file in (path, folder / "state"):
        content = bytearray(file.read_bytes())
        for _ in range(seeded.randrange(5)):
            content[seeded.randrange(len(content))] ^= 1 << seeded.randrange(8)
        file.write_bytes(content[: seeded.randrange(len(content))] if seeded.random() < 0.3 else content)
    whole = sum(kind in (records.TICK, records.FRAME) for _, kind, _ in records.records_in(path.read_bytes()))
    first = steps_in(folder)
    Spool.open(folder).abandon()
    good = first == list(range(3 * whole)) == steps_in(folder)
    shutil.rmtree(folder)
    return good


# ---- A17


STARTER = """
import sys, time
from pathlib import Path
from perfagent.agent_config import AgentConfig
from perfagent.delivery.sender import Sender
from perfagent.identity import Identity
sender = Sender(AgentConfig(server=sys.argv[1], state_dir=Path(sys.argv[2])), Identity(project="p", run="mine", attempt=1))
sender.start()
sys.stdin.readline()
sender.rows.append((1, time.time(), time.monotonic(), ("own",), (1.0,)))
send_loop = sender.send_loop
until = time.monotonic() + 20
while time.monotonic() < until and (not send_loop.exchange.orphans.done or sender.spool.waiting):
    time.sleep(0.01)
sender.close("finished")
"""


def orphan(state: Path, name: str, server: str) -> None:
    """What a dead process left: five samples."""
    kept = Spool(state / "spool" / name, Header(source=name, project="p", rank=0, server=server, run="dead", attempt=1))
    for step in range(5):
        column = [float(step)]
        kept.append(*tick_of([Group(step=[step], time=column, monotonic=column, values={"loss": column})]), now=0.0)
    kept.abandon()


def eight_starts(home: Path, server: IngestServer) -> bool:
    """Eight processes start at once beside twenty orphans; whether each of those was delivered exactly once."""
    state = home / "perfagent"
    names = [f"orphan{number:02d}" for number in range(20)]
    for name in names:
        orphan(state, name, server.url)
    command = [sys.executable, "-c", STARTER, server.url, str(state)]
    children = [subprocess.Popen(command, stdin=subprocess.PIPE, text=True) for _ in range(8)]
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    for child in children:
        child.communicate(timeout=60)
    sent = [(frame.source, frame.seq) for frame in server.frames if frame.source in names and frame.groups]
    sync({**os.environ, "PERFAGENT_SERVER": server.url, "XDG_STATE_HOME": str(home)})  # the states of their ends
    return (
        len(sent) == len(set(sent)) == 20
        and all(server.values("loss", source=name) == {step: float(step) for step in range(5)} for name in names)
        and len(server.samples("own")) == 8
        and list((state / "spool").iterdir()) == []
    )
