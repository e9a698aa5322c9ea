"""ecc: memory of a GPU fails."""

from __future__ import annotations

from dataclasses import dataclass

from perfagent.wire import Finding, Severity
from perfagent_server.rules.hardware.counters import CounterRule, Trouble, follow_gains
from perfagent_server.rules.rule import Every, Life, Series
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
_SERIES = (*_COUNTERS, _PENDING, _FAILED)


@dataclass(frozen=True, kw_only=True)
class Ecc(CounterRule):
    """Memory errors during the run, on a device that it uses. A row that waits to be replaced, or could not be, is a state,
    and counts whenever it began.

    Limits are those of Meta's GPU cluster monitoring (gcm); there the counts of a lifetime count as well.
    """

    corrected_errors: float = 5e7

    id = "ecc"
    severities = ("info", "warning", "critical")
    after = ("xid",)
    reads = (Every(10.0), *(Series(name, keep=2, axis="time", ranks="apart") for name in _SERIES))
    charts = ("gpu/ecc_uncorrected_volatile", "gpu/ecc_corrected_volatile", _PENDING)
    life = Life(outlives_run=True, restated=True)

    def judge(self, window: Window) -> Finding | None:
        if window.by_time.keys().isdisjoint(_SERIES):
            return None
        state = window.state_of(self, {})
        gains = follow_gains(window, state, _COUNTERS)
        pending = {rank for rank, value in window.readings(_PENDING).newest_by_rank().items() if value > 0}
        failed = {rank for rank, value in window.readings(_FAILED).newest_by_rank().items() if value > 0}
        earlier = {int(rank) for rank in state.setdefault("pending_at_first", sorted(pending))}
        if not (gains or pending or failed):
            return None
        found = [*self._troubles(gains), *_states(pending, earlier, failed)]
        found.sort(key=lambda one: self.severities.index(one.severity), reverse=True)
        since_step = state.setdefault("since_step", window.step) if found else window.step
        ranks = {"pending_ranks": sorted(pending), "failed_ranks": sorted(failed)}
        return self.worst(window, found, since_step, gains, **ranks)

    def _troubles(self, gains: dict[str, dict[int, float]]) -> list[Trouble]:
        found: dict[str, Trouble] = {}  # volatile and aggregate counts of one error are one
        checks: tuple[tuple[dict[str, str], Severity, str, float], ...] = (
            (_UNCORRECTED, "critical", "", 1.0), (_FLOOD, "warning", "corrected", self.corrected_errors),
            (_CORRECTED, "info", "corrected", 1.0),
        )  # fmt: skip
        for names, severity, cause, least in checks:
            for name, kind in names.items():
                ranks = sorted(rank for rank, gain in gains.get(name, {}).items() if gain >= least)
                if ranks and kind not in found:
                    figures = {"kind": kind, "number": round(max(gains[name].values()))}
                    found[kind] = Trouble(severity, cause, ranks, figures)
        return list(found.values())


def _states(pending: set[int], earlier: set[int], failed: set[int]) -> list[Trouble]:
    found = []
    if failed:
        found.append(Trouble("critical", "replace", sorted(failed), {"kind": "failed", "number": None}))
    if pending - earlier:
        found.append(Trouble("critical", "", sorted(pending - earlier), {"kind": "new", "number": None}))
    elif pending:
        found.append(Trouble("warning", "pending", sorted(pending), {"kind": "pending", "number": None}))
    return found
