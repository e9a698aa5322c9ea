"""In whose language sentences are said: that of a request, or of the channel to which a message goes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from perfagent_server.rules.texts import LANGUAGES, Language

__all__ = ["language_of", "reader", "speaking"]

reader: ContextVar[Language] = ContextVar("reader", default="en")


@contextmanager
def speaking(language: Language) -> Iterator[None]:
    """Everything that is said inside is said in this language."""
    before = reader.set(language)
    try:
        yield
    finally:
        reader.reset(before)


def language_of(accepted: str, chosen: str = "") -> Language:
    """What somebody chose, else the first language of an Accept-Language header that there is, else English."""
    for wanted in (chosen, *accepted.split(",")):
        short = wanted.split(";")[0].split("-")[0].strip().lower()
        for language in LANGUAGES:
            if language == short:
                return language
    return "en"
