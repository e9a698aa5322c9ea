"""Lines of a terminal with progress bars, as a reader sees them."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable

import pytest

from perfagent.context.terminal import MOST_BARS, Screen

tqdm = pytest.importorskip("tqdm").tqdm
rich = pytest.importorskip("rich.progress")


def two_bars_of_tqdm() -> str:
    stream = io.StringIO()
    shown = {"file": stream, "ncols": 60, "mininterval": 0}
    for epoch in tqdm(range(2), desc="epoch", **shown):
        for _ in tqdm(range(5), desc="batch", leave=False, **shown):
            pass
        tqdm.write(f"epoch {epoch} is over", file=stream)
    return stream.getvalue() + "done\n"


def two_bars_of_rich() -> str:
    stream = io.StringIO()
    console = pytest.importorskip("rich.console").Console(file=stream, force_terminal=True, width=80)
    columns = (*rich.Progress.get_default_columns()[:1], "{task.completed}")
    with rich.Progress(*columns, console=console, auto_refresh=False) as progress:
        epochs, batches = progress.add_task("epoch"), progress.add_task("batch")
        for done in range(1, 7):
            progress.update(batches, completed=done, refresh=True)
            if done % 3 == 0:
                progress.update(epochs, completed=done // 3, refresh=True)
                console.print(f"epoch {done // 3} is over")
    return stream.getvalue() + "done\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (two_bars_of_tqdm, ["epoch 0 is over", "epoch 1 is over", "epoch: 100%", "done"]),
        (two_bars_of_rich, ["epoch 1 is over", "epoch 2 is over", "epoch 2", "batch 6", "done"]),
    ],
)
@pytest.mark.parametrize("at_once", [1_000_000, 400])
def test_several_bars_are_a_line_each_as_on_the_screen(text: Callable[[], str], shown: list[str], at_once: int) -> None:
    screen, whole = Screen(), text()
    told = [line for at in range(0, len(whole), at_once) for line in screen.lines(whole[at : at + at_once], 0.0)]
    told += screen.lines("", 0.0, last=True)
    up_to_the_bar = [line.partition("|")[0].rstrip() for line in told]
    if at_once > len(whole):
        assert up_to_the_bar == shown
    else:  # what was written when the cursor was below may count as complete, if nothing took it up again at once
        assert len(told) <= len(shown) + len(whole) // at_once
        assert up_to_the_bar[-1] == "done"


@pytest.mark.fault
def test_a_cursor_that_goes_anywhere_does_no_harm() -> None:
    words = ("\x1b[9999999A", "\x1b[999A", "\x1b[", "\n\n", "\r", "x", "\x1b[2K")
    for chosen in itertools.product(words, repeat=2):
        screen = Screen()
        told = [line for word in chosen for line in screen.lines(word, 0.0)]
        assert "end" in [*told, *screen.lines("\nend", 0.0, last=True)]
    screen = Screen()
    for row in range(1000):
        screen.lines(f"{row}\n\n\x1b[A", 0.0)
    assert len(screen.lines("", 0.0, last=True)) <= 2 * MOST_BARS


@pytest.mark.fault
def test_x10_a_private_key_between_bars_is_no_line_nor_state() -> None:
    screen, told = Screen(), []
    body = [f"MIIEowIBAAKCAQEA{n:04d}" for n in range(5)]
    for now, line in enumerate(["-----BEGIN RSA PRIVATE KEY-----", *body, "-----END RSA PRIVATE KEY-----", "step 1"]):
        told += screen.lines(f"\x1b[1A\r{line}\nepoch\nbatch", 20.0 * now)
    told += screen.lines("", 1000.0, last=True)
    assert [line for line in told if "MII" in line or "RSA" in line] == []
    assert "step 1" in told
