"""host_memory_leak: the memory of the training processes, or of their host, grows without end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from perfagent.wire import Finding
from perfagent_server.rules.memory.growth import Growth, Track
from perfagent_server.rules.memory.readings import OF_HOSTS, OF_PROCESSES, Held, Host, hosts, of_processes, of_workers
from perfagent_server.rules.rule import UNKNOWN, Every, Life, Question, Rule, Series, Unknown
from perfagent_server.rules.window import Window

__all__ = ["HostMemoryLeak"]

_EARLY_S = 600.0
_SOON: dict[str, Any] = {"settle_steps": 1, "blocks": 4, "lasting_share": 0.7}
"""Of a short rise there are few points."""
_CAUSES = {"processes": "", "workers": "loader workers", "host": "host"}


@dataclass(frozen=True, kw_only=True)
class HostMemoryLeak(Rule):
    """Memory of the processes, of their workers, or of the host beside both grows (growth.py), over a stretch of any length
    that ends now.

    What fills up (a cache, a pool of the allocator) has ended after settle_s and settle_steps, or grows less. Where the
    machine would be full within full_in_s, steps do not count, and of settle_s as large a part is enough as is left of
    that; not in a first epoch, in which a dataset may fill its cache. Of very large
    processes least_pct of what they hold must be added, of a host that others use too least_host_pct of its memory. Growth
    that was given back once (outputs kept for an epoch) must be exceeded by given_back_times.
    """

    leaked_mib: float = 190.0
    settle_s: float = 40.0
    settle_steps: int = 180
    full_in_s: float = 900.0
    least_pct: float = 0.5
    least_host_pct: float = 0.5
    given_back_times: float = 1.3
    skip_s: float = 5.0
    skip_steps: int = 5

    id = "host_memory_leak"
    severities = ("info", "warning")
    question = Question.WILL_IT_GO_ON
    after = ("gpu_memory_leak",)
    reads = (
        Every(3.0),
        *OF_PROCESSES,
        *OF_HOSTS,
        Series("step_time_s", merge="median"),
        Series("batch/epoch", merge="max"),
    )
    charts = ("process/rss_bytes", "process/workers_rss_bytes", "host/memory_used_bytes")
    life = Life(for_s=6.0, clear_s=60.0, restated=True)
    state_version = 2

    def judge(self, window: Window) -> Finding | Unknown | None:
        held = of_processes(window)
        if held is None or window.series("step_time_s") is None:
            return None
        state = window.state_of(self, {"began": window.now, "from_step": window.step, "second": 0.0})
        if window.now - state["began"] < self.skip_s or window.step - state["from_step"] < self.skip_steps:
            return None
        if held.second <= state["second"]:
            return UNKNOWN  # nothing new was read
        state["second"] = held.second
        nodes = hosts(window)
        tracks = self._follow(window, state, held, nodes)
        leak = self._leak(state, tracks, nodes, is_first_epoch=window.value("batch/epoch") == 1)
        early = window.now - state["began"] < _EARLY_S
        return None if leak is None else self._finding(*leak, tracks, nodes, early=early)

    def _follow(self, window: Window, state: dict[str, Any], held: Held, nodes: list[Host]) -> dict[str, Track]:
        """Adds a point to the tracks of what can be read."""
        workers = of_workers(window)
        levels = {
            "processes": (held.held, held.ranks),
            "workers": None if workers is None else (workers.held, workers.ranks),
            "host": (sum(node.used for node in nodes), len(nodes)) if nodes else None,
        }
        tracks = {}
        for name, level in levels.items():
            if level is not None:
                tracks[name] = track = Track(state.setdefault(name, {}))
                track.add(window.now, window.step, level[0], parts=level[1])
        return tracks

    def _leak(
        self, state: dict[str, Any], tracks: dict[str, Track], nodes: list[Host], *, is_first_epoch: bool
    ) -> tuple[str, Growth] | None:
        hosts_bytes = sum(node.total for node in nodes)
        for name, track in tracks.items():
            least = self._least(name, track, state, hosts_bytes)
            rise = track.rise(least, settle_s=self.settle_s, settle_steps=self.settle_steps)
            if rise is None and name != "host":
                rise = self._soon_full(track, least, tracks, nodes, is_first_epoch=is_first_epoch)
            self._note_given_back(state, name, track, rise)
            if rise is not None and not (name == "host" and _is_ours(rise, tracks)):
                return name, rise
        return None

    def _soon_full(
        self, track: Track, least: float, tracks: dict[str, Track], nodes: list[Host], *, is_first_epoch: bool
    ) -> Growth | None:
        rise = track.rise(least, settle_s=0.0, **_SOON)
        left_s = None if rise is None else _left_s(rise, tracks, nodes)
        if left_s is None or left_s >= self.full_in_s:
            return None
        settle_s = self.settle_s * (1.0 if is_first_epoch else left_s / self.full_in_s)
        return track.rise(least, settle_s=settle_s, **_SOON)

    def _least(self, name: str, track: Track, state: dict[str, Any], hosts_bytes: float) -> float:
        share = self.least_host_pct * hosts_bytes if name == "host" else self.least_pct * track.first()
        given_back: float = state.get("given_back", {}).get(name, 0.0)
        return max(self.leaked_mib * 2**20, share / 100, self.given_back_times * given_back)

    def _note_given_back(self, state: dict[str, Any], name: str, track: Track, rise: Growth | None) -> None:
        """Remembers the top of a rise, and how much it was once most of it has fallen back."""
        tops = state.setdefault("tops", {})
        if rise is not None:
            tops[name] = [rise.now, rise.grown]
        elif name in tops and tops[name][0] - track.level > 0.5 * tops[name][1]:
            given_back = state.setdefault("given_back", {})
            given_back[name] = max(given_back.get(name, 0.0), tops.pop(name)[1])

    def _finding(self, of: str, rise: Growth, tracks: dict[str, Track], nodes: list[Host], *, early: bool) -> Finding:
        left_s = _left_s(rise, tracks, nodes)
        return self.found(
            "info" if of == "host" else "warning",
            cause=_CAUSES[of],
            since_step=rise.since_step,
            evidence={
                "of": of, "bytes": rise.now, "first_bytes": rise.first, "grown_bytes": rise.grown,
                "bytes_per_hour": 3600 * rise.per_s, "bytes_per_step": rise.grown / max(1, rise.steps), "over_s": rise.lasted_s,
                "steps": rise.steps, "left_s": left_s, "host_bytes": nodes[0].total if left_s else None,
                "when": "early" if early else None, "now_bytes": {name: one.level for name, one in tracks.items()},
            },
        )  # fmt: skip


def _is_ours(rise: Growth, tracks: dict[str, Track]) -> bool:
    """Whether the processes and their workers grew by half of what their host did, and so are judged themselves."""
    grown = 0.0
    for name in ("processes", "workers"):
        before = tracks[name].at(rise.since) if name in tracks else None
        if before is not None:
            grown += tracks[name].level - before
    return grown > 0.5 * rise.grown


def _left_s(rise: Growth, tracks: dict[str, Track], nodes: list[Host]) -> float | None:
    """Until the machine is full, if it goes on so, or as its host did; None where several machines are in it."""
    if len(nodes) != 1:
        return None
    before = tracks["host"].at(rise.since) if "host" in tracks else None
    of_host = 0.0 if before is None else (tracks["host"].level - before) / rise.lasted_s
    return max(0.0, nodes[0].total - nodes[0].used) / max(rise.per_s, of_host)
