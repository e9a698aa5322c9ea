"""disk_full: a file system that the run writes to is about to be full."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from perfagent.wire import Finding
from perfagent_server.rules.memory.growth import Track
from perfagent_server.rules.memory.saves import SAVED_BYTES
from perfagent_server.rules.rule import Every, Life, Question, Rule, Series, Unknown
from perfagent_server.rules.window import Window

__all__ = ["DiskFull"]

_DISKS = {role: (f"disk/{role}_free_bytes", f"disk/{role}_used_pct") for role in ("checkpoint", "work", "spool")}
_Severity = Literal["info", "warning", "critical"]


class _Disk(NamedTuple):
    """Of the rank that has least room."""

    role: str
    rank: int
    free: float
    used_pct: float


@dataclass(frozen=True, kw_only=True)
class DiskFull(Rule):
    """A disk is short of room against what the run writes.

    How full it is says little (4 % of a large one is room for years), so shares count only together with what is free.
    perfagent's Checkpoint says how large a save is; of others it is not known. The trend is that of the lowest use
    (growth.py), so that saves which replace each other are none.
    """

    warning_saves: float = 2.0
    critical_saves: float = 1.0
    warning_s: float = 3600.0
    critical_s: float = 900.0
    warning_pct: float = 95.0
    warning_free_gb: float = 10.0
    critical_pct: float = 99.0
    critical_free_gb: float = 1.0
    info_pct: float = 90.0
    info_free_gb: float = 20.0
    trend_mib: float = 500.0
    trend_over_s: float = 600.0
    clear_at: float = 1.2

    id = "disk_full"
    severities = ("info", "warning", "critical")
    question = Question.WILL_IT_GO_ON
    after = ("oom_imminent",)
    reads = (
        Every(10.0),
        *(Series(name, keep=2, axis="time", ranks="apart") for names in _DISKS.values() for name in names),
        SAVED_BYTES,
    )
    charts = ("disk/checkpoint_used_pct", "disk/work_used_pct", "disk/spool_used_pct")
    life = Life(for_s=20.0, clear_s=30.0, restated=True)

    def judge(self, window: Window) -> Finding | Unknown | None:
        disks = _disks(window)
        if not disks:
            return None
        state = window.state_of(self, {})
        found = [one for disk in disks if (one := self._of_disk(window, state, disk)) is not None]
        return max(found, key=lambda one: self.severities.index(one.severity), default=None)

    def _of_disk(self, window: Window, state: dict[str, Any], disk: _Disk) -> Finding | None:
        track = Track(state.setdefault(disk.role, {}))
        track.add(window.now, window.step, -disk.free)
        may_hold_saves = disk.role == "checkpoint" or (disk.role == "work" and "checkpoint" not in state)
        save = max(0.0, window.value(SAVED_BYTES.name) or 0.0) if may_hold_saves else 0.0
        rise = track.rise(self.trend_mib * 2**20, settle_s=self.trend_over_s, blocks=3, lasting_share=0.5)
        left_s = disk.free / rise.per_s if rise is not None else math.inf
        danger = self._danger(window, disk, save, left_s)
        if danger is None:
            return None
        severity, cause = danger
        is_ours_alone = disk.role == "spool"  # the training writes nothing there
        return self.found(
            "warning" if is_ours_alone and severity == "critical" else severity,
            cause=cause,
            since_step=window.step,
            evidence={
                "role": disk.role, "rank": disk.rank, "free_bytes": disk.free, "used_pct": disk.used_pct,
                "on_rank": disk.rank if window.world_size > 1 else None, "at_risk": "figures" if is_ours_alone else "run",
                "save_bytes": save or None, "more_saves": disk.free / save if save else None,
                "left_s": left_s if left_s < math.inf else None,
                "filled_bytes": rise.grown if rise is not None else None,
                "filled_over_s": rise.lasted_s if rise is not None else None,
            },
        )  # fmt: skip

    def _danger(self, window: Window, disk: _Disk, save: float, left_s: float) -> tuple[_Severity, str] | None:
        """The worst that is so, and its cause. While an alert is open, a little more room is not enough."""
        more = self.clear_at if window.is_firing(self.id) else 1.0
        fits = disk.free / save / more if save else math.inf
        left_s /= more
        free, used = disk.free / more, disk.used_pct
        checks: tuple[tuple[bool, _Severity, str], ...] = (
            (fits < self.critical_saves, "critical", "saves"),
            (left_s < self.critical_s, "critical", "fills up"),
            (_is_short(used, free, self.critical_pct, self.critical_free_gb), "critical", ""),
            (fits < self.warning_saves, "warning", "saves"),
            (left_s < self.warning_s, "warning", "fills up"),
            (_is_short(used, free, self.warning_pct, self.warning_free_gb), "warning", ""),
            (_is_short(used, free, self.info_pct, self.info_free_gb), "info", ""),
        )
        return next(((severity, cause) for is_so, severity, cause in checks if is_so), None)


def _is_short(used_pct: float, free: float, least_pct: float, most_free_gb: float) -> bool:
    return used_pct >= least_pct and free < 1e9 * most_free_gb


def _disks(window: Window) -> list[_Disk]:
    found: list[_Disk] = []
    for role, names in _DISKS.items():
        room, used = (window.readings(name).newest_by_rank() for name in names)
        if room and used:
            rank = min(room, key=room.__getitem__)
            found.append(_Disk(role, rank, room[rank], used.get(rank, 0.0)))
    return found
