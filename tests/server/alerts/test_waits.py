"""When a channel may be told of a change of an alert: at once, unless the alert flaps, or the channel groups messages."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from engine_bench import NOW

from perfagent.wire import Finding
from perfagent_server.alerts.state_machine import Change
from perfagent_server.alerts.waits import AT_ONCE, GATHERED_S, QUIET_S, SETTLED_S, when_to_send


class Sent(NamedTuple):
    created: float
    event: str = "alert.firing"
    due: object = AT_ONCE
    delivered: float | None = None
    urgent: bool = False


def fired(*times: float) -> list[Sent]:
    """So many messages, which say by turns that an alert fires and that it is over."""
    return [Sent(NOW + at, "alert.resolved" if number % 2 else "alert.firing") for number, at in enumerate(times)]


@pytest.mark.parametrize(
    ("kind", "opening", "severity", "history", "gathers", "wait"),
    [
        ("fire", 1, "warning", [], False, None),
        ("fire", 1, "warning", [], True, GATHERED_S),
        ("fire", 1, "critical", [], True, None),
        ("resolve", 1, "warning", fired(-5), False, None),
        ("reopen", 2, "critical", fired(-50, -5), False, 1.0),
        ("reopen", 2, "warning", fired(-5000, -4000), False, SETTLED_S),
        ("reopen", 2, "warning", fired(-50, -5), False, QUIET_S - 5),
        ("reopen", 2, "warning", fired(-50, 30 * 86_400), False, QUIET_S),
        ("resolve", 2, "critical", fired(-100, -50, -5), False, QUIET_S - 100),
        ("resolve", 2, "critical", fired(-QUIET_S - 1, -50, -5), False, None),
        ("resolve", 2, "critical", fired(3600, 3601, 3602), False, QUIET_S),
        ("update", 1, "critical", [Sent(NOW - 5, due="soon")], False, None),
    ],
)
def test_a_message_waits_as_long_as_its_history_asks_for(
    kind: str, opening: int, severity: str, history: list[Sent], gathers: bool, wait: float | None
) -> None:
    found = Finding(rule="data_bound", severity=severity, message="slow", ranks=[0])  # type: ignore[arg-type]
    change = Change(kind, "al", found, 1, NOW, opening=opening)  # type: ignore[arg-type]
    ready = when_to_send(history, change, NOW, gathers=gathers)  # type: ignore[arg-type]
    assert ready == (AT_ONCE if wait is None else NOW + wait)
