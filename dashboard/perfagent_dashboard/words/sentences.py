"""Reads the sentences of a language: messages of Project Fluent, `english.ftl` and `chinese.ftl` beside this file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from fluent.runtime import FluentBundle, FluentResource
from fluent.syntax.ast import Message, Resource

__all__ = ["LANGUAGES", "keys", "sentence", "templates"]

LANGUAGES = {"en": "english", "zh": "chinese"}
"""The code of a language -> its file."""
_LONGEST = 2000  # letters of a figure: Fluent refuses 2,500
_NAMED = re.compile(r"""(?:\bwords\.|["'`])([\w-]+)""")


def sentence(language: str, key: str, **figures: object) -> str:
    """Numbers are grouped, and may choose a plural; anything else is put in as it is."""
    given = {name: one if isinstance(one, (int, float)) else str(one)[:_LONGEST] for name, one in figures.items()}
    return _formatted(language, key, given)


def keys(language: str) -> Sequence[str]:
    return [entry.id.name for entry in _resource(language).body if isinstance(entry, Message)]


def templates(language: str, script: str) -> dict[str, str | list[str]]:
    """Every sentence that a script names, by its whole key or by the beginning of one (`state_${...}`), with `{name}` for
    each figure. Where `count` chooses a plural there are two: for one, and for any other number."""
    named = set(_NAMED.findall(script))
    families = tuple(one for one in named if one.endswith("_"))
    many = {name: f"{{{name}}}" for name in re.findall(r"\$(\w+)", _source(language))}
    one = many | {"count": _One(many["count"])}
    found: dict[str, str | list[str]] = {}
    for key in keys(language):
        if key in named or key.startswith(families):
            forms = [_formatted(language, key, figures) for figures in (one, many)]
            found[key] = forms if forms[0] != forms[1] else forms[0]
    return found


class _One(str):
    """The place of a figure, for which Fluent takes the variant `[one]`: a text chooses the variant that it equals."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other == "one"


def _formatted(language: str, key: str, figures: Mapping[str, int | float | str]) -> str:
    bundle = _bundle(language)
    text, errors = bundle.format_pattern(bundle.get_message(key).value, dict(figures))  # type: ignore[arg-type]
    if errors:
        raise errors[0]
    return str(text)


@cache
def _bundle(language: str) -> FluentBundle:
    bundle = FluentBundle([language], use_isolating=False)
    bundle.add_resource(_resource(language))
    return bundle


@cache
def _resource(language: str) -> Resource:
    return FluentResource(_source(language))


def _source(language: str) -> str:
    return Path(__file__).with_name(f"{LANGUAGES[language]}.ftl").read_text("utf-8")
