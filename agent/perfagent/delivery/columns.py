"""Turns the rows of a tick into columns: the one place where values from outside are checked before they are stored or
sent.

Runs on the sender thread only. The training thread appends rows as they are; here they are grouped by the names they
hold, converted to numbers or refused (and counted), and packed as float32 where that loses nothing, float64 otherwise.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from struct import Struct
from typing import Any

from perfagent.wire import MAX_NAME_BYTES, Group, loss_kind
from perfagent.wire.limits import MAX_NAMES_PER_RUN, MOST_LEFT_OUT, room_of

__all__ = [
    "DROPPED", "NUMBERS", "AnyRow", "Columns", "Row", "UserRow", "clean_name", "is_urgent", "merge", "must_be_finite",
    "narrowed", "number", "pack",
]  # fmt: skip

Row = tuple[int, float, float, tuple[str, ...], Sequence[float]]
"""step, Unix time, monotonic, names (one tuple object per shape of row), values."""
UserRow = tuple[int, float, float, Mapping[str, Any]]
"""step, Unix time, monotonic, what the user logged; checked here."""
AnyRow = Row | UserRow

INT64 = 2**63
_FLOAT, _DOUBLE = Struct("f"), Struct("<d")
DROPPED = "agent/dropped"
_MOST_NAMED = 10
"""Of the names that are left out; thousands may be."""
NUMBERS = frozenset((float, int, bool))
_BIG_ENDIAN = sys.byteorder == "big"


class Columns:
    """Turns rows into groups and remembers which series the run has.

    max_series: how many names one run may have in each room but the catalogue's (wire/limits.py); samples of further
    names are counted in `refused["series"]` and left out. left_out: the first of those names; left_out_count: how many
    they are. refused: samples that
    could not be stored, by reason: "kind" (no number), "name" (empty), "series" (too many), "step". no_number: name and
    type of the first one of "kind". renamed: a sentence of each kind of name that is stored under another.
    """

    def __init__(self, max_series: int = MAX_NAMES_PER_RUN) -> None:
        self.max_series = max_series
        self.left_out: list[str] = []
        self._left_out: set[int] = set()  # hashes
        self.refused: Counter[str] = Counter()
        self.no_number = ""
        self.renamed: dict[str, str] = {}
        self._names: dict[Any, str | None] = {}
        self._series: set[str] = set()
        self._taken: Counter[str] = Counter()
        self._shapes: dict[tuple[str, ...], bool] = {}

    def groups(self, rows: Iterable[tuple[Any, ...]]) -> list[Group]:
        """The groups of some rows, in the order in which each shape of row first appeared."""
        shapes: dict[tuple[str, ...], list[tuple[int, float, float, Collection[float]]]] = {}
        for row in rows:
            if len(row) == 5:
                step, time, monotonic, names, values = row
                if self.knows(names):
                    shapes.setdefault(names, []).append((step, time, monotonic, values))
                    continue
                metrics: Mapping[Any, Any] = dict(zip(names, values, strict=False))
            else:
                step, time, monotonic, metrics = row
                names = tuple(metrics)
                if self._shapes.get(names) and type(step) is int:
                    shapes.setdefault(names, []).append((step, time, monotonic, metrics.values()))
                    continue
            checked = self._checked(step, time, monotonic, metrics)
            if checked is not None:
                self.knows(checked[0])
                shapes.setdefault(checked[0], []).append(checked[1])
        groups = []
        for names, same in shapes.items():
            group = _group(names, same)
            if group is None:  # somewhere a value that is no number of Python's own: look at each
                for step, time, monotonic, values in same:
                    checked = self._checked(step, time, monotonic, dict(zip(names, values, strict=False)))
                    slow = checked and _group(checked[0], [checked[1]])
                    if slow:
                        groups.append(slow)
            else:
                groups.append(group)
        return merge(groups) if len(groups) > len(shapes) else groups

    def checked(self, row: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """A row that is plain data with names and numbers as they may be stored; None where nothing of it may."""
        if len(row) == 5:
            step, time, monotonic, names, values = row
            if self.knows(names) and NUMBERS.issuperset(map(type, values)):
                return row
            metrics: Mapping[Any, Any] = dict(zip(names, values, strict=False))
        else:
            step, time, monotonic, metrics = row
            names = tuple(metrics)
            if self._plain(names, metrics) and type(step) is int:
                return row
        found = self._checked(step, time, monotonic, metrics)
        if found is None:
            return None
        self.knows(found[0])
        (step, time, monotonic, values), names = found[1], found[0]
        return step, time, monotonic, names, values

    def _plain(self, names: tuple[Any, ...], metrics: Mapping[Any, Any]) -> bool:
        """Whether a user's row holds what most do, names seen before and Python's own numbers: a quarter of the
        time."""
        return self._shapes.get(names, False) and NUMBERS.issuperset(map(type, metrics.values()))

    def knows(self, names: tuple[str, ...]) -> bool:
        """Whether these are names as they may be stored, of series that the run has or has room for."""
        known = self._shapes.get(names)
        if known is None:
            known = len(set(names)) == len(names) and all(
                isinstance(name, str) and clean_name(name) == name and self._admits(name) for name in names
            )
            if len(self._shapes) > 4096:  # shapes that change all the time: start over rather than grow
                self._shapes.clear()
            self._shapes[names] = known
        return known

    def _checked(
        self, step: Any, time: float, monotonic: float, metrics: Mapping[Any, Any]
    ) -> tuple[tuple[str, ...], tuple[int, float, float, list[float]]] | None:
        values: dict[str, float] = {}
        for key, value in metrics.items():
            converted = number(value)
            if converted is None:
                self.refused["kind"] += 1
                self.no_number = self.no_number or _described(key, value)
                continue
            name = self.name(key)
            if name is not None:
                values[name] = converted
        if not values:
            return None
        if not isinstance(step, int) or not -INT64 <= step < INT64:
            self.refused["step"] += len(values)
            return None
        return tuple(values), (step, time, monotonic, list(values.values()))

    @property
    def left_out_count(self) -> int:
        return len(self._left_out)

    def name(self, key: Any) -> str | None:
        """The name under which samples of `key` are stored; None (and counted) where they are not."""
        try:
            return self._names[key]
        except (KeyError, TypeError):
            pass
        name = clean_name(key)
        if name is None:
            self.refused["name"] += 1
            return None
        if not self._admits(name):
            self.refused["series"] += 1
            return None
        if name != key:
            kind, sentence = _change_of(key, name)
            self.renamed.setdefault(kind, sentence)
        if isinstance(key, str) and len(self._names) < 2 * self.max_series:
            self._names[key] = name
        return name

    def _admits(self, name: str) -> bool:
        """Whether the run has this series, or has room for it and has it from here on."""
        if name in self._series:
            return True
        room = room_of(name)
        if room != "catalogue" and self._taken[room] >= self.max_series:
            if len(self.left_out) < _MOST_NAMED and name not in self.left_out:
                self.left_out.append(name)
            if len(self._left_out) < MOST_LEFT_OUT:
                self._left_out.add(hash(name))
            return False
        self._taken[room] += 1
        self._series.add(name)
        return True


def _change_of(key: Any, name: str) -> tuple[str, str]:
    """The kind of a name that is stored under another, and what to say of it."""
    if not isinstance(key, str):
        kind = type(key).__name__
        return (
            f"name of type {kind}",
            f"log({{{key!r:.40}: value}}): names are text, not {kind}; it is stored as {name!r:.40}",
        )
    size = len(key.encode("utf-8", "replace"))
    if size > MAX_NAME_BYTES:
        said = f"the name {key[:40]!r}... of log() has {size} bytes, and {MAX_NAME_BYTES} are allowed; it is cut there"
        return "long name", f"{said}: names that differ only behind are one series; shorten it"
    return (
        "characters of a name",
        f"the name {key[:80]!r} of log() has control characters; it is stored as {name[:80]!r}",
    )


def _described(key: Any, value: Any) -> str:
    """value: or its type, where it was not kept."""
    name = repr(clean_name(key)) if type(key) is str else f"a name of type {type(key).__name__}"
    kind = value if isinstance(value, type) else type(value)
    return f"{name:.80} (a value of type {kind.__name__:.80})"


def clean_name(key: Any) -> str | None:
    """A metric name as it may travel: text without control characters or lone surrogates, at most 256 bytes of
    UTF-8."""
    raw = key if isinstance(key, str) else str(key) if isinstance(key, (int, float)) else ""
    if raw.isascii() and raw.isprintable() and 0 < len(raw) <= MAX_NAME_BYTES:
        return raw
    text = raw.encode("utf-8", "replace").decode("utf-8")
    text = "".join("�" if ord(c) < 32 or ord(c) == 127 else c for c in text)
    return text.encode("utf-8")[:MAX_NAME_BYTES].decode("utf-8", "ignore") or None


def number(value: Any) -> float | None:
    """A Python float for what counts as one number, None for everything else.

    bool, int, float, numpy scalars and 0-d arrays, 0-d torch tensors in host memory. An int beyond float's range is an
    infinity of its sign. A tensor on a device is refused: reading it would wait for the device (the session reads
    those).
    """
    kind = type(value)
    if kind is float:
        return value  # type: ignore[no-any-return]
    if kind is int or kind is bool:
        return _int(value)
    if isinstance(value, (str, bytes, complex)) or value is None:
        return None
    if isinstance(value, (int, float)):
        return _int(value)
    device = getattr(value, "device", None)
    if device is not None and getattr(device, "type", "cpu") != "cpu":
        return None
    if getattr(value, "ndim", None) != 0 or getattr(getattr(value, "dtype", None), "is_complex", False):
        return None
    try:  # numpy and torch scalars; a hostile object may raise anything from its own methods
        item = value.item()
        return _int(item) if isinstance(item, (int, float)) else None
    except Exception:  # noqa: BLE001
        return None


def _int(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _group(names: tuple[str, ...], rows: Sequence[tuple[int, float, float, Collection[float]]]) -> Group | None:
    """None where a value is not one of Python's own numbers, or does not fit."""
    try:
        steps, times, monotonics, values = zip(*rows, strict=True)
        columns = [*zip(*values, strict=True)]
        if len(columns) != len(names) or not all(NUMBERS.issuperset(map(type, column)) for column in columns):
            return None
        return _of_columns(names, steps, times, monotonics, columns)
    except (TypeError, OverflowError, ValueError):
        return None


