"""Says a finding or an alert in the reader's language. What is stored is English, with its cause and its figures. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from perfagent.wire import Alert, Finding
from perfagent_server.rules.texts import Language, said_in
from perfagent_server.rules.texts.reader import reader

__all__ = ["spoken"]

Told = TypeVar("Told", Finding, Alert)


def spoken(found: Told, language: Language | None = None) -> Told:
    """In the language of the request or channel, unless another is named. What was added to the sentences of the rule (by an
    agent, or when the alert was opened again) stays in English, after them; so does what no rule of this server says."""
    own = reader.get() if language is None else language
    if own == "en":
        return found
    before = said_in(found.rule, found.cause, found.evidence, "en")
    now = said_in(found.rule, found.cause, found.evidence, own)
    if before is None or now is None:
        return found
    return replace(
        found,
        title=_swapped(found.title, before.title, now.title),
        message=_swapped(found.message, before.message, now.message),
        cost=_swapped(found.cost, before.cost, now.cost),
        fix=_swapped(found.fix, before.fix, now.fix),
    )


def _swapped(text: str, before: str, now: str) -> str:
    return now + text[len(before) :] if before and now and text.startswith(before) else text
