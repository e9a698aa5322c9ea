"""A user's own alert: a comparison of a series that holds for so long, said in a form and without code.

All of them are this one rule. It keeps a few numbers for each series that it watches, however long it waits. A value
counts until the next one comes. NaN fulfils no comparison and is no improvement; means, minima and maxima leave it out.
"""

from __future__ import annotations

import math
import operator
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fnmatch import translate
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

from perfagent.errors import ConfigError
from perfagent.wire import SEVERITIES, Finding, Severity
from perfagent_server.rules.rule import UNKNOWN, Every, Life, Question, Rule, Unknown
from perfagent_server.timestamps import rfc3339

if TYPE_CHECKING:
    from perfagent_server.rules.window import Window

__all__ = ["COMPARISONS", "FUNCTIONS", "MOST_SERIES", "OWN", "FormError", "OwnAlert", "Point", "own_alert"]

OWN = "own:"
"""What the ids of these rules begin with; the name of the alert follows."""
MOST_SERIES = 20
"""So many series of a run are watched for one alert."""
FUNCTIONS = ("value", "mean", "min", "max", "rise", "fall", "missing")
"""rise, fall: fires when it has not risen, or fallen, for so long; missing: when no value came for so long."""
COMPARISONS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
_COMPARED = FUNCTIONS[:4]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,47}")
_MOST_STEPS, _MOST_S = 10_000_000, 30 * 86400.0
_LONGEST = {"metric": 256, "note": 500, "tag": 256}
_MOST_TAGS = 20
_PIECES = 64  # of a duration, in which what is averaged is kept
_SILENT = 10  # times the usual distance of two values: nothing is known of the time between
_LOOKS_EVERY_S = 5.0


class FormError(ConfigError):
    """field: of the form, that is not as it may be."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class Point(NamedTuple):
    """A value of a series, ranks put together. at: its step, or its second where the alert counts seconds; time: Unix
    seconds, by the sender's clock."""

    series: str
    at: int
    step: int
    time: float
    value: float


