"""Reports what torch.compile did: how often it compiled, why it compiled again, how often a graph broke.

Read twice a second on the sender's thread, from the records that torch itself keeps of its compilations. They are private to
torch: where they are missing, nothing is reported and the failure is counted.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from perfagent.boundary.guard import guarded
from perfagent.boundary.import_hooks import is_executing
from perfagent.hooks import compile_time
from perfagent.measure.source_lines import short

if TYPE_CHECKING:
    from perfagent.delivery.handoff import Handoff
    from perfagent.step.state import StepState

__all__ = ["Compilations"]

EVERY_S = 0.5
MOST_EVENTS = 100
MOST_LIMITS = 20
_MOST_REASON = 300
_MOST_FRAMES = 256
_MODULE = "torch._dynamo.utils"
_NAMES = ("compile/count", "compile/recompiles", "compile/graph_breaks")
_OF_ENTRY = re.compile(r"^\s*!?[\d/]+(?:_\d+)?:\s*")  # "0/7: ", the compilation that did not fit
_SOURCE = re.compile(r"\s{2,}# .*")  # the line that asked for the guard
_LIMIT = re.compile(r"(?:recompile|cache_size)_?\s?limit", re.IGNORECASE)
_SET_TO = re.compile(r"set to (\d+)")


class Compilations:
    """`Compilations(handoff, progress).install()`. What was compiled before is left out."""

    def __init__(self, handoff: Handoff, progress: StepState) -> None:
        self._handoff, self._progress = handoff, progress
        self._reading = threading.Lock()  # the end of the run reads, too
        self._frames: dict[str, dict[str, str]] = {}
        """torch's number of a compiled function -> its name and line, as an event has them"""
        self._reported = [0, 0]  # recompilations, and limits reached
        self._counts = [0, 0, 0]  # as in _NAMES
        self._newest: Any = None
        self._breaks_seen = 0
        self._begin()

    def install(self) -> None:
        self._handoff.add_source(self.poll, every_s=EVERY_S)

    @guarded
    def _begin(self) -> None:
        utils = _torchs_records()
        if utils is not None:
            self._newest = next(reversed(utils._compilation_metrics), None)
            self._breaks_seen = _graph_breaks(utils)

    @guarded
    def poll(self) -> None:
        """Reads what is new. On the sender's thread, and once more when the run ends."""
        utils = _torchs_records()
        if utils is None:
            return
        compile_time.put_back()
        records = utils._compilation_metrics
        if not records or records[-1] is self._newest or not self._reading.acquire(blocking=False):
            return
        try:
            self._read(utils, list(records))
        finally:
            self._reading.release()

    def _read(self, utils: Any, records: list[Any]) -> None:
        new = next((at + 1 for at in range(len(records) - 1, -1, -1) if records[at] is self._newest), 0)
        before = [*self._counts]
        for at, record in enumerate(records):
            # that of a limit reached does not name its function
            if _is_of_function(record) and len(self._frames) < _MOST_FRAMES:
                line = f"{short(str(record.co_filename or ''))[-200:]}:{int(record.co_firstlineno or 0)}"
                self._frames[_ids(record)[0]] = {"function": str(record.co_name)[:100], "line": line}
            if at >= new:
                self._count_one(record)
        self._newest = records[-1]
        breaks, seen = _graph_breaks(utils), self._breaks_seen
        self._counts[2] += breaks - seen if breaks >= seen else breaks  # a script may clear them
        self._breaks_seen = breaks
        if self._counts != before:
            values = tuple(map(float, self._counts))
            step = self._progress.logged_at()
            self._handoff.rows.append((step, time.time(), time.monotonic(), _NAMES, values))

    def _count_one(self, record: Any) -> None:
        failure = f"{record.fail_type or ''} {(record.fail_reason or '')[:1000]}"
        limit = bool(record.fail_type and _LIMIT.search(failure))
        if not (_is_of_function(record) or limit):
            return  # the backward pass of a graph, compiled later
        if not record.fail_type:
            self._counts[0] += 1
            self._counts[1] += _ids(record)[1] != "0"
        reason = getattr(record, "recompile_reason", None)  # torch 2.4 and 2.5 do not note it
        if reason is not None and (limit or not record.fail_type):
            self._report(record, str(reason), failure if limit else "")

    def _report(self, record: Any, reason: str, limit: str) -> None:
        self._reported[bool(limit)] += 1
        if self._reported[bool(limit)] > (MOST_LIMITS if limit else MOST_EVENTS):
            return
        data: dict[str, str | float] = dict(self._frames.get(_ids(record)[0], {}))
        seconds = (record.duration_us or 0) / 1e6
        data |= {"reason": _in_words(reason), "seconds": seconds, "limit_reached": bool(limit)}
        if found := _SET_TO.search(limit):
            data["limit"] = int(found[1])
        # the id of one that met the limit is not among those that were compiled
        step = None if limit else compile_time.step_of(str(record.compile_id))
        self._handoff.event("compile", data, step=self._progress.logged_at() if step is None else step)


def _torchs_records() -> Any:
    """The module with torch's records; None while nothing of torch.compile is imported."""
    return None if is_executing(_MODULE) else sys.modules.get(_MODULE)


def _graph_breaks(utils: Any) -> int:
    return sum(list(utils.counters.get("graph_break", {}).values()))


def _is_of_function(record: Any) -> bool:
    return bool(getattr(record, "co_name", None))  # torch 2.4 has records of another class for backward passes


def _ids(record: Any) -> tuple[str, str]:
    """`0` and `7` of `0/7_1`: torch numbers the functions that it compiles, and how often it compiled each."""
    function, _, number = str(record.compile_id).rpartition("/")
    return function, number.partition("_")[0]


def _in_words(reason: str) -> str:
    """The guard that failed, without the number of the compilation that it belongs to, and without the source code."""
    line = next((line for line in reason.splitlines() if line.strip()), "")
    return " ".join(_SOURCE.sub("", _OF_ENTRY.sub("", line)).split())[:_MOST_REASON]
