"""Rows of the fault matrix that need real processes or a real server. Every test checks what was stored, sample by sample."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import free_port, until
from ingest_server import IngestServer, Scripted

from perfagent.config import AgentConfig
from perfagent.delivery.sender import Sender
from perfagent.delivery.spool import Spool
from perfagent.identity import Identity
from perfagent.wire import Frame

NAMES = ("loss", "lr")
SERVER = """
import sys, time
from ingest_server import IngestServer
with IngestServer(port=int(sys.argv[1])) as server:
    print("ready", flush=True)
    for line in sys.stdin:
        print(*sorted(server.values("loss")), flush=True)
"""
TESTS = Path(__file__).parents[2]


def row(step: int, loss: float = 0.5) -> tuple[Any, ...]:
    return step, time.time(), time.monotonic(), NAMES, (loss, 1e-3)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Sender]]:
    """Makes senders that are started, and ends those that a test left running."""
    made: list[Sender] = []

    def build(server: str, **more: Any) -> Sender:
        settings = AgentConfig(server=server, state_dir=tmp_path / "state", **more)
        sender = Sender(settings, Identity(project="p", run="r", attempt=1))
        sender.start()
        made.append(sender)
        return sender

    yield build
    for sender in made:
        sender.close("")


class ServerProcess:
    """The ingest server in a process of its own, so that it can be stopped and killed."""

    def __init__(self, port: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(TESTS)},
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def steps(self) -> list[int]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return [int(word) for word in self.process.stdout.readline().split()]

    def end(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.communicate()


# ---- A01 to A03: no server, a stopped one


@pytest.mark.fault
def test_a01_without_a_server_the_start_is_quick_and_says_so_once(
    make: Callable[..., Sender], caplog: pytest.LogCaptureFixture
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with caplog.at_level(logging.WARNING, "perfagent"):
        began = time.monotonic()
        sender = make(url)
        assert time.monotonic() - began <= 0.25
        for step in range(10):
            sender.rows.append(row(step))
        until(lambda: sender.counters["failed"] >= 2, why="it does not try again")
    expected = f"perfagent: server {url} unreachable, recording to {sender.spool.folder}; will retry"
    assert [record.message for record in caplog.records] == [expected]
    began = time.monotonic()
    sender.close("finished")
    assert time.monotonic() - began <= 2.0
    frames = []
    left = Spool.open(sender.spool.folder)
    while (frame := left.next()) is not None:
        frames.append(frame)
        left.ack(frame.seq)
    assert [s for f in frames for g in f.groups for s in g.steps()] == list(range(10))
    assert [e.data["state"] for f in frames for e in f.events] == ["finished"]


@pytest.mark.fault
def test_a01_a_server_that_comes_later_gets_everything(make: Callable[..., Sender]) -> None:
    port = free_port()
    sender = make(f"http://127.0.0.1:{port}")
    for step in range(100):
        sender.rows.append(row(step))
    until(lambda: sender.counters["failed"] >= 1)
    with IngestServer(port=port) as server:
        sender.rows.append(row(100))
        until(lambda: len(server.values("loss")) == 101, within_s=40, why="the backlog never came")
        sender.close("finished")
    assert sorted(server.values("loss")) == list(range(101))
    assert not sender.spool.folder.exists()


@pytest.mark.fault
def test_a02_a_stopped_server_delays_neither_append_nor_exit_and_gets_all_when_it_wakes(make: Callable[..., Sender]) -> None:
    port = free_port()
    server = ServerProcess(port)
    try:
        sender = make(f"http://127.0.0.1:{port}")
        for step in range(50):
            sender.rows.append(row(step))
        assert sender.flush(10)
        server.process.send_signal(signal.SIGSTOP)
        slowest, control = 0.0, 0.0
        nothing: list[int] = []
        for step in range(50, 350):
            given = row(step)
            began = time.perf_counter()
            nothing.append(step)
            between = time.perf_counter()
            sender.rows.append(given)
            slowest = max(slowest, time.perf_counter() - between)
            control = max(control, between - began)
            time.sleep(0.005)
        assert slowest <= control + 0.005  # wall time beside the same loop without us: what the machine itself delays is in both
        until(lambda: sender.counters["spooled"] == 700)
        server.process.send_signal(signal.SIGCONT)
        until(lambda: sender.spool.waiting == 0, within_s=40)
        assert server.steps() == list(range(350))
        server.process.send_signal(signal.SIGSTOP)
        sender.rows.append(row(350))
        began = time.monotonic()
        sender.close("finished")
        assert time.monotonic() - began <= 2.0
    finally:
        server.end()


@pytest.mark.fault
def test_a03_a_slow_server_gets_every_sample_once(make: Callable[..., Sender]) -> None:
    with IngestServer(Scripted(delay_s=1.0, store=True, cut=True), Scripted(body=b"x" * 50, slow_s=0.02, store=True)) as server:
        sender = make(server.url)
        for step in range(20):
            sender.rows.append(row(step))
        until(lambda: server.script == [] and sender.spool.waiting == 0, within_s=40)
        assert sorted(server.values("loss")) == list(range(20))


# ---- A04: cut connections


@pytest.mark.fault
def test_a04_cut_connections_before_and_after_storing_lose_and_double_nothing(make: Callable[..., Sender]) -> None:
    seeded = random.Random(4)

    def cut(_: Frame) -> Scripted | None:
        draw = seeded.random()
        if draw < 0.3:
            return Scripted(cut=True)
        if draw < 0.6:
            return Scripted(cut=True, store=True)
        return None

    with IngestServer(rule=cut) as server:
        sender = make(server.url, flush_s=0.05, spool_tick_s=0.02)
        sender._dispatch()._random = random.Random(4)
        sender._dispatch()._random.uniform = lambda a, b: 0.01  # type: ignore[method-assign] # no real pauses in a test of 100 cuts
        for step in range(400):
            sender.rows.append(row(step))
            time.sleep(0.005)
        server.rule = None
        until(lambda: sender.spool.waiting == 0 and sender._dispatch()._busy is None, within_s=40)
        assert sorted(server.values("loss")) == list(range(400))
        assert len(server.frames) > len(server.stored)


# ---- A06 to A10: answers


@pytest.mark.fault
def test_a06_the_pause_that_the_server_asks_for_is_kept(make: Callable[..., Sender]) -> None:
    with IngestServer(Scripted(status=429, headers={"Retry-After": "2"})) as server:
        sender = make(server.url)
        sender.rows.append(row(1))
        until(lambda: len(server.received) >= 2)
        assert server.received[1] - server.received[0] >= 1.95
        assert sorted(server.values("loss")) == [1]


@pytest.mark.fault
def test_a07_frames_are_halved_until_the_server_takes_them_and_one_row_too_many_is_set_aside(
    make: Callable[..., Sender], caplog: pytest.LogCaptureFixture
) -> None:
    def limit(frame: Frame) -> Scripted | None:
        rows = sum(group.rows for group in frame.groups)
        bad = any(13 in group.steps() for group in frame.groups)
        return Scripted(status=413) if rows > 4 or (bad and rows) else None

    with IngestServer(rule=limit) as server, caplog.at_level(logging.WARNING, "perfagent"):
        sender = make(server.url)
        for step in range(32):
            sender.rows.append(row(step))
        sender.event("alert", {"title": "with them"})
        until(lambda: len(server.values("loss")) == 31, within_s=30)
        until(lambda: sender.counters["quarantined_frames"] == 1)
        assert sorted(server.values("loss")) == [s for s in range(32) if s != 13]
        assert server.events("alert") == [{"title": "with them"}]
        assert sender.counters["rejected"] == 2
    assert (sender.spool.folder / "quarantine").stat().st_size > 0
    assert len(caplog.records) == 1


@pytest.mark.fault
@pytest.mark.parametrize("status", [400, 422])
def test_a08_what_is_refused_is_told_once_and_the_rest_goes_on(
    make: Callable[..., Sender], caplog: pytest.LogCaptureFixture, status: int
) -> None:
    with IngestServer(Scripted(status=status), Scripted(status=status)) as server, caplog.at_level(logging.WARNING, "perfagent"):
        sender = make(server.url, flush_s=0.1)
        for step in range(3):
            sender.rows.append(row(step))
            until(lambda step=step: sender.counters["sent_frames"] == step + 1)
        assert sender.flush(10)
        assert sorted(server.values("loss")) == [2]
        assert sender.counters["rejected"] == 4
        assert len([r for r in caplog.records if f"status {status}" in r.message]) == 1
        assert len(server.frames) == 3


@pytest.mark.fault
@pytest.mark.parametrize("status", [401, 403])
def test_a09_a_wrong_key_is_told_once_with_the_variable_and_samples_are_kept(
    make: Callable[..., Sender], caplog: pytest.LogCaptureFixture, status: int
) -> None:
    with IngestServer(Scripted(status=status)) as server, caplog.at_level(logging.WARNING, "perfagent"):
        sender = make(server.url)
        sender.rows.append(row(1))
        until(lambda: sender.counters["failed"] == 1)
        assert 55 <= sender._dispatch()._retry_at - time.monotonic() <= 60
        sender.rows.append(row(2))
        until(lambda: sender.counters["spooled"] == 4)
        assert [record.levelno for record in caplog.records] == [logging.ERROR]
        assert "PERFAGENT_API_KEY" in caplog.text
        sender._dispatch()._retry_at = 0.0  # the minute is over
        assert sender.flush(10)
        assert sorted(server.values("loss")) == [1, 2]


@pytest.mark.fault
@pytest.mark.parametrize(
    "answer",
    [
        Scripted(body=b"<html>Log in to the hotel's network</html>"),
        Scripted(status=204, body=b""),
        Scripted(status=302, headers={"Location": "/login"}),
    ],
    ids=["html", "204", "redirect"],
)
def test_a10_a_foreign_answer_is_no_acknowledgement(
    make: Callable[..., Sender], caplog: pytest.LogCaptureFixture, answer: Scripted
) -> None:
    with IngestServer(answer) as server, caplog.at_level(logging.WARNING, "perfagent"):
        sender = make(server.url)
        sender.rows.append(row(1))
        until(lambda: sorted(server.values("loss")) == [1], within_s=30)
        assert "no perfagent server" in caplog.text
        assert len(server.frames) >= 2
        assert {frame.seq for frame in server.frames if frame.groups} == {server.frames[0].seq}


# ---- A11, A17: killed processes


LOGGER = """
import sys, time, os
from pathlib import Path
from perfagent.config import AgentConfig
from perfagent.delivery.sender import Sender
from perfagent.identity import Identity
sender = Sender(AgentConfig(server=sys.argv[1], state_dir=Path(sys.argv[2])), Identity(project="p", run="r", attempt=1))
sender.start()
step = 0
while True:
    step += 1
    sender.rows.append((step, time.time(), time.monotonic(), ("loss",), (0.5 * step,)))
    os.write(1, b"%d %.6f\\n" % (step, time.monotonic()))
    time.sleep(0.001)
