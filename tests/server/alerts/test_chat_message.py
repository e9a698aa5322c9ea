"""The words that a chat gets about one alert, and about several of a run."""

from __future__ import annotations

import pytest

from perfagent.wire import Finding, Severity
from perfagent_server.alerts.chat_message import message_of
from perfagent_server.alerts.webhooks import alert_body, notice_body

NOW = 1_700_000_000.0


def body(title: str, severity: Severity, event: str = "alert.firing") -> bytes:
    words = {"title": title, "message": f"{title}: in words.", "fix": "More workers.", "cost": "3 s a step"}
    found = Finding(rule="data_bound", severity=severity, **words)
    about = {"alert": "al_1", "state": "firing", "run": "r1", "run_name": "gpt", "project": "p"}
    return alert_body(event, NOW, finding=found, url="http://here/run/r1", **about)


def test_one_alert_is_told_in_full_and_what_is_over_says_so() -> None:
    told = message_of([body("The step waits for data", "warning")])
    assert told.title == "The step waits for data (gpt, project p)"
    assert told.text == "The step waits for data: in words.\nCost: 3 s a step.\nWhat to do: More workers."
    assert (told.severity, told.url) == ("warning", "http://here/run/r1")
    over = message_of([body("A", "critical", "alert.resolved")])
    assert (over.title, over.severity) == ("Over: A (gpt, project p)", "resolved")


@pytest.mark.parametrize("title", ["", "..."])
def test_an_alert_without_words_has_the_name_of_its_rule(title: str) -> None:
    """A program of the user's may have raised it. The ones behind it must go out."""
    found = Finding(rule="user_alert", severity="warning", title=title, message="")
    about = {"alert": "al_1", "state": "firing", "run": "r1", "run_name": "gpt", "project": "p"}
    wordless = alert_body("alert.firing", NOW, finding=found, url="http://here/run/r1", **about)
    assert message_of([wordless]).title == "user_alert (gpt, project p)"
    assert message_of([wordless, body("A", "warning")]).text == "warning: user_alert\nwarning: A"


def test_several_are_a_list_with_the_worst_severity() -> None:
    told = message_of([body("A", "warning"), body("B", "critical"), body("C", "critical", "alert.resolved")])
    assert told.title == "3 alerts (gpt, project p)"
    assert told.text == "warning: A\ncritical: B\nresolved: C"
    assert told.severity == "critical"


@pytest.mark.parametrize("event", ["channel.test", "digest"])
def test_what_is_about_no_run_names_none(event: str) -> None:
    told = message_of([notice_body(event, NOW, "All is well: 3 runs.", title="All is well")])
    assert (told.title, told.text, told.severity) == ("All is well", "All is well: 3 runs.", "info")
