"""An answer to an AI agent: one line of JSON of at most 4,000 bytes, which says what it leaves out. Pure.

What a run says of itself (ids, names, tags, settings, console, and the sentences of rules, which quote them) stands below a
key "untrusted" and nowhere else. JSON keeps it there: a text cannot end its own string. What could look like an end to a
reader of the raw answer is escaped too: tags, code fences, line breaks, signs that nobody sees.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perfagent.errors import ConfigError
from perfagent.wire import plain

__all__ = ["MOST_BYTES", "Answer", "encoded"]

MOST_BYTES = 4000
_FOR_CAPS = 400  # bytes of an answer that are kept for what it says of itself
_KEY, _VALUE = 60, 160  # bytes of a name and of a value in a table of the run's own
_FOR_MARK = len("(+12345678) ….")
_DIGITS = 6
_MARKUP = re.compile(r"[<>&`]")
_IGNORABLE = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
"""Code points that are letters or marks to Python, and that no font draws (Unicode's Default_Ignorable_Code_Point)."""
_SURROGATE = re.compile("[\ud800-\udfff]")


def encoded(value: Any) -> str:
    """JSON in one line, without a character that is markup or that cannot be seen."""
    text = json.dumps(_rounded(plain(value)), ensure_ascii=False, separators=(",", ":"))
    return text if _is_harmless(text) else "".join(map(_escaped, text))


def _is_harmless(text: str) -> bool:
    return text.isprintable() and not _MARKUP.search(text) and not _IGNORABLE.search(text)


def _escaped(character: str) -> str:
    # Outside of strings JSON has none of these.
    return character if _is_harmless(character) else "".join(f"\\u{unit:04x}" for unit in _utf_16(character))


def _utf_16(character: str) -> Iterable[int]:
    units = character.encode("utf-16-be", "surrogatepass")
    return (int.from_bytes(units[at : at + 2], "big") for at in range(0, len(units), 2))


def _rounded(value: Any) -> Any:
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {_rounded(name): _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def _size(value: Any) -> int:
    return len(encoded(value).encode())


@dataclass(slots=True)
class Answer:
    """Cuts what is too long, and counts it. caps: how to ask for rows that are left out. left_out: how many of
    what else."""

    caps: list[str] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)

    def text(self, value: object, most: int, *, end: bool = False) -> str:
        """A text of the run in at most so many bytes of the answer. end: its end is kept, not its beginning."""
        whole = str(value)
        if len(whole) <= most and _size(whole) - 2 <= most:
            return whole
        left, kept = most - _FOR_MARK, 0
        for character in reversed(whole) if end else whole:
            left -= _size(character) - 2
            if left < 0:
                break
            kept += 1
        gone = len(whole) - kept
        self.left_out["characters left out where a text has (+N)"] += gone
        return f"(+{gone}) …{whole[gone:]}" if end else f"{whole[:kept]}… (+{gone})"

    def table(self, given: Mapping[str, Any], most: int, what: str) -> dict[str, Any]:
        """As many entries of a table of the run as take at most so many bytes. what: their name, for the caps."""
        kept: dict[str, Any] = {}
        for name, value in given.items():
            entry = {self.text(name, _KEY): self._value(value)}
            if _size({**kept, **entry}) <= most:
                kept |= entry
        self._leave_out(len(given) - len(kept), what)
        return kept

    def _value(self, value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, float)) or _size(value) <= _VALUE:
            return value
        return self.text(value if isinstance(value, str) else encoded(value), _VALUE)

    def first(self, given: Sequence[Any], most: int, what: str) -> list[Any]:
        self._leave_out(len(given) - most, what)
        return list(given[:most])

    def _leave_out(self, number: int, what: str) -> None:
        if number > 0:
            self.left_out[f"{what} left out"] += number

    def fitting(self, rows: Iterable[Any], facts: Mapping[str, Any]) -> list[Any]:
        """As many of these rows as fit beside the facts."""
        kept: list[Any] = []
        left, before = MOST_BYTES - _FOR_CAPS - _size(facts), self.left_out.copy()
        for row in rows:
            left -= _size(row) + 1
            if left < 0:
                self.left_out = before
                break
            kept.append(row)
            before = self.left_out.copy()
        return kept

    def rows(
        self, facts: Mapping[str, Any], key: str, rows: Iterable[Any], *, total: int, offset: int = 0, more: str = ""
    ) -> str:
        """The answer with as many of these rows as fit. rows: from `offset` on; total: how many there are, those before
        `offset` too. more: how to ask for the others, if not by `offset`. Raises ConfigError for an offset below 0."""
        if offset < 0:
            raise ConfigError(f"offset is {offset}; 0 and more are allowed")
        kept = self.fitting(rows, {**facts, key: []})
        self.capped(
            len(kept), total, key, more or f"ask with offset={offset + len(kept)}", is_all=offset + len(kept) >= total
        )
        return self.written({**facts, key: kept})

    def capped(self, shown: int, total: int, what: str, more: str, *, is_all: bool) -> None:
        if not is_all:
            self.caps.append(f"{shown} of {total} {what}; {more}")

    def written(self, facts: Mapping[str, Any]) -> str:
        said = (f"{number} {what}" for what, number in self.left_out.items())
        return encoded({**facts, "caps": [*self.caps, *said]})
