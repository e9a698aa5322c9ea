from __future__ import annotations

import io
import subprocess
import sys
import time
from pathlib import Path

import pytest
from builders import until

from perfagent.config import AgentConfig
from perfagent.context.console import Console
from perfagent.delivery.sender import Sender
from perfagent.identity import Identity


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def streams(monkeypatch: pytest.MonkeyPatch) -> tuple[io.TextIOWrapper, io.TextIOWrapper]:
    """New streams for this test; called in its body, since pytest puts its own in place between fixtures and test."""
    out, err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    return out, err


def make(folder: Path) -> tuple[Console, Sender, Clock]:
    sender = Sender(AgentConfig(state_dir=folder), Identity(project="p", run="r", attempt=1))
    clock = Clock()
    return Console(sender, clock=clock), sender, clock


def lines(sender: Sender, stream: str = "stdout") -> list[str]:
    return [line for event in sender.events for line in event.data["lines"] if event.data["stream"] == stream]


def test_what_is_printed_is_seen_and_still_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, _ = streams(monkeypatch)
    console, sender, _ = make(tmp_path)
    console.install()
    assert sys.stdout is out
    print("one")
    print("two", end="")
    print("problem", file=sys.stderr)
    console.poll()
    print(" and a half")
    console.poll()
    console.close()
    print("after")
    console.poll()
    out.flush()
    assert lines(sender) == ["one", "two and a half"]
    assert lines(sender, "stderr") == ["problem"]
    assert isinstance(out.buffer, io.BytesIO)
    assert out.buffer.getvalue() == b"one\ntwo and a half\nafter\n"
    assert "write" not in out.__dict__


def test_a_progress_bar_is_one_line_as_on_the_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    streams(monkeypatch)
    console, sender, _ = make(tmp_path)
    console.install()
    for percent in range(101):
        sys.stderr.write(f"\r{percent:3d}%|\x1b[32m###\x1b[0m|")
        if percent % 10 == 0:
            console.poll()
    sys.stderr.write("\n")
    console.poll()
    console.close()
    assert lines(sender, "stderr") == ["100%|###|"]


@pytest.mark.fault
def test_more_than_two_hundred_lines_a_second_are_left_out_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    streams(monkeypatch)
    console, sender, clock = make(tmp_path)
    console.install()
    for n in range(1000):
        print(n)
    console.poll()
    assert lines(sender) == [str(n) for n in range(800, 1000)]
    assert sender.counters["log_lines_left_out"] == 800
    clock.now = 1.0
    print("later")
    console.poll()
    assert lines(sender)[-1] == "later"
    console.close()


WATCHED = """
import sys, tempfile
from pathlib import Path
from perfagent.config import AgentConfig
from perfagent.context.console import Console
from perfagent.delivery.sender import Sender
from perfagent.identity import Identity
def seen():
    out = sys.stdout
    return out.isatty(), out.fileno(), type(out), out is sys.__stdout__, out.encoding
before = seen()
sender = Sender(AgentConfig(state_dir=Path(tempfile.mkdtemp())), Identity(project="p", run="r", attempt=1))
console = Console(sender)
console.install()
assert seen() == before
print("x", flush=True)
console.close()
"""


def test_isatty_descriptor_and_type_stay_what_they_are() -> None:
    assert subprocess.run([sys.executable, "-c", WATCHED], capture_output=True, check=True).stdout == b"x\n"


def test_a_stream_that_cannot_be_watched_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slotted:
        __slots__ = ()

        def write(self, text: str) -> int:
            return len(text)

    monkeypatch.setattr(sys, "stdout", Slotted())
    monkeypatch.setattr(sys, "stderr", None)
    console, _, _ = make(tmp_path)
    console.install()
    assert console._streams == []


@pytest.mark.fault
def test_x10_a_private_key_printed_over_several_ticks_is_never_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    streams(monkeypatch)
    console, sender, _ = make(tmp_path)
    console.install()
    body = [f"MIIEowIBAAKCAQEA{n:04d}" for n in range(20)]
    sys.stdout.write("loading -----BEGIN " + "RSA PRIVATE ")
    console.poll()
    sys.stdout.write("KEY-----\n")
    for line in body:
        sys.stdout.write(line[:7])
        console.poll()
        sys.stdout.write(line[7:] + "\n")
    sys.stdout.write("-----END RSA PRIVATE KEY-----\nstep 1: loss 0.5\n")
    console.poll()
    console.close()
    assert lines(sender) == ["loading [redacted]", "step 1: loss 0.5"]


def test_a_line_after_a_silence_is_told_at_the_next_tick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    streams(monkeypatch)
    console, sender, _ = make(tmp_path)
    told: list[str] = []
    polled: list[None] = []
    monkeypatch.setattr(sender, "event", lambda kind, data: told.extend(data["lines"]))
    monkeypatch.setattr(console, "poll", lambda: (polled.append(None), Console.poll(console)))
    console.install()
    sender.start()
    try:
        print("first")
        assert until(lambda: told == ["first"])
        before = len(polled)
        time.sleep(0.5)  # three ticks
        assert len(polled) == before, "polled although nothing was printed"
        print("second")
        assert until(lambda: told == ["first", "second"])
    finally:
        console.close()
        sender.close("")
