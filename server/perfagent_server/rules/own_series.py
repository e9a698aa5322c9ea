"""The series of a run that users' own alerts watch, beside those that rules read: no alert changes what a rule sees."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perfagent.wire import metric, whole_of
from perfagent_server.rules.own_alert import MOST_SERIES, OwnAlert, Point
from perfagent_server.rules.rule import Series
from perfagent_server.rules.step_series import StepSeries

__all__ = ["OwnSeries", "Watched", "watched"]

_KEPT = 16  # steps of each: alerts remember what they need


@dataclass(frozen=True, slots=True)
class Watched:
    """A series of a group that alerts watch. name: as on charts, where ranks send parts of it that of the whole; place: in
    the group; is_part: it is a part."""

    name: str
    place: int
    is_part: bool
    alerts: tuple[OwnAlert, ...]


def watched(names: Sequence[str], alerts: Sequence[OwnAlert]) -> tuple[Watched, ...]:
    if not alerts:
        return ()
    found = []
    for place, name in enumerate(names):
        whole = whole_of(name)
        its = tuple(alert for alert in alerts if alert.watches(whole or name))
        if its:
            found.append(Watched(whole or name, place, bool(whole), its))
    return tuple(found)


class OwnSeries:
    """Of one attempt. A series is put together from its ranks once for alerts that count steps, and once for those that
    count seconds: of the values of a second the last counts."""

    def __init__(self, alerts: Mapping[str, OwnAlert]) -> None:
        self._alerts = alerts
        self._series: dict[tuple[str, str], StepSeries] = {}
        self._watching: dict[tuple[str, str], dict[str, None]] = {}  # series -> ids of the alerts
        self._count: dict[str, int] = {}  # alert -> how many series it watches
        self._full: set[str] = set()
        self._step = 0

    def is_full(self, alert: str) -> bool:
        """Whether more series match it than are watched for it."""
        return alert in self._full

    def take(
        self, rank: int, found: Sequence[Watched], steps: Sequence[int], times: Sequence[float],
        values: Mapping[int, Sequence[float]], now: float, world: int,
    ) -> None:  # fmt: skip
        """values: by the places of the group."""
        self._step = max(self._step, *steps)
        for one in found:
            for alert in one.alerts:
                self._watch(alert, one)
            for unit in ("steps", "s"):
                series = self._series.get((one.name, unit))
                if series is None or series.of_parts is not one.is_part:
                    continue
                if unit == "steps":
                    series.take(rank, steps, values[one.place], times, now, world)
                elif seconds := _by_second(times, values[one.place]):
                    series.take(rank, [*seconds], [*seconds.values()], [*map(float, seconds)], now, world)

    def _watch(self, alert: OwnAlert, found: Watched) -> None:
        key = found.name, alert.unit
        alerts = self._watching.get(key, {})
        if alert.id in alerts:
            return
        if self._count.get(alert.id, 0) >= MOST_SERIES:
            self._full.add(alert.id)
            return
        self._count[alert.id] = self._count.get(alert.id, 0) + 1
        self._watching.setdefault(key, {})[alert.id] = None
        if key not in self._series:
            self._series[key] = _series(found.name, is_part=found.is_part)

    def ready(self, now: float, world: int, newest: int) -> Iterator[tuple[OwnAlert, Point]]:
        """What is complete, each value for each alert on its series. newest: the run's step."""
        for (name, unit), series in self._series.items():
            series.close(now, world)
            while series.advance():
                at, value = series.steps[series.seen - 1], series.values[series.seen - 1]
                time = float(at) if unit == "s" else series.times[series.seen - 1]
                point = Point(name, at, at if unit == "steps" else max(newest, self._step), time, value)
                for alert in self._watching[name, unit]:
                    if alert in self._alerts:
                        yield self._alerts[alert], point

    def waits_until(self) -> float | None:
        """When time alone closes a step that waits for a rank, server clock; None if none waits."""
        return min((at for one in self._series.values() if (at := one.waits_until()) is not None), default=None)

    def snapshot(self) -> list[Any]:
        return [
            [
                [*key, series.of_parts, series.snapshot(), [*self._watching[key]]] for key, series in self._series.items()
            ],
            [*self._full], self._step,
        ]  # fmt: skip

    def restore(self, state: Sequence[Any]) -> None:
        """Without the series of alerts that are not there any more."""
        entries, full, self._step = state
        for name, unit, is_part, saved, ids in entries:
            known = [self._alerts[one] for one in ids if one in self._alerts]
            its = [alert.id for alert in known if alert.unit == unit and alert.watches(name)]
            if its:
                self._series[name, unit] = _series(name, is_part=is_part)
                self._series[name, unit].restore(saved)
                self._watching[name, unit] = dict.fromkeys(its)
                for one in its:
                    self._count[one] = self._count.get(one, 0) + 1
        self._full = {alert for alert in full if self._count.get(alert) == MOST_SERIES}


def _series(name: str, *, is_part: bool) -> StepSeries:
    how = (
        Series(name, _KEPT, merge="root of sum", part_of=name)
        if is_part
        else Series(name, _KEPT, metric(name).over_ranks)
    )
    return StepSeries(name, how, judged=True)


def _by_second(times: Sequence[float], values: Sequence[float]) -> dict[int, float]:
    rows = zip(times, values, strict=True)
    return {math.floor(time): value for time, value in rows if math.isfinite(time)}
