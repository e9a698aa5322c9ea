"""What `perfagent profile` shows of profiles: one with its operators, and the list of those that a run has."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from perfagent.command_line.terminal_output import Screen, Table
from perfagent.errors import PerfagentError
from perfagent_client.client import Client

__all__ = ["find", "show", "show_list"]

SHOWN = 15
_GAPS = 3
_ID = 12
"""Characters of an id in a list; `--show` takes the beginning of one."""


def find(client: Client, run: str, beginning: str) -> dict[str, Any]:
    """The profile whose id begins so, with all its operators."""
    known = [one["id"] for one in client.profiles(run) if one["id"].startswith(beginning)]
    if len(known) != 1:
        what = "has no profile" if not known else f"has {len(known)} profiles"
        raise PerfagentError(f"the run {what} whose id begins with {beginning[:64]!r}; --list shows those that it has")
    return client.operators(run, known[0])


def show_list(found: Sequence[dict[str, Any]]) -> None:
    """Newest first: why each was taken, and what it shows."""
    screen = Screen()
    if not found:
        screen.line("no profiles; without --list one is taken")
        return
    rows = [
        (
            one["id"][:_ID], _clock(one["time"]), str(one["rank"]), f"{one['first_step']} to {one['last_step']}", reason(one),
            one["trace"], next(iter(one.get("says", ())), one["note"]),
        )
        for one in found
    ]  # fmt: skip
    screen.table(Table(("ID", "TAKEN", "RANK", "STEPS", "BECAUSE OF", "TRACE", "WHAT IT SHOWS"), rows, narrow=(6,)))


def reason(found: dict[str, Any]) -> str:
    """The rule and the alert for which it was taken, else who asked; older servers tell neither."""
    if found.get("alert"):
        return f"{found['rule']} ({found['alert']})"
    return found.get("who") or "-"


def show(found: dict[str, Any]) -> None:
    """What it shows in words, then its operators."""
    took = f", {found['duration_s']:.3g} s" if found["duration_s"] is not None else ""
    steps = f"steps {found['first_step']} to {found['last_step']}{took}"
    idle = found["gaps"].get("idle_pct")
    what = {"device": "the device idle", "operators": "outside of operators"}.get(found["gaps"].get("of", ""), "idle")
    screen = Screen()
    screen.line(f"rank {found['rank']}, {steps}" + (f", {what} {idle:.0f} % of the time" if idle is not None else ""))
    if found.get("alert"):
        screen.line(f"taken because of {reason(found)}")
    if found.get("cut_short"):
        screen.line(found["cut_short"])
    for line in (*found.get("says", ()), *_gaps(found["gaps"])):
        screen.line(f"  {line}")
    screen.line("")
    device = any("self_device_s" in row for row in found["operators"])
    head = ["OPERATOR", "CALLS", "SELF CPU ms", "TOTAL CPU ms", *(("SELF GPU ms", "TOTAL GPU ms") if device else ())]
    names = ["self_cpu_s", "total_cpu_s", *(("self_device_s", "total_device_s") if device else ())]
    rows = [
        [row["name"][:50], str(row["calls"]), *(f"{1000 * row.get(name, 0.0):.3f}" for name in names)]
        for row in found["operators"][:SHOWN]
    ]
    screen.table(Table(head, rows, right=range(1, len(head))))


def _gaps(gaps: dict[str, Any]) -> list[str]:
    """The longest times in which nothing ran, with what ran before and after."""
    longest = [
        f"{1000 * gap['s']:.3g} ms after {gap['after'][:40] or 'the beginning'}, before {gap['before'][:40] or 'the end'}"
        for gap in gaps.get("longest", ())[:_GAPS]
    ]
    where = "on the device" if gaps.get("of") == "device" else "between operators"
    return [f"Longest gaps {where}: {'; '.join(longest)}."] if longest else []


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")
