"""`perfagent show RUN --follow`: the page of a run that is drawn again as the run goes on; in a pipe a line each time
something is new. Ends with the run, or at Ctrl-C."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

from perfagent.command_line.terminal_output import Screen
from perfagent.wire import outcome_of
from perfagent.wire.quantities import duration, quantity
from perfagent_client.client import Client
from perfagent_client.models import RunDetails
from perfagent_client.page import Section, flat
from perfagent_client.polling import ENDED, Patience

__all__ = ["follow"]

EVERY_S = 1.0

Page = Callable[[RunDetails, int], list[Section]]
"""A run, and how many lines there are -> its page."""


def follow(client: Client, run: str, screen: Screen, page: Page, *, as_json: Callable[[], None] | None = None) -> None:
    """Returns when the run has ended. as_json: prints the run instead, each time something is new."""
    if as_json is not None:
        _each_change(client, run, lambda _: as_json())
    elif screen.console is None:
        _each_change(client, run, lambda found: screen.line(_line(client, found)))
    else:
        _live(client, run, screen, page)


def _live(client: Client, run: str, screen: Screen, page: Page) -> None:
    from rich.live import Live

    patience = Patience()
    with Live(console=screen.console, auto_refresh=False, transient=True) as live:
        for found in _until_it_ends(client, run, patience):
            screen.width, rows = os.get_terminal_size(screen.stream.fileno())  # which changes while somebody looks
            live.update(screen.drawn(flat(patience.ask(lambda: page(found, rows - 1)))), refresh=True)  # noqa: B023 - called at once


def _each_change(client: Client, run: str, show: Callable[[RunDetails], None]) -> None:
    patience = Patience()
    seen: tuple[object, ...] | None = None
    for found in _until_it_ends(client, run, patience):
        new = (found.state, found.step, patience.ask(lambda: client.verdict(run)).rule)
        if new != seen:
            seen = new
            patience.ask(lambda: show(found))  # noqa: B023 - called at once


def _until_it_ends(client: Client, run: str, patience: Patience) -> Iterator[RunDetails]:
    while True:
        found = patience.ask(lambda: client.run(run))
        yield found
        if found.state in ENDED:
            return
        time.sleep(EVERY_S)


def _line(client: Client, run: RunDetails) -> str:
    """One line on the run's progress: `12:01:05  running  step 420  loss 1.2345  42.3 ms a step (median of the newest
    100 steps)  healthy`."""
    latest, verdict, timing = client.latest(run.run), client.verdict(run.run), client.timing(run.run)
    facts = [time.strftime("%H:%M:%S"), run.state, f"step {run.step:,}"]
    if "loss" in latest:
        facts.append(f"loss {quantity(latest['loss'].value, '')}")
    if "step_time_s" in timing.series:
        facts.append(f"{duration(timing.series['step_time_s'].p50)} a step (median of {timing.window})")
    if verdict.rule == "healthy":
        facts.append(outcome_of(verdict, run.state))
    else:
        facts.append(f"[{verdict.severity}] {verdict.rule}: {verdict.message}")
    return "  ".join(facts)
