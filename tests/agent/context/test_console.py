"""What a script prints is seen, and still printed: by the very streams that it prints to."""

from __future__ import annotations

import io
import os
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from canaries import BY_VALUE

from perfagent.agent_config import AgentConfig
from perfagent.context.console import MOST_CHARACTERS, Console
from perfagent.delivery.sender import Sender
from perfagent.identity import Identity
from perfagent.redaction import redacted


class Watched:
    """A console that is watched, and a clock that a test moves. out, err: its streams."""

    def __init__(self, folder: Path, out: Any, err: Any) -> None:
        self.out, self.err, self.now = out, err, 0.0
        self.sender = Sender(AgentConfig(state_dir=folder), Identity(project="p", run="r", attempt=1))
        self.console = Console(self.sender, clock=lambda: self.now)
        self.console.install()
        self.close = self.console.close

    def poll(self, now: float | None = None) -> None:
        self.now = self.now if now is None else now
        self.console.poll()

    def end(self) -> None:
        self.close()
        self.poll()

    def told(self, stream: str = "stdout") -> list[str]:
        return [line for one in self.sender.events for line in one.data["lines"] if one.data["stream"] == stream]

    def lines(self, stream: str = "stdout") -> list[str]:
        """Of the script's own."""
        return [line for line in self.told(stream) if not line.startswith("[perfagent: ")]

    def printed(self) -> str:
        self.out.flush()
        return self.out.buffer.getvalue().decode()


