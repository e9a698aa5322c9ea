"""What the rules say, in the language of who reads it: one TOML file a language, a table a rule.

A rule names a cause and gives figures (its evidence); the sentences stand here. A language that has no table for a rule,
or lacks one of its sentences, says it in English, so a new rule needs English alone.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

from perfagent_server.rules.texts.filling import Grammar, MissingFigureError, fill, outline

__all__ = [
    "LANGUAGES", "TITLE", "Language", "MissingFigureError", "Phrases", "Said", "Text", "grammar_of", "outlined",
    "said", "said_in", "sentence", "text_of", "titles_of",
]  # fmt: skip

Language = Literal["en", "zh"]
LANGUAGES: Mapping[Language, str] = {"en": "english", "zh": "chinese"}
TITLE = 90
"""Characters of a title."""
_OWN = "own_alert"  # the table of users' own alerts, whose ids are `own:NAME`
_GRAMMAR, _SENTENCES, _FOUND = "grammar", "sentences", "found"  # the tables that are no rule
_OF_A_CAUSE = frozenset({"title", "message", "cost", "remedy"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """What a rule says in one language.

    name: as a heading; symptom: what somebody sees who does not know yet what it is; meaning: one sentence; fires: when, with
    the rule's thresholds as figures. title (cut at TITLE), message, cost, remedy: of a finding, with its evidence as figures.
    causes: what of these is another sentence for a cause. words: by the name of a figure, what each of its values is called.
    """

    name: str
    symptom: str = ""
    meaning: str
    fires: str
    title: str = ""
    message: str = ""
    cost: str = ""
    remedy: str
    causes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    words: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def of(self, what: str, cause: str) -> str:
        """The template of a title, message, cost or remedy: that of the cause, else the usual one."""
        usual: str = getattr(self, what)
        return self.causes.get(cause, {}).get(what, usual)

    @property
    def remedies(self) -> dict[str, str]:
        """By cause, without figures; "" is the usual one."""
        own = {cause: one["remedy"] for cause, one in self.causes.items() if "remedy" in one}
        return {cause: outline(template) for cause, template in {"": self.remedy, **own}.items()}


@dataclass(frozen=True, slots=True)
class Said:
    """A finding in words."""

    title: str
    message: str
    cost: str
    fix: str


def text_of(rule: str, language: Language = "en") -> Text:
    """Raises KeyError for a rule that has no text in English either."""
    table = _table(rule)
    return _texts(language)[0].get(table) or _texts("en")[0][table]


@cache
def titles_of(rule: str, language: Language) -> str:
    """What its alerts may be called, without figures: to search by. Empty for a rule that is not there any more."""
    text = _texts(language)[0].get(_table(rule))
    titles = [text.name, text.title, *(one.get("title", "") for one in text.causes.values())] if text else []
    return " ".join(map(outline, titles))


def grammar_of(language: Language = "en") -> Grammar:
    return _texts(language)[1]


def said(text: Text, cause: str, figures: Mapping[str, Any], language: Language = "en") -> Said:
    """A finding in words. Raises MissingFigureError where a sentence needs a figure that is not there."""
    grammar = grammar_of(language)
    title, message, cost, fix = (
        fill(text.of(what, cause), figures, text.words, grammar) for what in ("title", "message", "cost", "remedy")
    )
    return Said(title if len(title) <= TITLE else f"{title[: TITLE - 3]}...", message, cost, fix)


def said_in(rule: str, cause: str, figures: Mapping[str, Any], language: Language) -> Said | None:
    """A finding that is stored, in another language; None where that cannot be said: of a rule that is not there any
    more, or where what is stored lacks a figure, or has one of another kind (a sender may have sent anything)."""
    texts, _ = _texts(language)
    table = _table(rule)
    if table not in texts:
        return None
    try:
        return said(texts[table], cause, figures, language)
    except (LookupError, TypeError, ValueError):
        return None


def outlined(rule: str, cause: str, figures: Mapping[str, Any], language: Language) -> str:
    """The title of a rule that is known before anything is found."""
    text = text_of(rule, language)
    return fill(text.of("title", cause), figures, text.words, grammar_of(language))


def sentence(name: str, language: Language, **figures: Any) -> str:
    """A sentence that belongs to no rule, such as what a verdict adds to a finding."""
    return fill(_tables(language)[_SENTENCES][name], figures, {}, grammar_of(language))


class Phrases:
    """What is said of one kind of thing that agents find: a group of sentences, and of parts of sentences."""

    def __init__(self, group: str, language: Language) -> None:
        table: dict[str, Any] = {**_tables("en")[_FOUND][group], **_tables(language)[_FOUND].get(group, {})}
        self._words: Mapping[str, Mapping[str, str]] = table.pop("words", {})
        self._templates, self._grammar = table, grammar_of(language)

    def __contains__(self, name: str) -> bool:
        return name in self._templates

    def say(self, name: str, figures: Mapping[str, Any]) -> str:
        """Raises KeyError for a sentence that there is not; MissingFigureError."""
        return fill(self._templates[name], figures, self._words, self._grammar)

    def joined(self, sentences: Iterable[str]) -> str:
        return self._grammar.gap.join(sentences)


def _table(rule: str) -> str:
    return _OWN if rule.startswith("own:") else rule


@cache
def _texts(language: Language) -> tuple[dict[str, Text], Grammar]:
    tables = _tables(language)
    rules = {rule: _read(rule, table) for rule, table in tables.items() if rule not in (_GRAMMAR, _SENTENCES, _FOUND)}
    return rules, Grammar(**tables[_GRAMMAR])


@cache
def _tables(language: Language) -> dict[str, Any]:
    """English where there is no such language: the row of a channel may hold anything, and its alerts must go out."""
    return tomllib.loads((Path(__file__).parent / f"{LANGUAGES.get(language, 'english')}.toml").read_text("utf-8"))


def _read(rule: str, table: Mapping[str, Any]) -> Text:
    """Raises ValueError for a sentence that nothing says."""
    unknown = {f"{rule}.{name}" for name in table} - {f"{rule}.{one.name}" for one in fields(Text)}
    for cause, own in table.get("causes", {}).items():
        unknown |= {f"{rule}.causes.{cause}.{name}" for name in own if name not in _OF_A_CAUSE}
    if unknown:
        raise ValueError(
            f"no rule says {', '.join(sorted(unknown))}; known are {', '.join(f.name for f in fields(Text))}"
        )
    return Text(**table)
