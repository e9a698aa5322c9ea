"""perfagent watch: the terminal application against a real server."""

from __future__ import annotations

import asyncio
import functools
import os
import re
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from builders import ServerProcess, server_process
from command_line import command, in_terminal
from recorded import log

pytestmark = pytest.mark.real

Open = Callable[..., Any]


def in_a_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**given: Any) -> None:
        asyncio.run(test(**given))

    return run


def alert_of(site: ServerProcess, run: str) -> dict[str, Any]:
    return next(one for one in site.get("/alerts")["alerts"] if (one["run"], one["rule"]) == (run, "nonfinite_loss"))


@in_a_loop
async def test_what_needs_somebody_is_first_and_moves_with_what_comes(opened: Open, site: ServerProcess) -> None:
    name = f"new-{uuid.uuid4().hex[:6]}"
    async with opened() as seen:
        text = await seen.shows("live", "ill run", "The loss became NaN in step 31", "NaN", "going", "fine [b]run[/b]")
        lines = text.splitlines()
        assert "✕ critical" in lines[2] and "ill run" in lines[2] and "▁×" in lines[2]
        for step in range(1, 4):
            log(site, name, step, loss=float("nan"))
        text = await seen.until(lambda text: "✕ critical" in text and name in text.splitlines()[2])
        assert "NaN" in text.splitlines()[2]
        await seen.until(lambda text: "2 to look at" in text)
        log(site, name, 1234, loss=0.5)
        await seen.shows("1,234")
    site.admin("DELETE", f"/runs/{alert_run(site, name)}")


def alert_run(site: ServerProcess, name: str) -> str:
    return str(site.get("/runs", name=name)["runs"][0]["run"])


@in_a_loop
async def test_the_filter_takes_words_and_enter_opens_a_run(opened: Open) -> None:
    async with opened(columns=100, rows=40) as seen:
        await seen.shows("ill run", "going")
        await seen.pilot.press("slash", *"going RUN")
        text = await seen.until(lambda text: "/going RUN (1)" in text)
        assert "ill run" not in text
        await seen.pilot.press("enter", "enter")
        await seen.shows("going  (tests, ", "running · step 7", "no alert has fired")
        await seen.pilot.press("escape")
        await seen.shows("/going RUN (1)")
        await seen.pilot.press("escape")
        await seen.shows("ill run", "fine [b]run[/b]")
        await seen.pilot.press("slash", *"zzz")
        await seen.shows("No run matches this filter")


@in_a_loop
async def test_a_run_shows_verdict_curves_step_bar_alerts_and_console(opened: Open) -> None:
    async with opened(rows=40, run="ill") as seen:
        text = await seen.shows("nonfinite_loss", "Fix: ", "Where a step goes", "epoch 1")
        for part in (
            "✕ critical", "ill run  (tests, ill)", "✓ finished · step 40", "Loss  ", "××", "Tokens per second", "Step time",
            "a step (median of", "backward 5", "data wait", "firing since step 31", "\ufffd[31mred",
        ):  # fmt: skip
            assert part in text, part
        await seen.pilot.press("question_mark")
        await seen.shows("acknowledge the run's open alert")
        await seen.pilot.press("escape", "escape")
        await seen.shows("to look at")


@in_a_loop
async def test_keys_acknowledge_mute_and_undo_on_the_server(opened: Open, site: ServerProcess) -> None:
    async with opened() as seen:
        await seen.shows("ill run", "The loss became NaN")
        await seen.pilot.press("a")
        await seen.shows("Acknowledge: The loss became NaN")
        await seen.pilot.press(*"mine", "enter")
        await seen.shows("acknowledged: ", "seen by admin: The loss became", "0 to look at")
        alert = alert_of(site, "ill")
        assert alert["acknowledged"] and (alert["acknowledged_by"], alert["note"]) == ("admin", "mine")
        await seen.pilot.press("a")
        await seen.shows("no open alert here that nobody has acknowledged")
        await seen.pilot.press("u")
        await seen.until(lambda text: "seen by" not in text)
        assert alert_of(site, "ill")["acknowledged"] is None
        await seen.pilot.press("m")
        await seen.shows("muted: The loss became")
        assert alert_of(site, "ill")["muted_until"]
        await seen.pilot.press("m")
        await seen.until(lambda text: "muted: The" not in text.splitlines()[2])
        assert alert_of(site, "ill")["muted_until"] is None
        await seen.pilot.press("a", "escape")
        assert alert_of(site, "ill")["acknowledged"] is None, "left with Escape"


@in_a_loop
async def test_a_server_that_goes_away_is_stale_and_comes_back(opened: Open, tmp_path: Any) -> None:
    with server_process(tmp_path) as server:
        async with opened(server) as seen:
            await seen.shows("No run has reported yet", "0 runs")
            log(server, "before", 1, loss=1.0)
            await seen.shows("live", "before")
            await asyncio.to_thread(server.kill)
            text = await seen.until(lambda text: re.search(r"stale since \d\d:\d\d", text))
            assert "before" in text, "what was known stays"
            await asyncio.to_thread(server.start)
            log(server, "after", 1, loss=1.0)
            await seen.shows("live", "after")


@pytest.mark.parametrize("colors", [True, False])
def test_on_a_real_terminal_with_and_without_colors(site: ServerProcess, colors: bool) -> None:
    environment = {**os.environ, "COLORTERM": "truecolor"} | ({} if colors else {"NO_COLOR": "1"})
    watch = ["watch", "ill", "--server", site.url]
    shown = in_terminal(watch, environment, columns=100, rows=30, typed="q", when="Fix: ")
    assert shown.code == 0
    assert "nonfinite_loss" in shown.text
    basic = re.findall(r"\x1b\[[\d;]*?(?<![\d;])(3[1-6]|9[1-6])(?=[;m])", shown.sent)
    hues = [rgb for rgb in re.findall(r"[34]8;2;(\d+);(\d+);(\d+)", shown.sent) if len(set(rgb)) > 1]
    assert bool(basic or hues) is colors


def test_wrong_use_ends_before_the_screen_is_taken(site: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    piped = command(capsys, "watch", "--server", site.url)
    assert piped.code == 2 and "draws on a terminal" in piped.error
    shown = in_terminal(["watch", "nothing", "--server", site.url], os.environ)
    assert shown.code == 1 and "there is no run with the id or name 'nothing'" in shown.text
    assert "\x1b[?1049h" not in shown.sent, "the screen was never taken"
