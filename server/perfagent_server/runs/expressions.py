"""Arithmetic over series: `train/loss - val/loss`, `2 * (a + b)`. A sign stands between spaces, since names hold `/` and `-`.

It is computed of the buckets that charts are drawn of, at those of the series that has fewest, such as an evaluation's; of
another one the value there lies on the line between its neighbors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from perfagent.errors import PerfagentError
from perfagent.wire import Series, metric

__all__ = ["MOST_CHARACTERS", "MOST_NAMES", "Expression", "ExpressionError", "calculated", "parse"]

MOST_CHARACTERS, MOST_NAMES = 300, 8
T = TypeVar("T")
Column = npt.NDArray[np.float64]

_TOKEN = re.compile(r"`(?P<quoted>[^`]+)`|(?P<bracket>[()])|(?P<word>[^\s()`]+)|(?P<lone>`)")
_NUMBER = re.compile(r"[-−]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_SIGNS = {"+": "+", "-": "-", "−": "-", "*": "*", "×": "*", "/": "/", "÷": "/"}
_NEGATED = "* -1"
_BINDS = {"(": 0, "+": 1, "-": 1, "*": 2, "/": 2, _NEGATED: 3}


class ExpressionError(PerfagentError):
    """What is wrong with an expression, for whoever wrote it."""


class _Token(NamedTuple):
    kind: Literal["name", "number", "sign", "(", ")"]
    text: str


@dataclass(frozen=True, slots=True)
class Expression:
    """names: of its series, each once; postfix: a sign stands behind what it joins."""

    text: str
    names: tuple[str, ...]
    postfix: tuple[_Token, ...]

    @property
    def unit(self) -> str:
        """Of a sum that of its parts, where they have the same; of a product with a number that of the other."""
        return self.over(lambda one: None if isinstance(one, float) else metric(one).unit, _unit) or ""

    def over(self, value_of: Callable[[str | float], T], combine: Callable[[str, T, T], T]) -> T:
        """value_of: of a name or a number; combine: by one of + - * /."""
        stack: list[T] = []
        for kind, text in self.postfix:
            if kind == "sign":
                right, left = stack.pop(), stack.pop()
                stack.append(combine(text, left, right))
            else:
                stack.append(value_of(float(text) if kind == "number" else text))
        return stack[0]


def parse(text: str) -> Expression:
    """Raises ExpressionError."""
    if len(text) > MOST_CHARACTERS:
        raise ExpressionError(f"it has {len(text)} characters; up to {MOST_CHARACTERS} are allowed")
    postfix = _in_postfix(text)
    names = tuple(dict.fromkeys(one.text for one in postfix if one.kind == "name"))
    if not 1 <= len(names) <= MOST_NAMES:
        raise ExpressionError(f"it has {len(names)} series; 1 to {MOST_NAMES} are allowed")
    return Expression(text, names, tuple(postfix))


def _in_postfix(text: str) -> list[_Token]:
    """By two stacks: signs wait until what follows them binds less."""
    postfix: list[_Token] = []
    waiting: list[str] = []

    def release(binding: int) -> None:
        while waiting and _BINDS[waiting[-1]] >= binding:
            postfix.append(_Token("sign", waiting.pop()[0]))

    wants_value = True
    for kind, said in _tokens(text):
        if wants_value and kind == "sign" and said == "-":
            postfix.append(_Token("number", "-1"))
            waiting.append(_NEGATED)
        elif wants_value and kind in ("sign", ")"):
            raise ExpressionError(f"a series or a number is missing before `{said}`")
        elif not wants_value and kind in ("name", "number", "("):
            raise ExpressionError(f"a sign is missing before `{said}`: one of + - * /, between spaces")
        elif kind == "sign":
            release(_BINDS[said])
            waiting.append(said)
            wants_value = True
        elif kind == "(":
            waiting.append(said)
        elif kind == ")":
            release(1)
            if not waiting:
                raise ExpressionError("`)` closes a bracket that was not opened")
            waiting.pop()
        else:
            postfix.append(_Token(kind, said))
            wants_value = False
    if wants_value:
        raise ExpressionError("a series or a number is missing at its end" if postfix else "it is empty: name a series")
    release(1)
    if waiting:
        raise ExpressionError("`(` opens a bracket that is not closed")
    return postfix


def _tokens(text: str) -> Iterator[_Token]:
    for found in _TOKEN.finditer(text):
        word = found["word"] or ""
        if found["lone"]:
            raise ExpressionError("a name in backticks ends with a second backtick")
        if found["bracket"]:
            yield _Token("(" if found["bracket"] == "(" else ")", found["bracket"])
        elif word in _SIGNS:
            yield _Token("sign", _SIGNS[word])
        elif _NUMBER.fullmatch(word):
            yield _Token("number", word.replace("−", "-"))
        else:
            yield _Token("name", found["quoted"] or word)


def _unit(sign: str, left: str | None, right: str | None) -> str | None:
    """None: of a number."""
    if left is None and right is None:
        return None
    if sign in "+-":
        return left if right in (None, left) else right if left is None else ""
    return left if right is None else right if left is None and sign == "*" else ""


def calculated(read: Callable[[str], Series], expression: Expression, names: Callable[[], list[str]]) -> Series:
    """read: a series by its name, all over the same steps; names: of all that the run has. Where a series is absent, not
    finite, or divided by zero, there is a gap. Raises ExpressionError where the run has no series of a name."""
    found = {name: read(name) for name in expression.names}
    if unread := [name for name, one in found.items() if not one.step]:
        known = names()
        if absent := next((name for name in unread if name not in known), None):
            hint = "" if absent.isidentifier() else "; signs stand between spaces, as in `a - b`"
            raise ExpressionError(f"this run has no series `{absent}`{hint}")
    width = max(one.bucket_steps for one in found.values())
    columns = {name: _in_buckets(one, width) for name, one in found.items()}
    fewest = min(columns.values(), key=len)
    buckets = np.array([*fewest], np.int64)
    rows = [*fewest.values()]

    def value_of(one: str | float) -> Column:
        return np.full(len(buckets), one) if isinstance(one, float) else _at(buckets, columns[one])

    with np.errstate(all="ignore"):
        value = expression.over(value_of, _combined)
    mean = np.where(np.isfinite(value), value, np.nan).tolist()
    return Series(
        name=expression.text, rank=found[expression.names[0]].rank, unit=expression.unit, exact=False, bucket_steps=width,
        step=[one.step for one in rows], time=[one.time for one in rows], min=mean, max=mean, mean=mean,
        count=[one.count for one in rows], nonfinite=[0] * len(rows),
    )  # fmt: skip


def _at(buckets: npt.NDArray[np.int64], known: Mapping[int, _Bucket]) -> Column:
    """Not a number before the first and behind the last, and where the series itself is none."""
    own, mean = np.array([*known], np.int64), np.array([one.mean for one in known.values()], np.float64)
    is_finite = np.isfinite(mean)
    if not is_finite.any():
        return np.full(len(buckets), np.nan)
    between = np.interp(buckets, own[is_finite], mean[is_finite], left=np.nan, right=np.nan)
    places = np.minimum(np.searchsorted(own, buckets), len(own) - 1)
    return np.where(own[places] == buckets, mean[places], between)


def _combined(sign: str, left: Column, right: Column) -> Column:
    by: dict[str, Any] = {"+": np.add, "-": np.subtract, "*": np.multiply, "/": np.divide}
    return np.asarray(by[sign](left, right), np.float64)


@dataclass(slots=True)
class _Bucket:
    step: int
    time: float
    mean: float
    count: int


def _in_buckets(series: Series, width: int) -> dict[int, _Bucket]:
    """By the number of the bucket. Buckets begin at multiples of their width, a power of two: narrower ones are put
    together, weighted by their samples."""
    found: dict[int, _Bucket] = {}
    for at, step in enumerate(series.step):
        count = series.count[at]
        time = series.time[at] if series.time else 0.0
        one = found.get(step // width)
        if one is None:
            found[step // width] = _Bucket(step, time, series.mean[at], count)
        else:
            one.mean = (one.mean * one.count + series.mean[at] * count) / (one.count + count)
            one.count += count
    return found
