"""Says what an agent found out about an alert, of the facts that it sent: where a NaN began, what filled the memory, what a
profile shows. Pure: evidence in, sentences out, in the language of who reads them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from perfagent.wire.evidence import MemoryEvidence, NonfiniteEvidence, ProfileEvidence
from perfagent_server.rules.causes import memory, nonfinite, profile
from perfagent_server.rules.texts import Language, Phrases

__all__ = [
    "UNRECORDED",
    "CauseWords",
    "cause_words",
    "profile_words",
    "reason_stored",
    "reason_words",
    "unrecorded_words",
]

UNRECORDED = "unrecorded"
"""The fact of an alert of `perfagent run`: how many processes its script has started."""


@dataclass(frozen=True, slots=True)
class CauseWords:
    """message: ends that of the finding; fix: what to do, "" where the rule's own advice fits; says: what else there is to
    say, where it is a profile."""

    message: str
    fix: str = ""
    says: tuple[str, ...] = ()


def cause_words(evidence: Mapping[str, Any], language: Language = "en") -> CauseWords | None:
    """None where the facts do not suffice: of agents that sent sentences instead, and of what no agent sent."""
    try:
        if "profile" in evidence:
            says, (first, last) = profile_words(evidence, language), evidence["steps"]
            figures = {"rank": evidence["rank"], "first_step": first, "last_step": last, "first": says[0]}
            return CauseWords(Phrases("profile", language).say("shows", figures), says=tuple(says))
        if "categories" in evidence and "remedies" not in evidence:
            filled = msgspec.convert(dict(evidence), MemoryEvidence, strict=False)
            return CauseWords(*memory.message_and_fix(filled, language))
        if "cause" in evidence:
            found = msgspec.convert(dict(evidence), NonfiniteEvidence, strict=False)
            return CauseWords(*nonfinite.message_and_fix(found, language))
    except (LookupError, TypeError, ValueError):  # a sender may have sent anything
        pass
    return None


def profile_words(summary: Mapping[str, Any], language: Language = "en") -> list[str]:
    """What a profile shows, the most important first; empty where its summary does not say."""
    try:
        return profile.sentences(msgspec.convert(dict(summary), ProfileEvidence, strict=False), language)
    except (LookupError, TypeError, ValueError):
        return []


def reason_words(reason: object, language: Language = "en") -> str:
    """Why a command was refused, a profile is cut short or without its trace, or a run ended; empty where nothing says so.

    reason: the facts (perfagent.wire.evidence.Reason), or their JSON. What is none, as the sentence of an older agent, is
    said as it is.
    """
    try:
        facts: Any = json.loads(reason) if isinstance(reason, str) else reason
        nested = {"why": reason_words(facts["why"], language)} if "why" in facts else {}
        return Phrases("reason", language).say(facts["key"], {**facts, **nested})
    except (LookupError, TypeError, ValueError):
        return str(reason or "")


def reason_stored(reason: object) -> str:
    """Those facts as text, for `reason_words`; the words of an exception as they are."""
    return json.dumps(reason, ensure_ascii=False) if isinstance(reason, Mapping) else str(reason or "")


def unrecorded_words(facts: Mapping[str, Any], language: Language = "en") -> tuple[str, str] | None:
    """Title and message of that alert; None where these are not its facts."""
    phrases = Phrases("unrecorded", language)
    try:
        title = phrases.say("title", {"what": phrases.say("several" if int(facts[UNRECORDED]) > 1 else "one", facts)})
        return title, phrases.say("message", {"title": title})
    except (LookupError, TypeError, ValueError):
        return None