"""


@pytest.mark.fault
def test_a11_kill_9_at_random_loses_at_most_the_last_ticks_and_doubles_nothing(
    make: Callable[..., Sender], tmp_path: Path
) -> None:
    """6 kills here, 200 in scripts/faults. The bar is 200 ms; a busy machine may delay a tick, so twice that is allowed."""
    seeded = random.Random(11)
    with IngestServer() as server:
        for attempt in range(6):
            state = tmp_path / f"killed{attempt}"
            child = subprocess.Popen([sys.executable, "-c", LOGGER, server.url, str(state)], stdout=subprocess.PIPE)
            assert child.stdout is not None
            child.stdout.readline()
            time.sleep(0.3 + 1.5 * seeded.random())
            child.kill()
            killed = time.monotonic()
            said = [line.split() for line in child.communicate()[0].splitlines() if line.count(b" ") == 1 and b"." in line]
            (folder,) = (state / "spool").iterdir()
            settings = AgentConfig(server=server.url, state_dir=state)
            successor = Sender(settings, Identity(project="p", run="next", attempt=2))
            successor.start()
            successor.rows.append(row(1))
            until(lambda folder=folder: not folder.exists(), why="the orphan was never sent")
            successor.close("")
            stored = server.values("loss", source=folder.name)
            assert sorted(stored) == list(range(1, len(stored) + 1))
            assert all(value == 0.5 * step for step, value in stored.items())
            lost = [float(moment) for step, moment in said if int(step) > len(stored)]
            assert not lost or killed - lost[0] <= 0.4, f"lost {len(lost)} samples from the last {killed - lost[0]:.3f} s"


@pytest.mark.fault
def test_a17_what_was_meant_for_another_server_is_not_sent_to_this_one(make: Callable[..., Sender], tmp_path: Path) -> None:
    elsewhere = make(f"http://127.0.0.1:{free_port()}")
    elsewhere.rows.append(row(1))
    until(lambda: elsewhere.counters["spooled"] == 2)
    elsewhere.close("finished")
    with IngestServer() as server:
        sender = make(server.url)
        sender.rows.append(row(2))
        until(lambda: sender._dispatch()._orphans == [], why="orphans were never looked for")
        assert sorted(server.values("loss")) == [2]
    assert elsewhere.spool.folder.exists()


# ---- A14: forks


FORKS = """
import os, sys, threading, time, logging
from pathlib import Path
from perfagent.config import AgentConfig
from perfagent.delivery.sender import Sender
from perfagent.identity import Identity
logging.basicConfig()
sender = Sender(AgentConfig(server=sys.argv[1], state_dir=Path(sys.argv[2])), Identity(project="p", run="r", attempt=1))
sender.start()
stop = False
def write():
    n = 0
    while not stop:
        n += 1
        sender.rows.append((n, time.time(), time.monotonic(), ("noise",), (1.0,)))
        sender.event("log", {"lines": [str(n)]}) if n % 100 == 0 else None
        time.sleep(0.0005)