def _of_columns(
    names: tuple[str, ...], steps: Sequence[int], times: Sequence[float], monotonics: Sequence[float],
    columns: Sequence[Sequence[float]],
) -> Group:  # fmt: skip
    """Raises TypeError, OverflowError or ValueError for what does not fit."""
    return Group(
        step=_little(array("q", steps)),
        time=_little(array("d", times)),
        monotonic=_little(array("d", monotonics)),
        values={name: pack(column) for name, column in zip(names, columns, strict=True)},
    )


def pack(values: Sequence[float]) -> bytes:
    """Little-endian bytes: float32 where every value is exactly a float32 (NaN payloads included), else float64."""
    return narrowed(_little(array("d", values)))


def narrowed(wide: bytes) -> bytes:
    """Little-endian float64 as float32 where every value is exactly one."""
    # a column of durations shows it at once, and is spared conversions
    if wide and not _fits(_DOUBLE.unpack_from(wide)[0]):
        return wide
    values = array("d", wide)
    if _BIG_ENDIAN:
        values.byteswap()
    narrow = array("f", values)
    return _little(narrow) if array("d", narrow).tobytes() == values.tobytes() else wide


def _fits(value: float) -> bool:
    try:
        return value != value or _FLOAT.unpack(_FLOAT.pack(value))[0] == value
    except OverflowError:
        return False


