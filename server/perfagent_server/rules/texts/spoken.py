"""Says a finding or an alert in the reader's language. What is stored is English, with its cause and its figures. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from perfagent.wire import Alert, Finding
from perfagent_server.rules.causes import CauseWords, cause_words, reason_words, unrecorded_words
from perfagent_server.rules.texts import TITLE, Language, said_in
from perfagent_server.rules.texts.reader import reader

__all__ = ["spoken"]

Told = TypeVar("Told", Finding, Alert)


def spoken(found: Told, language: Language | None = None) -> Told:
    """In the language of the request or channel, unless another is named. What was added to the sentences of the rule when
    the alert was opened again stays in English, after them; so does what no rule of this server says, and what agents
    said in sentences."""
    own = reader.get() if language is None else language
    if own == "en":
        return found
    before = said_in(found.rule, found.cause, found.evidence, "en")
    facts = found.evidence.get("reason_facts")
    said = {"said": reason_words(facts, own)} if isinstance(facts, str) else {}
    now = said_in(found.rule, found.cause, {**found.evidence, **said}, own)
    if before is not None and now is not None:
        found = replace(
            found,
            title=_swapped(found.title, before.title, now.title),
            message=_swapped(found.message, before.message, now.message),
            cost=_swapped(found.cost, before.cost, now.cost),
            fix=_swapped(found.fix, before.fix, now.fix),
        )
    unrecorded = unrecorded_words(found.evidence, own) if found.rule == "user_alert" else None
    if unrecorded is not None:
        found = replace(found, title=unrecorded[0][:TITLE], message=unrecorded[1])
    causes = found.evidence.get("causes")
    found = _with_causes(found, causes, own) if isinstance(causes, list) else found
    # what was added to a sentence stands after a space, which Chinese does not have
    return replace(found, message=found.message.replace("。 ", "。")) if "。 " in found.message else found


def _swapped(text: str, before: str, now: str) -> str:
    return now + text[len(before) :] if before and now and text.startswith(before) else text


def _with_causes(found: Told, causes: list[Any], language: Language) -> Told:
    """What agents found out, in the evidence and at the end of the message, and what to do about it."""
    message, fix = found.message, found.fix
    told: list[Any] = []
    for cause in causes:
        english, words = _words_of(cause, "en"), _words_of(cause, language)
        if english is None or words is None:
            told.append(cause)
            continue
        stored = cause.get("message")
        if isinstance(stored, str) and stored:
            message = message.replace(stored, words.message)
        if english.fix and fix == english.fix:
            fix = words.fix
        again = {**cause, "message": words.message}
        if words.says:
            again["says"] = list(words.says)
        told.append(again)
    return replace(found, message=message, fix=fix, evidence={**found.evidence, "causes": told})


def _words_of(cause: Any, language: Language) -> CauseWords | None:
    return cause_words(cause, language) if isinstance(cause, dict) else None
