"""ecc: memory of a GPU fails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from perfagent.wire import Finding
from perfagent_server.rules.hardware.counters import follow_gains, newest_of
from perfagent_server.rules.rule import Every, Life, Question, Rule, Series
from perfagent_server.rules.window import Window

__all__ = ["Ecc"]

_UNCORRECTED = {
    "gpu/ecc_uncorrected_volatile": "uncorrected",
    "gpu/ecc_uncorrected_aggregate": "uncorrected",
    "gpu/remapped_rows_uncorrected": "uncorrected rows",
    "gpu/retired_pages_double": "uncorrected pages",
}
_CORRECTED = {"gpu/remapped_rows_corrected": "corrected rows", "gpu/retired_pages_single": "corrected pages"}
_FLOOD = {"gpu/ecc_corrected_volatile": "corrected", "gpu/ecc_corrected_aggregate": "corrected"}
_PENDING, _FAILED = "gpu/remap_pending", "gpu/remap_failed"
_COUNTERS = (*_UNCORRECTED, *_CORRECTED, *_FLOOD)


class _Trouble(NamedTuple):
    """kind: as its sentence names it; number: of errors, rows or pages."""

    severity: Literal["info", "warning", "critical"]
    kind: str
    cause: str
    ranks: list[int]
    number: int | None = None


@dataclass(frozen=True, kw_only=True)
class Ecc(Rule):
    """Memory errors during the run, on a device that it uses. A row that waits to be replaced, or could not be, is a state,
    and counts whenever it began.

    Limits are those of Meta's GPU cluster monitoring (gcm); there the counts of a lifetime count as well.
    """

    corrected_errors: float = 5e7

    id: ClassVar[str] = "ecc"
    severities = ("info", "warning", "critical")
    question = Question.DOES_IT_MOVE
    after = ("xid",)
    reads = (
        Every(10.0),
        *(Series(name, keep=2, axis="time", ranks="apart") for name in (*_COUNTERS, _PENDING, _FAILED)),
    )
    needs_card = True
    charts = ("gpu/ecc_uncorrected_volatile", "gpu/ecc_corrected_volatile", _PENDING)
    life = Life(outlives_run=True, restated=True)

    def judge(self, window: Window) -> Finding | None:
        if not any(name in window.by_time for name in (*_COUNTERS, _PENDING, _FAILED)):
            return None
        state = window.state_of(self, {})
        gains = follow_gains(window, state, _COUNTERS)
        pending = {rank for rank, value in newest_of(window, _PENDING).items() if value > 0}
        failed = {rank for rank, value in newest_of(window, _FAILED).items() if value > 0}
        earlier = {int(rank) for rank in state.setdefault("pending_at_first", sorted(pending))}
        if not (gains or pending or failed):
            return None
        found = [*self._troubles(gains), *_states(pending, earlier, failed)]
        if not found:
            return None
        found.sort(key=lambda one: self.severities.index(one.severity), reverse=True)
        worst, several = found[0], window.world_size > 1
        return self.found(
            worst.severity,
            cause=worst.cause,
            since_step=state.setdefault("since_step", window.step),
            ranks=sorted({rank for one in found for rank in one.ranks}),
            evidence={
                "troubles": [
                    {"kind": one.kind, "number": one.number, "on": one.ranks if several else []} for one in found
                ],
                "gained": {name: {str(rank): gain for rank, gain in of.items()} for name, of in gains.items()},
                "pending_ranks": sorted(pending), "failed_ranks": sorted(failed), "world_size": window.world_size,
            },
        )  # fmt: skip

    def _troubles(self, gains: dict[str, dict[int, float]]) -> list[_Trouble]:
        found: dict[str, _Trouble] = {}  # volatile and aggregate counts of one error are one
        for names, severity, cause, least in (
            (_UNCORRECTED, "critical", "", 1.0),
            (_FLOOD, "warning", "corrected", self.corrected_errors),
            (_CORRECTED, "info", "corrected", 1.0),
        ):
            for name, kind in names.items():
                ranks = sorted(rank for rank, gain in gains.get(name, {}).items() if gain >= least)
                if ranks and kind not in found:
                    found[kind] = _Trouble(severity, kind, cause, ranks, round(max(gains[name].values())))  # type: ignore[arg-type]
        return list(found.values())


def _states(pending: set[int], earlier: set[int], failed: set[int]) -> list[_Trouble]:
    found = []
    if failed:
        found.append(_Trouble("critical", "failed", "replace", sorted(failed)))
    if pending - earlier:
        found.append(_Trouble("critical", "new", "", sorted(pending - earlier)))
    elif pending:
        found.append(_Trouble("warning", "pending", "pending", sorted(pending)))
    return found