@dataclass(frozen=True, kw_only=True)
class OwnAlert(Rule):
    """metric: a name, or a pattern such as `loss/*`. comparison, threshold: of the first four functions. for_steps, for_s:
    the duration, one of the two. project: "" is all; tags: only runs that have all of them. note: ends the message. stop: the run
    is stopped when it fires, where its script allows that."""

    name: str
    metric: str
    function: str = "value"
    comparison: str = ""
    threshold: float | None = None
    for_steps: int = 0
    for_s: float = 0.0
    severity: Severity = "warning"
    project: str = ""
    tags: tuple[str, ...] = ()
    note: str = ""
    stop: bool = False

    def __post_init__(self) -> None:
        """What other rules say as classes."""
        clear_steps, clear_s = (self.for_steps, self.for_s) if self.function in _COMPARED else (0, 0.0)
        said: dict[str, Any] = {
            "id": OWN + self.name,
            "severities": (self.severity,),
            "question": Question.WILL_IT_GO_ON,
            "reads": (Every(_LOOKS_EVERY_S),) if self.function == "missing" else (),
            "life": Life(restated=True, is_level=True, clear_steps=clear_steps, clear_s=clear_s),
            "state_version": crc32(repr(self.figures()).encode()),
        }
        for name, value in said.items():
            object.__setattr__(self, name, value)

    @cached_property
    def _matches(self) -> re.Pattern[str]:
        return re.compile(translate(self.metric))

    def watches(self, series: str) -> bool:
        return series == self.metric or self._matches.match(series) is not None

    @property
    def unit(self) -> str:
        return "steps" if self.for_steps else "s"

    def form(self) -> dict[str, Any]:
        return asdict(self) | {"tags": list(self.tags)}

    def figures(self) -> dict[str, Any]:
        """Of its sentences: what was asked. What is not said is left out."""
        asked = ("metric", "function", "comparison", "for_steps", "for_s", "note")
        numbers = {} if self.threshold is None else {"threshold": self.threshold}
        return {name: value for name in asked if (value := getattr(self, name))} | numbers

    def is_of(self, finding: Finding) -> bool:
        """Whether a finding says what this alert asks by now: somebody may have changed it."""
        return self.figures().items() <= finding.evidence.items()

    # --- judging ------------------------------------------------------------------------------------------------------

    def take(self, window: Window, point: Point) -> None:
        """Takes a value of a series that it watches."""
        state = self._state(window)
        state["heard"] = window.now
        if self.function == "missing":
            return
        track = state["series"].get(point.series)
        if track is None or (self.function in _COMPARED and _was_silent(track, point.at)):
            track = state["series"][point.series] = {
                "first": point.at, "count": 0, "best": None, "pieces": [], "since": [point.at, point.step, point.time],
                "holds": False,
            }  # fmt: skip
        track["last"], track["count"] = point.at, track["count"] + 1
        if self.function in _COMPARED:
            self._compare(track, point)
        elif _improves(self.function, track["best"], point.value):
            track.update(best=point.value, since=[point.at, point.step, point.time], figure=point.value)
        if self._has_lasted(track, point.at):
            state["fires"][point.series] = True
        else:
            state["fires"].pop(point.series, None)

    def _compare(self, track: dict[str, Any], point: Point) -> None:
        figure = point.value if self.function == "value" else self._over_the_duration(track["pieces"], point)
        holds = figure is not None and COMPARISONS[self.comparison](figure, self.threshold or 0.0)
        if holds and not track["holds"]:
            track["since"] = [point.at, point.step, point.time]
        track.update(holds=holds, figure=figure)

    def _over_the_duration(self, pieces: list[list[Any]], point: Point) -> float | None:
        """The mean, minimum or maximum; None if there is no number. pieces: [start, count, sum, min, max]."""
        width = max(1, int(self._duration // _PIECES))
        start = point.at - point.at % width
        if not pieces or pieces[-1][0] != start:
            pieces.append([start, 0, 0.0, math.inf, -math.inf])
        if not math.isnan(point.value):
            _, count, total, least, most = pieces[-1]
            pieces[-1] = [start, count + 1, total + point.value, min(least, point.value), max(most, point.value)]
        while pieces[0][0] + width <= point.at - self._duration + (1 if self.for_steps else 0):
            del pieces[0]
        _, counts, sums, lows, highs = zip(*pieces, strict=True)
        if not any(counts):
            return None
        if self.function == "mean":
            return float(sum(sums) / sum(counts))
        return float(min(lows) if self.function == "min" else max(highs))

    def _has_lasted(self, track: dict[str, Any], at: int) -> bool:
        """Values at 20 steps in a row have lasted for 20 steps; a mean over 20 steps needs 20 steps, and no more."""
        compares = self.function in _COMPARED
        if compares and not track["holds"]:
            return False
        since = track["since"][0] if self.function in ("value", "rise", "fall") else track["first"]
        return bool(at - since + (1 if self.for_steps and compares else 0) >= self._duration)

    def judge(self, window: Window) -> Finding | Unknown | None:
        state = self._state(window)
        if self.function == "missing":
            return self._is_missing(window, state)
        if not state["series"]:
            return UNKNOWN
        if not state["fires"]:
            return None
        first, others = next(iter(state["fires"])), len(state["fires"]) - 1
        track = state["series"][first]
        _, step, time = track["since"]
        figures = {"series": first, "value": track.get("figure"), "step": step, "others": others or None}
        return self._found(window, figures, since_step=step, since=rfc3339(time))

    def _is_missing(self, window: Window, state: dict[str, Any]) -> Finding | None:
        heard = state["heard"] or window.started
        if window.now - heard < self.for_s:
            return None
        came = None if state["heard"] is None else rfc3339(heard)
        return self._found(window, {"series": self.metric, "came": came}, since=rfc3339(heard))

    def _found(self, window: Window, figures: dict[str, Any], **since: Any) -> Finding:
        most = MOST_SERIES if window.own.is_full(self.id) else None
        evidence = {key: value for key, value in (figures | {"most": most}).items() if value is not None}
        return self.found(self.severity, cause=self.function, evidence={**self.figures(), **evidence}, **since)

    def _state(self, window: Window) -> dict[str, Any]:
        """heard: when the newest value came, by the server's clock; series: of each what is known; fires: those that do,
        first come first."""
        state: dict[str, Any] = window.state_of(self, {"heard": None, "series": {}, "fires": {}})
        return state

    @property
    def _duration(self) -> float:
        return self.for_steps or self.for_s


def _was_silent(track: Mapping[str, Any], at: int) -> bool:
    """Whether its values came closely and then not for long: of the time between nothing is known."""
    usual = (track["last"] - track["first"]) / max(1, track["count"] - 1)
    return bool(track["count"] >= _SILENT and at - track["last"] > _SILENT * max(1.0, usual))


def _improves(function: str, best: float | None, value: float) -> bool:
    if not math.isfinite(value):
        return False
    return best is None or (value > best if function == "rise" else value < best)


# --- the form ---------------------------------------------------------------------------------------------------------


def own_alert(form: Any) -> OwnAlert:
    """From rules.toml, the API or the table. Raises FormError, which says what is allowed."""
    if not isinstance(form, Mapping):
        raise FormError("", f"an alert must be a table of settings, not {form!r:.80}")
    fields = OwnAlert.__dataclass_fields__
    unknown = form.keys() - fields.keys()
    if unknown:
        name = min(map(str, unknown))
        raise FormError(name[:80], f"an alert has no {name!r:.80}; it has {', '.join(fields)}")
    values = {name: value for name, value in form.items() if value is not None}
    for name in ("name", "metric"):
        if not values.get(name):
            raise FormError(name, f"an alert needs a {name}")
    for name, allowed in (("function", FUNCTIONS), ("severity", SEVERITIES)):
        if name in values and values[name] not in allowed:
            raise FormError(name, f"{name} is {values[name]!r:.80}; allowed are {', '.join(allowed)}")
    if not isinstance(values.get("stop", False), bool):
        raise FormError("stop", f"stop must be true or false, not {values['stop']!r:.80}")
    _check_texts(values)
    _check_numbers(values)
    return OwnAlert(**values | {"tags": tuple(values.get("tags", ()))})


def _check_texts(values: Mapping[str, Any]) -> None:
    for name in ("name", "metric", "comparison", "project", "note"):
        text = values.get(name, "")
        if not isinstance(text, str) or len(text) > _LONGEST.get(name, 256):
            raise FormError(name, f"{name} must be a text of up to {_LONGEST.get(name, 256)} characters")
    if _NAME.fullmatch(values["name"]) is None:
        allowed = "letters, digits, `_`, `-` and `.`, 48 at most, and begins with a letter or a digit"
        raise FormError("name", f"name is {values['name']!r:.80}; it consists of {allowed}")
    tags = values.get("tags", ())
    is_list = isinstance(tags, (list, tuple)) and len(tags) <= _MOST_TAGS
    if not is_list or any(not isinstance(tag, str) or not 1 <= len(tag) <= _LONGEST["tag"] for tag in tags):
        raise FormError("tags", f"tags must be a list of up to {_MOST_TAGS} texts of 1 to {_LONGEST['tag']} characters")


def _check_numbers(values: Mapping[str, Any]) -> None:
    function, comparison = values.get("function", "value"), values.get("comparison", "")
    threshold: Any = values.get("threshold")
    if function in _COMPARED:
        if comparison not in COMPARISONS:
            raise FormError("comparison", f"comparison is {comparison!r:.40}; allowed are {', '.join(COMPARISONS)}")
        if not _is_number(threshold) or not abs(threshold) <= sys.float_info.max:
            raise FormError("threshold", f"threshold must be a number, not {threshold!r:.40}")
    elif comparison or threshold is not None:
        raise FormError("comparison", f"{function} compares with no number: leave comparison and threshold out")
    for_steps, for_s = values.get("for_steps", 0), values.get("for_s", 0)
    if bool(for_steps) == bool(for_s):
        raise FormError("for_steps", "an alert has a duration: give either for_steps or for_s")
    if for_steps and function == "missing":
        raise FormError("for_steps", "a series is missing for a time: give for_s")
    is_whole = isinstance(for_steps, int) and not isinstance(for_steps, bool)
    if for_steps and not (is_whole and 1 <= for_steps <= _MOST_STEPS):
        allowed = f"a whole number from 1 to {_MOST_STEPS:,}"
        raise FormError("for_steps", f"for_steps must be {allowed}, not {for_steps!r:.40}")
    if for_s and not (_is_number(for_s) and 1 <= for_s <= _MOST_S):
        raise FormError("for_s", f"for_s must be a number from 1 to {_MOST_S:,.0f} (30 days), not {for_s!r:.40}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