threads = [threading.Thread(target=write) for _ in range(3)]
[t.start() for t in threads]
bad = 0
for fork in range(int(sys.argv[3])):
    pid = os.fork()
    if pid == 0:
        try:
            before = set(os.listdir("/proc/self/fd"))
            sender.rows.append((1, 0.0, 0.0, ("child",), (1.0,)))
            sender.event("alert", {"title": "from a child"})
            assert not sender.flush(1.0)
            sender.start()
            sender.close("finished")
            mine = [os.readlink(f"/proc/self/fd/{fd}") for fd in before if os.path.exists(f"/proc/self/fd/{fd}")]
            assert not [name for name in mine if "socket" in name or "spool" in name], mine
            assert threading.active_count() == 1 and len(os.listdir("/proc/self/task")) == 1
            os._exit(0)
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(1)
    deadline = time.monotonic() + 10
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            bad += status != 0
            break
        if time.monotonic() > deadline:
            os.kill(pid, 9); os.waitpid(pid, 0); bad += 1
            break
        time.sleep(0.001)
stop = True
[t.join() for t in threads]
assert sender.flush(10), "the parent no longer delivers"
sender.close("finished")
print("bad", bad)
"""


@pytest.mark.fault
def test_a14_fifty_forks_under_load_never_hang_and_their_children_are_inert(tmp_path: Path) -> None:
    with IngestServer() as server:
        done = subprocess.run(
            [sys.executable, "-c", FORKS, server.url, str(tmp_path / "state"), "50"], capture_output=True, text=True, timeout=120
        )
        assert (done.stdout, done.returncode) == ("bad 0\n", 0), done.stderr
        assert not any("child" in group.values for frame in server.frames for group in frame.groups)
        assert len({frame.source for frame in server.frames}) == 1
        assert server.events("alert") == []
        assert server.states() == ["finished"]


WORKERS = """
import sys, time, torch
from pathlib import Path
from torch.utils.data import DataLoader, Dataset
from perfagent.config import AgentConfig
from perfagent.delivery.sender import Sender
from perfagent.identity import Identity
class Numbers(Dataset):
    def __len__(self): return 64
    def __getitem__(self, i): return torch.tensor([float(i)])
