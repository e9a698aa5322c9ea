"""Tables, lines and the progress bar: by rich on a terminal, as plain text without rich or without a terminal."""

from __future__ import annotations

import io
import os

import pytest
from command_line import Screenful, python_in_terminal

from perfagent.command_line.terminal_output import Screen, Table, plain_table

TABLE = Table(
    ("RUN", "NAME", "STEP"), [("r1", "a name that is long", "7"), ("r2", "b", "12,000")], right=(2,), narrow=(1,)
)

PAGE = """
from perfagent.command_line.terminal_output import *
screen = Screen()
screen.line("TITLE", "bold red")
screen.table(Table(("RUN", "NAME", "STEP"), [("r1", "a name that is long", "7"), ("r2", "b", "12,000")], right=(2,), narrow=(1,)))
with screen.progress("step", 40) as bar:
    for done in range(41):
        bar.move(done, "running")
print("color" if screen.console is not None and screen.console.color_system else "none")
"""


def page(*, rich: bool, columns: int = 80, **environment: str) -> Screenful:
    code = PAGE if rich else f"import sys; sys.modules['rich'] = None\n{PAGE}"
    return python_in_terminal(["-c", code], {**os.environ, **environment}, columns=columns)


def table_of(drawn: Screenful) -> list[str]:
    table = [line for line in drawn.text.splitlines() if line.startswith(("RUN", "r1", "r2"))]
    assert len(table) == 3
    return table


def test_a_pipe_gets_whole_lines_and_no_control_characters() -> None:
    stream = io.StringIO()
    screen = Screen(stream)
    screen.line("TITLE", "bold red")
    screen.table(TABLE)
    screen.line("a\x1b[2Jb\x9bc\td")
    screen.table(Table(("\x1b]0;x\x07",), [("\x1b[31m",)]))
    with screen.progress("step", 1000) as bar:
        for done in range(0, 1501, 50):
            bar.move(done, "running")
    assert screen.width is None and screen.console is None
    lines, unknown = stream.getvalue().splitlines(), "\N{REPLACEMENT CHARACTER}"
    assert lines[:5] == [
        "TITLE",
        "RUN  NAME                   STEP",
        "r1   a name that is long       7",
        "r2   b                    12,000",
        f"a{unknown}[2Jb{unknown}c\td",
    ]
    assert not {"\x1b", "\x9b", "\x07"} & set(stream.getvalue())
    assert lines[7:] == [f"step {done:,}/1,000  running" for done in range(0, 1001, 100)]


def test_a_table_is_no_wider_than_the_terminal() -> None:
    for width in (20, 25, 30):
        lines = plain_table(TABLE, width)
        assert max(map(len, lines)) < width
        assert lines[1].startswith("r1") and lines[1].rstrip().endswith("7") and "…" in lines[1], (
            "the name alone is cut"
        )
    wide = Table(("RUN", "STATE", "STARTED"), [("a-long-id-of-a-run", "finished", "2026-11-24 22:21:07")], narrow=(1,))
    assert plain_table(wide, 30) == ["RUN                 STATE", "a-long-id-of-a-run  finis…"]


@pytest.mark.real
@pytest.mark.parametrize("rich", [True, False])
def test_rich_draws_the_same_words_in_color_on_a_terminal(rich: bool) -> None:
    drawn = page(rich=rich, columns=25)
    assert drawn.code == 0, drawn.sent
    assert ("\x1b[1;31mTITLE" in drawn.sent, "\x1b" in drawn.sent) == (rich, rich)
    assert not rich or "r1   a name tha…       7" in drawn.text
    assert rich or {"TITLE", "step 40/40  running"} <= set(drawn.text.splitlines())
    assert "40/40" in drawn.text and drawn.text.rstrip().endswith("color" if rich else "none")
    assert max(map(len, table_of(drawn))) < 25


@pytest.mark.real
def test_no_color_and_a_dumb_terminal_are_honored() -> None:
    assert "\x1b[1;31m" not in page(rich=True, NO_COLOR="1").sent
    assert "\x1b" not in page(rich=True, TERM="dumb").sent
