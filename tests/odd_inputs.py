"""What nobody should send or store, made by hypothesis: frames, events, bodies, rows, settings, files of rules, clocks."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import strategies as st

import perfagent_server
from perfagent.wire import EVENT_KINDS, Event, Frame, Group
from perfagent_server.rules.catalogue import all_rules
from perfagent_server.rules.rule import Series
from perfagent_server.store.tables import channel, delivery, rule_state, run, silence, source

__all__ = ["ODD", "Odd"]


class Odd(NamedTuple):
    """kind: frame or log (by HTTP), stored (past the edge), bytes (a row of the tail), row (of another table), setting,
    file, or clock."""

    kind: str
    what: Any


_SOURCE = Path(perfagent_server.__file__).parent
KEYS = sorted(
    {key for file in _SOURCE.rglob("*.py") for key in re.findall(r'(?:\.get\(|\[)"(\w+)"', file.read_text("utf-8"))}
)
RULES = [rule.id for rule in all_rules()]
NAMES = sorted(
    {one.name for rule in all_rules() for one in rule.reads if isinstance(one, Series)}
    | {"loss/kl", "g_loss", "val/loss", "grad/norm/layer.0", "my metric", "", "\x00", "x" * 300}
)

_TEXTS = st.sampled_from(
    ["", "\x00", "a" * 10_000, "é\u202e", "running", "finished", "failed", "oom", "starting", "critical", "info", "warning",
     *RULES[:8], "rank", "0", "NaN", "<script>"]
)  # fmt: skip
_INTS = st.sampled_from([0, 1, -1, 2, 7, 1000, 4096, 2**31, 2**53, 2**63 - 1, -(2**63), 2**64 - 1])
_FLOATS = st.sampled_from([0.0, -0.0, 1.5, -1e300, 1e308, 5e-324, math.nan, math.inf, -math.inf])
_LEAVES = st.none() | st.booleans() | _INTS | _FLOATS | _TEXTS
_KEYS = st.sampled_from(KEYS)
_JSON = st.recursive(
    _LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=4), max_leaves=8
)


def _deep(depth: int) -> Any:
    found: Any = []
    for _ in range(depth):
        found = [found]
    return found


_DATA = st.dictionaries(_KEYS, _JSON | st.just(_deep(300)), max_size=5)


@st.composite
def _data(draw: st.DrawFn, kind: str) -> dict[str, Any]:
    """Of an event: what its kind usually has, with odd values, and anything else."""
    usual = {
        "state": ["state", "world_size", "start_step", "reason", "stage", "pid", "host", "config", "tags", "heartbeat"],
        "finding": [
            "rule",
            "severity",
            "message",
            "ranks",
            "since_step",
            "evidence",
            "gain_pct",
            "explains",
            "cause",
            "fix",
        ],
        "alert": ["title", "text", "level"],
        "stacks": ["threads"],
        "collectives": ["groups", "complete"],
    }.get(kind, [])
    found = draw(_DATA)
    for key in usual:
        if draw(st.booleans()):
            found[key] = draw(_JSON)
    if kind == "state":
        found["state"] = draw(st.sampled_from(["running", "finished", "failed", "oom", "killed", "starting", [], {}]))
    if kind == "finding" and draw(st.booleans()):
        found["rule"], found["severity"] = draw(st.sampled_from(RULES)), draw(st.sampled_from(["critical", "info"]))
    return found


@st.composite
def _events(draw: st.DrawFn) -> Event:
    kind = draw(st.sampled_from(EVENT_KINDS))
    return Event(kind=kind, time=draw(_TIMES), step=draw(st.none() | _INTS), data=draw(_data(kind)))


_TIMES = st.sampled_from([1.7e9, 1.7e9 + 5, 1.7e9 + 86_400, 0.0, -1e9, 4e9, 1e300, math.nan, math.inf, -math.inf])
_STEPS = st.sampled_from([0, 1, 2, 3, 4, 5, 6, 50, 1000, -1, -(2**40), 2**53, 2**62, 2**63 - 1])
_VALUES = _FLOATS | st.sampled_from([1.0, 2.0, 3.0, 1e9, -5.0, 100.0])


@st.composite
def _groups(draw: st.DrawFn) -> Group:
    rows = draw(st.integers(0, 4))
    column = lambda one: draw(st.lists(one, min_size=rows, max_size=rows))  # noqa: E731
    names = draw(st.lists(st.sampled_from(NAMES), max_size=8, unique=True))
    return Group(column(_STEPS), column(_TIMES), column(_TIMES), {name: column(_VALUES) for name in names})


@st.composite
def _frames(draw: st.DrawFn) -> Frame:
    run, rank = draw(st.sampled_from("abcd")), draw(st.sampled_from([0, 0, 1, 5, 3000]))
    attempt = draw(st.sampled_from([1, 2, 3, 2**40]))
    return Frame(
        project="odd", run=run, source=f"{run}-{attempt}-{rank}", attempt=attempt, rank=rank, seq=1,
        groups=draw(st.lists(_groups(), max_size=3)), events=draw(st.lists(_events(), max_size=4)),
        name=draw(st.none() | st.just("same name")), sent=draw(st.none() | _TIMES),
    )  # fmt: skip


def _setting(project: str, rule: str, value: Any, text: str | None) -> tuple[str, str, str]:
    """A row. Who switches the rule off for all, or says how much it excuses, may: that is no odd input."""
    if rule == "nonfinite_loss" and isinstance(value, dict):
        value = {**value, "enabled": value.get("enabled") or "?"}
    return project, rule, json.dumps(value) if text is None else text


_THRESHOLDS = st.sampled_from(
    sorted({name for rule in all_rules() for name in rule.thresholds()} | {"enabled", "profile"})
)
_SETTINGS = st.builds(
    _setting, st.sampled_from(["", "odd"]), st.sampled_from([*RULES, "gone"]),
    st.dictionaries(_THRESHOLDS, _JSON, max_size=4) | _JSON,
    st.none() | st.none() | st.sampled_from(["", "{", "nul", "[" * 5000, '{"a": 1' + "0" * 5000 + "}", '"\\ud800"']),
)  # fmt: skip
_FILES = st.binary(max_size=60) | st.builds(
    lambda rule, name, value: f"[{rule}]\n{name} = {value}\n".encode(),
    st.sampled_from([*RULES, "projects.odd", "projects", "gone", "odd.odd"]), _THRESHOLDS,
    st.sampled_from(["1", "-1", "nan", "inf", "1e400", "9" * 5000, '"x"', "[]", "true", "1979-05-27", "[" * 2000]),
)  # fmt: skip
_NO_TIMES = st.sampled_from(["soon", "", b"\xff", math.inf, -math.inf, 1e308])
_CELLS = _NO_TIMES | st.sampled_from([-1.0, 0.0, 2**62, "[", "\x00"])
_KEPT = {"id", "run", "channel", "alert", "shard"}  # they say whose a row is
_TABLES = {table.name: table for table in (silence, channel, delivery, run, source, rule_state)}


@st.composite
def _rows(draw: st.DrawFn) -> tuple[str, str, Any]:
    """A table, a column of it, and what is in there. A silence that can be read, or a channel that is off, may keep an alert
    back: of a silence, only the times are odd."""
    table = draw(st.sampled_from(sorted(_TABLES)))
    if table == "silence":
        return table, draw(st.sampled_from(["starts", "ends"])), draw(_NO_TIMES)
    columns = sorted({column.name for column in _TABLES[table].columns} - _KEPT)
    return table, draw(st.sampled_from(columns)), draw(_CELLS)


_LOG = st.one_of(
    _JSON,
    st.fixed_dictionaries(
        {},
        optional={
            "run": _JSON | st.sampled_from("abcd"),
            "project": _JSON,
            "rows": _JSON | st.lists(_DATA, max_size=3),
        },
    ),
    st.builds(lambda values: {"run": "a", "project": "odd", **values}, _DATA),
)
ODD: st.SearchStrategy[Odd] = st.one_of(
    st.builds(Odd, st.just("frame"), _frames()),
    st.builds(Odd, st.just("stored"), _frames()),
    st.builds(Odd, st.just("stored"), _frames()),
    st.builds(Odd, st.just("setting"), _SETTINGS),
    st.builds(Odd, st.just("row"), _rows()),
    st.builds(Odd, st.just("row"), _rows()),
    st.builds(Odd, st.just("log"), _LOG),
    st.builds(Odd, st.just("bytes"), st.binary(max_size=40)),
    st.builds(Odd, st.just("file"), _FILES),
    st.builds(
        Odd, st.just("clock"), st.sampled_from([3600.0, -3600.0, 86_400.0 * 400, -86_400.0 * 400, 60.0, math.nan])
    ),
)