Watch = Callable[..., Watched]


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """watch(stdout=, stderr=): from then on; pytest puts streams of its own in place between fixtures and test."""
    begun: list[Watched] = []

    def begin(**streams: Any) -> Watched:
        for name in ("stdout", "stderr"):
            streams.setdefault(name, io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
            monkeypatch.setattr(sys, name, streams[name])
        begun.append(Watched(tmp_path, streams["stdout"], streams["stderr"]))
        return begun[-1]

    yield begin
    for watched in begun:
        watched.close()


def test_what_is_printed_is_seen_and_still_printed(watch: Watch) -> None:
    """The last words need no end of line."""
    watched = watch()
    assert sys.stdout is watched.out
    print("one\ntwo", end="")
    sys.stderr.write("fatal: device ")
    watched.poll()
    print(" and a half\n\r 37%|###", end="")
    sys.stderr.write("lost")
    watched.poll()
    assert (watched.lines(), watched.lines("stderr")) == (["one", "two and a half"], [])
    watched.close()
    print("after")
    watched.poll()
    assert (watched.lines()[2:], watched.lines("stderr")) == ([" 37%|###"], ["fatal: device lost"])
    assert watched.printed() == "one\ntwo and a half\n\r 37%|###after\n"
    assert "write" not in watched.out.__dict__


def test_a_long_progress_bar_tells_its_state_every_ten_seconds(watch: Watch) -> None:
    watched = watch()
    for second in range(26):
        sys.stderr.write(f"\r{second:3d}%|\x1b[32m#\x1b[0m|")
        print(end=f"{second} s\r")  # the other way to write one
        watched.poll(float(second))
    assert watched.lines("stderr") == [" 10%|#|", " 20%|#|"]
    assert watched.lines() == ["10 s", "20 s"]
    watched.poll(100.0)
    watched.poll(200.0)  # it stands still, and is told once
    assert watched.lines("stderr")[2:] == [" 25%|#|"]
    sys.stderr.write("\nnext\n\r  0%|")
    watched.poll()
    assert watched.lines("stderr")[3:] == ["next"]
    watched.poll(209.0)
    assert watched.lines("stderr")[4:] == []


@pytest.mark.fault
def test_more_than_200_lines_a_second_are_left_out_and_counted(watch: Watch) -> None:
    """Each stream has gaps of its own, and each is told once; the last one at the end."""
    watched = watch()
    for n in range(1000):
        print(n)
    watched.poll()
    assert watched.lines() == [str(n) for n in range(800, 1000)]
    assert watched.sender.counters["log_lines_left_out"] == 800
    assert "800 lines" in watched.told()[0]
    print("later")
    watched.poll(1.0)
    assert watched.told()[-2:] == ["999", "later"]
    print("\n".join(map(str, range(201))))
    watched.poll()
    print(1, file=sys.stderr)
    watched.poll(1.5)
    assert watched.told("stderr") == ["1"]
    watched.end()
    assert len([line for line in watched.told() if "left out" in line]) == 2


# ---- streams of many kinds


def test_isatty_descriptor_and_type_stay_what_they_are(watch: Watch) -> None:
    terminal, other_end = os.openpty()
    with os.fdopen(other_end, "w") as out:
        before = out.isatty(), out.fileno(), type(out), out.encoding
        watched = watch(stdout=out)
        assert (sys.stdout, out.isatty(), out.fileno(), type(out), out.encoding) == (out, *before)
        print("x", flush=True)
        assert os.read(terminal, 100) == b"x\r\n"
        watched.end()
        assert watched.lines() == ["x"]
    os.close(terminal)


class Slotted:
    __slots__ = ()

    def write(self, text: str) -> int:
        return len(text)


class Teed:
    """A stream of a script's own, as they are found in training scripts."""

    def __init__(self) -> None:
        self.written: list[Any] = []

    def write(self, text: Any, flush: bool = False) -> str:
        self.written.append((text, flush))
        return "written"


@pytest.mark.fault
def test_a_write_takes_what_it_took_before(watch: Watch) -> None:
    """Of a stream that can be watched, and of one that cannot."""
    tee: Any = Teed()
    watched = watch(stdout=tee, stderr=Slotted())
    print("hello", file=sys.stderr)
    assert tee.write("epoch 1\n", flush=True) == "written"
    assert tee.write(text="epoch 2\n") == tee.write(b"epoch 3\n") == "written"
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'text'"):
        tee.write()
    watched.end()
    assert tee.written == [("epoch 1\n", True), ("epoch 2\n", False), (b"epoch 3\n", False)]
    assert (watched.lines(), watched.lines("stderr")) == (["epoch 1"], [])


# ---- secrets


@pytest.mark.fault
def test_x10_a_private_key_over_several_ticks_is_never_kept(watch: Watch) -> None:
    watched = watch()
    for piece in (
        "loading -----BEGIN " + "RSA PRIVATE ",
        "KEY-----\nMIIEowI",
        *(f"BAAKCAQEA{n:04d}\nMIIEowI" for n in range(20)),
    ):
        sys.stdout.write(piece)
        watched.poll()
    sys.stdout.write("\n-----END RSA PRIVATE KEY-----\nstep 1: loss 0.5\n")
    watched.poll()
    assert watched.lines() == ["loading [redacted]", "step 1: loss 0.5"]


@pytest.mark.fault
def test_x10_an_endless_line_keeps_no_half_of_a_secret(watch: Watch) -> None:
    watched, secret = watch(), BY_VALUE["github"]
    for before in range(0, 200_000, 997):  # wherever the line is cut
        sys.stdout.write(f"{before} " + "y" * 990 + f" {secret} ")
        if before % 20 == 0:
            watched.poll()
    print("end\nnext")
    watched.poll()
    told = redacted({"lines": watched.lines()})["lines"]
    assert [told[0][:6], told[-1]] == ["0 yyyy", "next"]
    assert secret[20:30] not in "".join(told)


# ---- floods


@pytest.mark.fault
def test_of_a_flood_the_end_is_kept_within_bounds(watch: Watch) -> None:
    """And no half line."""

    class Sink:
        def write(self, text: str) -> int:
            return len(text)

    watched = watch(stdout=Sink())
    sys.stdout.write("begin\npassword=")
    watched.poll()
    chapter = "swordfish99 " + "y" * 1000 + "\n"
    tracemalloc.start()
    for _ in range(100):
        sys.stdout.write(chapter * 100)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < 2 * MOST_CHARACTERS, "10 MB were written"
    print("the last words")
    watched.end()
    seen, counters = watched.lines(), watched.sender.counters
    assert (seen[0], seen[-1], len(seen) <= 202) == ("begin", "the last words", True)
    assert {line[:20] for line in seen} <= {"begin", "swordfish99 yyyyyyyy", "the last words"}
    kept = sum(len(line) + 1 for line in seen)
    assert counters["log_characters_left_out"] > 100 * 100 * len(chapter) - MOST_CHARACTERS - kept
