"""Puts figures into sentences.

A sentence is a format string of Python: `{share_pct:.0f} %`; `{operator.made}` is a figure of a table that is a figure. Beside
Python's own formats a figure may be

- `{wait_s:span}` a duration in seconds as people write it: 50 ms, 3.5 min, 4 days; `{free_bytes:size}`: 1.5 GiB
- `{share:percent}` 31.2 %, `{share:percent 2}` 31 %; `{loss:number}` 12,345 or 0.001234
- `{steps:some step}` 1 step, 2 steps
- `{ranks:ranks}` rank 3, all 8 ranks, 5 of 8 ranks (1, 4-7): with the figure `world_size`; `{ranks:Ranks}` begins a
  sentence
- `{role:word}` what the rule's table `words.role` calls this value, else that of all rules, `grammar.words.role`; a value
  that neither has (the name of a script's own phase) stands as it is
- `{series:Loss}` The loss, or the name of another series than `loss`; `{series:loss}` within a sentence
- `{layer:short}` the end of a long name
- `{lines:list}` its items, with commas, `{lines:list 5}` the first five; of a table its keys; `{lines:items}` with semicolons
- `{groups:said 3}` the first three of its items, each a table of figures with a sentence of its own, which stands in the
  same tables under the item's `kind`; or its only one, where it is a table itself

A number that is not finite is NaN, Inf or -Inf in every format, also as JSON spells it. `[[ on {ranks:ranks}]]` is left
out where one of its figures is not known (missing, None or empty). What is left has no spaces at its
ends, so a sentence may consist of such parts alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from string import Formatter
from typing import Any

from perfagent.wire import LOSS
from perfagent.wire.quantities import some
from perfagent_server.rules.spelling import spell_bytes, spell_number, spell_pct, spell_span

__all__ = ["OPTIONAL", "Grammar", "MissingFigureError", "fill", "outline"]

OPTIONAL = re.compile(r"\[\[(.*?)\]\]", re.DOTALL)
_MOST_RANKS = 8  # by number in a sentence; a row of them counts once
_LONGEST_NAME = 40
_NOT_FINITE = {"nan": "NaN", "inf": "Inf", "-inf": "-Inf", "NaN": "NaN", "Infinity": "Inf", "-Infinity": "-Inf"}


class MissingFigureError(KeyError):
    """A sentence needs a figure that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What all rules of a language say alike. comma: between items of a list; semicolon: between sentences of one; gap:
    between sentences; more, and_more: what follows where some are left out, of sentences or of items; loss, other_loss:
    the series `loss`, and another; words: by the name of a figure, what each of its values is called."""

    one_rank: str
    some_ranks: str
    all_ranks: str
    comma: str
    semicolon: str
    gap: str
    more: str
    and_more: str
    days: str
    loss: str
    other_loss: str
    words: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def fill(template: str, figures: Mapping[str, Any], words: Mapping[str, Mapping[str, str]], grammar: Grammar) -> str:
    """The sentence. Raises MissingFigureError; ValueError for a format that does not fit the figure."""
    writer = _Writer(figures, words, grammar)
    return writer.write(OPTIONAL.sub(lambda found: writer.if_known(found[1]), template)).strip()


def outline(template: str) -> str:
    """The sentence where there are no figures: in a list of all that may be said. Of what is optional nothing is left."""
    pieces = Formatter().parse(OPTIONAL.sub("", template))
    return "".join(before + ("" if name is None else "…") for before, name, _, _ in pieces).strip()


class _Writer(Formatter):
    def __init__(self, figures: Mapping[str, Any], words: Mapping[str, Mapping[str, str]], grammar: Grammar) -> None:
        self._figures, self._words, self._grammar = figures, words, grammar

    def write(self, template: str) -> str:
        pieces = self.parse(template)
        return "".join(
            before + ("" if name is None else self._spelled(name, spec or "")) for before, name, spec, _ in pieces
        )

    def if_known(self, template: str) -> str:
        """Still a template: with its braces doubled."""
        try:
            return self.write(template).replace("{", "{{").replace("}", "}}")
        except MissingFigureError:
            return ""

    def _spelled(self, name: str, spec: str) -> str:
        value: Any = self._figures
        for key in name.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is None or (isinstance(value, (str, Sequence, Mapping)) and not value):
            raise MissingFigureError(name)
        if isinstance(value, (float, str)) and str(value) in _NOT_FINITE:
            return _NOT_FINITE[str(value)]
        kind, _, rest = spec.partition(" ")
        if kind == "span":
            return spell_span(value, self._grammar.days)
        if kind == "size":
            return spell_bytes(value)
        if kind == "percent":
            return spell_pct(value, int(rest or 3))
        if kind == "number":
            return spell_number(value)
        if kind == "some":
            return some(value, rest)
        if kind in ("ranks", "Ranks"):
            said = self._ranks(value)
            return said if kind == "ranks" else said[:1].upper() + said[1:]
        if kind == "word":
            return self._called(name).get(str(value), str(value))
        if kind in ("loss", "Loss"):
            return self._series(value, at_start=kind == "Loss")
        if kind == "short":
            return value if len(value) <= _LONGEST_NAME else f"...{value[3 - _LONGEST_NAME :]}"
        if kind == "list":
            items, most = [*map(str, value)], int(rest or len(value))
            return self._grammar.comma.join(items[:most]) + (self._grammar.and_more if len(items) > most else "")
        if kind == "items":
            return self._grammar.semicolon.join(value)
        if kind == "said":
            return self._each(name, [value] if isinstance(value, Mapping) else value, int(rest or len(value)))
        return format(value, spec)

    def _called(self, figure: str) -> Mapping[str, str]:
        return {**self._grammar.words.get(figure, {}), **self._words.get(figure, {})}

    def _each(self, name: str, items: Sequence[Mapping[str, Any]], most: int) -> str:
        templates = self._called(name)
        said = [
            fill(templates[one["kind"]], {**self._figures, **one}, self._words, self._grammar) for one in items[:most]
        ]
        more = self._grammar.more.format(count=len(items) - most) if len(items) > most else ""
        return self._grammar.semicolon.join(said) + more

    def _series(self, name: str, *, at_start: bool) -> str:
        if name != LOSS:
            return self._grammar.other_loss.format(series=name)
        return self._grammar.loss[:1].upper() + self._grammar.loss[1:] if at_start else self._grammar.loss

    def _ranks(self, ranks: Sequence[int]) -> str:
        world_size = self._figures.get("world_size") or len(ranks)
        rows = _rows(ranks)
        shown = self._grammar.comma.join(rows[:_MOST_RANKS]) + ("..." if len(rows) > _MOST_RANKS else "")
        numbers = {"rank": ranks[0], "count": len(ranks), "world_size": world_size, "ranks": shown}
        if len(ranks) == 1:
            return self._grammar.one_rank.format(**numbers)
        return (self._grammar.all_ranks if len(ranks) == world_size else self._grammar.some_ranks).format(**numbers)


def _rows(ranks: Sequence[int]) -> list[str]:
    """Three and more ranks in a row are one: `4-7`."""
    rows: list[list[int]] = []
    for rank in ranks:
        if rows and rank == rows[-1][-1] + 1:
            rows[-1].append(rank)
        else:
            rows.append([rank])
    named = [[f"{row[0]}-{row[-1]}"] if len(row) > 2 else [str(rank) for rank in row] for row in rows]
    return [name for row in named for name in row]