if __name__ == "__main__":
    sender = Sender(AgentConfig(server=sys.argv[1], state_dir=Path(sys.argv[2])), Identity(project="p", run="r", attempt=1))
    sender.start()
    seen = 0.0
    for batch in DataLoader(Numbers(), batch_size=8, num_workers=2, multiprocessing_context=sys.argv[3]):
        seen += float(batch.sum())
        sender.rows.append((int(seen), time.time(), time.monotonic(), ("loss",), (seen,)))
    sender.close("finished")
    print(seen)
"""


@pytest.mark.fault
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a14_workers_of_every_start_method_leave_the_agent_alone(tmp_path: Path, method: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(WORKERS)
    with IngestServer() as server:
        command = [sys.executable, str(script), server.url, str(tmp_path / "state"), method]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (done.stdout, done.returncode) == ("2016.0\n", 0), done.stderr
        assert len({frame.source for frame in server.frames}) == 1
        assert len(server.values("loss")) == 8
        assert server.states() == ["finished"]


# ---- I7: the end of a process


ENDS = """
import sys, time, atexit
from pathlib import Path
from perfagent.config import AgentConfig
from perfagent.delivery.sender import Sender
from perfagent.identity import Identity
sender = Sender(AgentConfig(server=sys.argv[1], state_dir=Path(sys.argv[2])), Identity(project="p", run="r", attempt=1))
sender.start()
atexit.register(sender.close, "finished")
sender.rows.append((1, time.time(), time.monotonic(), ("loss",), (1.0,)))
time.sleep(0.5)
print(time.monotonic(), flush=True)
{how}
"""


@pytest.mark.fault
@pytest.mark.parametrize("server", ["dead", "stopped", "slow"])
@pytest.mark.parametrize(
    ("how", "code"),
    [("", 0), ("sys.exit(3)", 3), ("raise KeyboardInterrupt", -signal.SIGINT), ("raise ValueError('x')", 1)],
    ids=["end", "exit", "ctrl-c", "raise"],
)
def test_a13_a_process_ends_within_two_seconds_with_its_own_code(tmp_path: Path, server: str, how: str, code: int) -> None:
    port = free_port()
    stopped = ServerProcess(port) if server == "stopped" else None
    slow = IngestServer(port=port, rule=lambda _: Scripted(delay_s=30.0)) if server == "slow" else None
    try:
        if stopped is not None:
            stopped.process.send_signal(signal.SIGSTOP)
        if slow is not None:
            slow.__enter__()
        command = [sys.executable, "-c", ENDS.format(how=how), f"http://127.0.0.1:{port}", str(tmp_path / "state")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert time.monotonic() - float(done.stdout) <= 2.3  # and what starting to wait for it takes
        assert done.returncode == code
    finally:
        if stopped is not None:
            stopped.end()
        if slow is not None:
            slow.close()


# ---- A15: a disk that is really full


@pytest.mark.fault
def test_a15_a_full_file_system_is_told_once_and_delivery_goes_on(
    make: Callable[..., Sender], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(state)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("this user may not mount a tmpfs")
    try:
        with IngestServer() as server, caplog.at_level(logging.WARNING, "perfagent"):
            sender = make(server.url)
            (state / "filler").write_bytes(b"")
            with (state / "filler").open("ab", buffering=0) as filler:
                try:
                    while filler.write(bytes(4096)):
                        pass
                except OSError:
                    pass
            for step in range(200):
                sender.rows.append(row(step))
                time.sleep(0.005)
            assert sender.flush(10)
            assert sorted(server.values("loss")) == list(range(200))
            assert len([r for r in caplog.records if "cannot be written" in r.message]) == 1
            (state / "filler").unlink()
            until(lambda: (sender.event("phase", {}), sender.spool.error is None)[1], every_s=0.2, why="space is back unnoticed")
            sender.close("finished")
            assert server.states() == ["finished"]
    finally:
        subprocess.run(["umount", "-l", str(state)], check=True)