def _little(values: array[Any]) -> bytes:
    if _BIG_ENDIAN:
        values.byteswap()
    return values.tobytes()


def must_be_finite(name: Any) -> bool:
    """Whether a value that is not finite means harm under this name: what is trained on, by whatever name, or its
    gradients."""
    return isinstance(name, str) and (name.startswith("grad/") or loss_kind(name) == "whole")


def is_urgent(group: Group) -> bool:
    """Whether the group holds what must not wait for the next flush: a non-finite loss or gradient value."""
    for name in group.values:
        if must_be_finite(name):
            # a sum is finite only if every term is; an overflow of finite terms only costs an early flush
            if not math.isfinite(sum(group.column(name))):
                return True
            if name == "grad/nonfinite" and any(group.column(name)):
                return True
    return False


def merge(groups: Iterable[Group]) -> list[Group]:
    """The same rows in as few groups as possible; rows keep their order within a group."""
    shapes: dict[tuple[str, ...], list[Group]] = {}
    for group in groups:
        shapes.setdefault(tuple(group.values), []).append(group)
    return [same[0] if len(same) == 1 else _joined(names, same) for names, same in shapes.items()]


def _joined(names: tuple[str, ...], groups: list[Group]) -> Group:
    values = {}
    for name in names:
        parts = [group.values[name] for group in groups]
        wide = [len(part) == 8 * group.rows for part, group in zip(parts, groups, strict=True)]
        if any(wide) and not all(wide):
            parts = [
                part if is_wide else _little(array("d", group.column(name)))
                for part, is_wide, group in zip(parts, wide, groups, strict=True)
            ]
        values[name] = b"".join(parts)
    return Group(
        step=b"".join(group.step for group in groups),
        time=b"".join(group.time for group in groups),
        monotonic=b"".join(group.monotonic for group in groups),
        values=values,
    )
