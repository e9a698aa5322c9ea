from __future__ import annotations

import io
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import until
from canaries import BY_VALUE

from perfagent.agent_config import AgentConfig
from perfagent.context.console import MOST_CHARACTERS, MOST_PIECES, Console
from perfagent.delivery.handoff import Sender
from perfagent.identity import Identity
from perfagent.redaction import redacted


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


def told(sender: Sender, stream: str = "stdout") -> list[str]:
    return [line for event in sender.events for line in event.data["lines"] if event.data["stream"] == stream]


def lines(sender: Sender, stream: str = "stdout") -> list[str]:
    """Of the script's own."""
    return [line for line in told(sender, stream) if not line.startswith("[perfagent: ")]


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


def test_a_long_progress_bar_tells_its_state_every_ten_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    streams(monkeypatch)
    console, sender, clock = make(tmp_path)
    console.install()
    for second in range(26):
        clock.now = float(second)
        sys.stderr.write(f"\r{second:3d}%|#|")
        print(end=f"{second} s\r")  # the other way to write one
        console.poll()
    assert lines(sender, "stderr") == [" 10%|#|", " 20%|#|"]
    assert lines(sender) == ["10 s", "20 s"]
    for clock.now in (100.0, 200.0):  # it stands still, and is told once
        console.poll()
    assert lines(sender, "stderr")[2:] == [" 25%|#|"]
    sys.stderr.write("\nnext\n\r  0%|")
    console.poll()
    assert lines(sender, "stderr")[3:] == ["next"]
    clock.now = 209.0
    console.poll()
    assert lines(sender, "stderr")[4:] == []
    console.close()


def test_the_state_of_a_bar_that_is_written_no_more_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams(monkeypatch)
    console, sender, _ = make(tmp_path)
    console.install()
    sys.stderr.write("\r 50%|#|")
    now = time.monotonic()
    assert sender.sources[0].poll_if_due(now)
    assert now + 5 < sender.sources[0].due < now + 15
    sys.stderr.write("\r 51%|#|")
    assert sender.sources[0].due == 0.0
    console.close()


@pytest.mark.fault
def test_the_last_words_need_no_end_of_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    streams(monkeypatch)
    console, sender, _ = make(tmp_path)
    console.install()
    print("\r 37%|###", end="")
    sys.stderr.write("fatal: device ")
    console.poll()
    sys.stderr.write("lost")
    console.poll()
    assert lines(sender, "stderr") == []
    console.close()
    console.poll()
    console.poll()
    assert (lines(sender), lines(sender, "stderr")) == ([" 37%|###"], ["fatal: device lost"])


@pytest.mark.fault
def test_more_than_two_hundred_lines_a_second_are_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams(monkeypatch)
    console, sender, clock = make(tmp_path)
    console.install()
    for n in range(1000):
        print(n)
    console.poll()
    assert lines(sender) == [str(n) for n in range(800, 1000)]
    assert sender.counters["log_lines_left_out"] == 800
    assert told(sender)[0] == "[perfagent: 800 lines left out here]"
    clock.now = 1.0
    print("later")
    console.poll()
    assert told(sender)[-2:] == ["999", "later"], "that there was a gap is said once"
    print("\n".join(map(str, range(201))))
    console.poll()
    clock.now = 1.5
    console.poll()
    print("\n".join("xyz"))
    console.poll()
    assert told(sender)[-3:] == ["x", "y", "z"]
    print(1, file=sys.stderr)
    console.poll()
    console.close()
    assert told(sender, "stderr") == ["1"], "each stream has gaps of its own"


def test_a_gap_at_the_end_is_told_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    streams(monkeypatch)
    console, sender, _ = make(tmp_path)
    console.install()
    for _ in range(3):
        print("\n".join(map(str, range(200))))
        console.poll()
    assert len(told(sender)) == 200
    console.close()
    print("not seen")
    console.poll()
    assert told(sender)[200:] == ["[perfagent: 400 lines left out here]"]


WATCHED = """
import sys, tempfile
from pathlib import Path
from perfagent.agent_config import AgentConfig
from perfagent.context.console import MOST_PIECES, Console
from perfagent.delivery.handoff import Sender
from perfagent.identity import Identity
from perfagent.redaction import redacted
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


class Teed:
    """A stream of a script's own, as they are found in training scripts."""

    def __init__(self, *targets: Any) -> None:
        self.written: list[Any] = []
        self.targets = targets

    def write(self, text: Any, flush: bool = False) -> str:
        for target in self.targets:
            target.write(text)
        self.written.append((text, flush))
        return "written"


