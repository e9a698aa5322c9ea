"""Checks names and values from outside before they are stored or sent, on the sender thread; what may not be stored is
counted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from perfagent.wire import MAX_NAME_BYTES, Group, loss_kind
from perfagent.wire.limits import MAX_NAMES_PER_RUN, MOST_LEFT_OUT, room_of

__all__ = ["DROPPED", "INT64", "AnyRow", "Columns", "Row", "clean_name", "is_urgent", "must_be_finite", "number"]

Row = tuple[int, float, float, Mapping[str, Any]]
"""step, Unix time, monotonic, values by name"""
AnyRow = Row | tuple[int, float, float, tuple[str, ...], Collection[float]]
"""As it is handed in: names and values may stand apart."""

INT64 = 2**63
DROPPED = "agent/dropped"
_MOST_NAMED = 10
"""Names to report of those left out."""
_MOST_SHAPES = 4096


class Columns:
    """Remembers which series the run has, and checks rows.

    max_series: how many names one run may have in each room but the catalogue's (wire/limits.py); samples of further
    names are counted in `refused["series"]` and left out. left_out: the first of those names; left_out_count: how many
    they are. refused: samples that could not be stored, by reason: "kind" (no number), "name" (empty), "series" (too
    many), "step". no_number: name and type of the first one of "kind". renamed: the first name that is stored under
    another, and that one.
    """

    def __init__(self, max_series: int = MAX_NAMES_PER_RUN) -> None:
        self.max_series = max_series
        self.left_out: list[str] = []
        self._left_out: set[int] = set()  # hashes
        self.refused: Counter[str] = Counter()
        self.no_number = ""
        self.renamed: tuple[object, str] | None = None
        self._series: set[str] = set()
        self._series_of_room: Counter[str] = Counter()
        self._shapes: dict[tuple[str, ...], bool] = {}

    @property
    def left_out_count(self) -> int:
        return len(self._left_out)

    def checked(self, row: Row) -> Row | None:
        """What of a row may be stored, as plain data; None where nothing may. The rest is counted."""
        step, time, monotonic, metrics = row
        values: dict[str, float] = {}
        for key, value in metrics.items():
            converted = number(value)
            if converted is None:
                self.refused["kind"] += 1
                kind = value if isinstance(value, type) else type(value)  # where it was not kept, its type was
                self.no_number = self.no_number or f"{clean_name(key)!r:.80} (a value of type {kind.__name__:.80})"
                continue
            name = self.name(key)
            if name is not None:
                values[name] = converted
        if not values:
            return None
        if not isinstance(step, int) or not -INT64 <= step < INT64:
            self.refused["step"] += len(values)
            return None
        return step, time, monotonic, values

    def knows(self, names: tuple[str, ...]) -> bool:
        """Whether these are names as they may be stored, of series that the run has or has room for."""
        known = self._shapes.get(names)
        if known is None:
            known = len(set(names)) == len(names) and all(
                isinstance(name, str) and clean_name(name) == name and self._admits(name) for name in names
            )
            if len(self._shapes) > _MOST_SHAPES:  # shapes that change all the time: start over rather than grow
                self._shapes.clear()
            self._shapes[names] = known
        return known

    def name(self, key: object) -> str | None:
        """The name under which samples of `key` are stored; None (and counted) where they are not."""
        name = clean_name(key)
        if name is None or not self._admits(name):
            self.refused["name" if name is None else "series"] += 1
            return None
        if name != key and self.renamed is None:
            self.renamed = key, name
        return name

    def _admits(self, name: str) -> bool:
        """Whether the run has this series, or has room for it and has it from here on."""
        if name in self._series:
            return True
        room = room_of(name)
        if room != "catalogue" and self._series_of_room[room] >= self.max_series:
            if len(self.left_out) < _MOST_NAMED and name not in self.left_out:
                self.left_out.append(name)
            if len(self._left_out) < MOST_LEFT_OUT:
                self._left_out.add(hash(name))
            return False
        self._series_of_room[room] += 1
        self._series.add(name)
        return True


def clean_name(key: object) -> str | None:
    """A metric name as it may travel: printable text of at most 256 bytes of UTF-8."""
    raw = key if isinstance(key, str) else str(key) if isinstance(key, (int, float)) else ""
    if raw.isascii() and raw.isprintable() and 0 < len(raw) <= MAX_NAME_BYTES:
        return raw
    text = raw.encode("utf-8", "replace").decode("utf-8")
    text = "".join("�" if ord(c) < 32 or ord(c) == 127 else c for c in text)
    return text.encode("utf-8")[:MAX_NAME_BYTES].decode("utf-8", "ignore") or None


def number(value: object) -> float | None:
    """A Python float for what counts as one number, None for everything else.

    bool, int, float, numpy scalars and 0-d arrays, 0-d torch tensors in host memory. An int beyond float's range is an
    infinity of its sign. A tensor on a device is refused: reading it would wait for the device (the session reads
    those).
    """
    try:  # a hostile object may raise anything from its own methods
        if not isinstance(value, (int, float)):
            if getattr(value, "ndim", None) != 0 or getattr(getattr(value, "device", None), "type", "cpu") != "cpu":
                return None
            value = getattr(value, "item")()  # noqa: B009 - of any object
        return _float(value) if isinstance(value, (int, float)) else None
    except Exception:  # noqa: BLE001
        return None


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def must_be_finite(name: object) -> bool:
    """Whether a value that is not finite means harm under this name: a loss that is trained on, or gradients."""
    return isinstance(name, str) and (name.startswith("grad/") or loss_kind(name) == "whole")


def is_urgent(group: Group) -> bool:
    """Whether the group holds what must not wait for the next flush: a non-finite loss or gradient value."""
    if "grad/nonfinite" in group.values and any(group.column("grad/nonfinite")):
        return True
    # a sum is finite only if every term is; an overflow of finite terms only costs an early flush
    return any(must_be_finite(name) and not math.isfinite(sum(group.column(name))) for name in group.values)