class Forwarding:
    """Assignments go to the stream that it writes to."""

    __slots__ = ("_wrapped",)

    def __init__(self, wrapped: Any) -> None:
        object.__setattr__(self, "_wrapped", wrapped)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._wrapped, name, value)

    def write(self, text: str) -> None:
        self._wrapped.write(text)


class ForwardingWithDict(Forwarding):
    """As tqdm's DummyTqdmFile, of the recipe for redirecting prints."""


class Borrowing(Forwarding):
    """Has the dict of the stream that it writes to, as wrapt's proxies have."""

    __slots__ = ()

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        wrapped: Teed = object.__getattribute__(self, "_wrapped")
        return wrapped.__dict__


@pytest.mark.fault
@pytest.mark.parametrize("kind", [Forwarding, ForwardingWithDict, Borrowing])
def test_a_stream_that_hands_assignments_on_can_be_printed_to(
    kind: type[Forwarding], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Teed()
    monkeypatch.setattr(sys, "stdout", kind(real))
    monkeypatch.setattr(sys, "stderr", None)
    before = {**vars(real)}
    console, sender, _ = make(tmp_path)
    console.install()
    assert vars(real) == before, "somebody else's stream was changed"
    print("hello from the training")
    console.poll()
    console.close()
    assert [text for text, _ in real.written] == ["hello from the training", "\n"]
    assert lines(sender) == (["hello from the training"] if kind is ForwardingWithDict else [])
    assert vars(real) == before


def test_the_redirection_of_tqdms_documentation_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, _ = streams(monkeypatch)
    recipe = pytest.importorskip("tqdm.contrib").DummyTqdmFile
    monkeypatch.setattr(sys, "stdout", recipe(out))
    console, sender, _ = make(tmp_path)
    console.install()
    print("hello from the training")
    console.poll()
    console.close()
    out.flush()
    assert lines(sender) == ["hello from the training"]
    assert isinstance(out.buffer, io.BytesIO)
    assert out.buffer.getvalue() == b"hello from the training\n"


@pytest.mark.fault
def test_a_write_takes_what_it_took_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tee: Any = Teed()
    monkeypatch.setattr(sys, "stdout", tee)
    console, sender, _ = make(tmp_path)
    console.install()
    assert tee.write("epoch 1\n", flush=True) == "written"
    assert tee.write(text="epoch 2\n") == "written"
    assert tee.write(b"epoch 3\n") == "written"
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'text'"):
        tee.write()
    console.poll()
    console.close()
    assert tee.written == [("epoch 1\n", True), ("epoch 2\n", False), (b"epoch 3\n", False)]
    assert lines(sender) == ["epoch 1"]


def raising(_: object, *__: object) -> Any:
    raise TypeError("read only")


@pytest.mark.fault
@pytest.mark.parametrize("method", ["__setattr__", "__getattr__", "__getattribute__", "__delattr__"])
def test_a_stream_that_refuses_to_be_looked_at_does_no_harm(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    stream = type("Strict", (), {"write": lambda _, text: written.append(text)})()
    monkeypatch.setattr(sys, "stdout", stream)
    setattr(type(stream), method, raising)
    console, _, _ = make(tmp_path)
    console.install()
    type(stream).write(stream, "x")
    console.close()
    delattr(type(stream), method)
    stream.write("y")
    assert (written, vars(stream)) == (["x", "y"], {})


def test_a_stream_that_writes_in_parts_is_seen_once_and_other_threads_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class InParts(Teed):
        during: Callable[[], None] | None = None

        def write(self, text: str, flush: bool = False) -> str:
            if self.during is not None and text == "main\n":
                self.during()
            for word in text.split(" ") if " " in text else []:
                self.write(word)
            return super().write(text, flush)

    stream: Any = InParts()
    monkeypatch.setattr(sys, "stdout", stream)
    console, sender, _ = make(tmp_path)
    console.install()

    def other_thread() -> None:
        thread = threading.Thread(target=stream.write, args=("other\n",))
        thread.start()
        thread.join(10.0)

    stream.write("one two\n")
    stream.during = other_thread
    stream.write("main\n")
    console.poll()
    console.close()
    assert [text for text, _ in stream.written] == ["one", "two\n", "one two\n", "other\n", "main\n"]
    assert lines(sender) == ["one two", "other", "main"]


def test_a_write_that_somebody_put_there_before_us_is_there_after_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, _ = streams(monkeypatch)
    theirs: list[str] = []
    monkeypatch.setattr(out, "write", theirs.append)
    console, sender, _ = make(tmp_path)
    console.install()
    print("hello")
    console.poll()
    console.close()
    print("after")
    assert theirs == ["hello", "\n", "after", "\n"]
    assert lines(sender) == ["hello"]


@pytest.mark.fault
def test_x10_a_private_key_printed_over_several_ticks_is_never_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.fault
def test_x10_a_private_key_is_neither_state_nor_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    streams(monkeypatch)
    console, sender, clock = make(tmp_path)
    console.install()
    sys.stdout.write("\r-----BEGIN RSA PRIVATE KEY-----")
    console.poll()
    clock.now = 20.0
    console.poll()
    sys.stdout.write("\nMIIEowIBAAKCAQEA0001\n\rMIIEowIBAAKCAQEA0002")
    console.poll()
    clock.now = 40.0
    console.poll()
    console.close()
    console.poll()
    assert lines(sender) == ["[redacted]"]


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


@pytest.mark.fault
def test_x10_of_a_line_without_an_end_the_beginning_is_kept_and_no_half_of_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams(monkeypatch)
    console, sender, _ = make(tmp_path)
    console.install()
    secret = BY_VALUE["github"]
    for before in range(0, 200_000, 997):  # wherever the line is cut
        sys.stdout.write(f"{before} " + "y" * 990 + f" {secret} ")
        if before % 20 == 0:
            console.poll()
    print("end")
    print("next")
    console.poll()
    console.close()
    told = redacted({"lines": lines(sender)})["lines"]
    assert [told[0][:6], told[-1]] == ["0 yyyy", "next"]
    assert secret[20:30] not in "".join(told)


def test_a_line_whose_beginning_was_lost_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    streams(monkeypatch)
    console, sender, _ = make(tmp_path)
    console.install()
    sys.stdout.write("password=")
    console.poll()
    for _ in range(MOST_PIECES):
        sys.stdout.write("-")
    sys.stdout.write("swordfish99")
    sys.stdout.write("\nwhole\n")
    console.poll()
    console.close()
    assert lines(sender) == ["whole"]


@pytest.mark.fault
@pytest.mark.parametrize(("more", "width"), [(0, 2), (1, 2), (7000, 2), (7000, 100)])  # the last ones fill both bounds
def test_what_thousands_of_tiny_writes_push_out_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: int, width: int
) -> None:
    streams(monkeypatch)
    console, sender, _ = make(tmp_path)
    console.install()
    for _ in range(MOST_PIECES + more):
        sys.stdout.write("\n".rjust(width, "-"))
    gone = width * (MOST_PIECES + more - len(console._streams[0].written.pieces))
    assert gone >= width * more
    console.poll()
    assert sender.counters["log_characters_left_out"] == gone
    assert ("characters left out here]" in told(sender)[0]) == bool(gone)
    sys.stdout.write("on\n")
    console.poll()
    console.close()
    assert sender.counters["log_characters_left_out"] == gone, "counted once"


@pytest.mark.fault
def test_of_a_flood_the_end_is_kept_within_bounds_and_no_half_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams(monkeypatch)
    console, sender, _ = make(tmp_path)
    console.install()
    written = console._streams[0].written
    sys.stdout.write("begin\npassword=")
    console.poll()
    chapter = "swordfish99 " + "y" * 1000 + "\n"
    for _ in range(100):
        sys.stdout.write(chapter * 100)
        assert sum(map(len, written.pieces)) < MOST_CHARACTERS + len(chapter) * 100
    print("the last words")
    console.poll()
    sys.stdout.write("z" * (3 * MOST_CHARACTERS) + "\nafter\n")  # one piece alone
    console.poll()
    console.close()
    seen = lines(sender)
    assert seen[0] == "begin"
    assert seen[-1] in ("the last words", "after")
    assert "the last words" in seen
    assert {line[:20] for line in seen} <= {"begin", "swordfish99 yyyyyyyy", "the last words", "after"}
    assert len(seen) <= 202
    kept = sum(len(line) + 1 for line in seen)
    assert sender.counters["log_characters_left_out"] > 100 * 100 * len(chapter) - MOST_CHARACTERS - kept
    assert sender.counters["log_lines_left_out"] < MOST_CHARACTERS / len(chapter)
