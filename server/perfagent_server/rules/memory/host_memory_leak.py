"""host_memory_leak: the memory of the training processes grows without end."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

from perfagent.wire import Finding
from perfagent_server.rules.evidence import spell_bytes, spell_s
from perfagent_server.rules.rule import UNKNOWN, Every, Life, Place, Question, Rule, Series, Unknown, Words
from perfagent_server.rules.window import Window

__all__ = ["HostMemoryLeak"]

_MOST_POINTS = 96
_SERIES = ("process/rss_bytes", "process/workers_rss_bytes")


@dataclass(frozen=True, kw_only=True)
class HostMemoryLeak(Rule):
    """Resident memory of all ranks and their loader workers together rises through the whole attempt.

    The rule keeps one point every few seconds, and half as many when there are too many, so that the points always
    cover the attempt since its first skip_s seconds (models, caches and workers come up then). The medians of the three
    thirds of the points must rise (three bands, as in TraceML's trend rule), each by at least third_share of the growth,
    the last also by steady_share of the step before it: what fills up (a cache) rises less and less. The memory must
    not have fallen back by more than pull_back_share of the growth, as it does at the end of an epoch that kept its
    outputs.
    """

    grown_pct: float = 6.0
    grown_bytes: float = 64 * 2.0**20
    third_share: float = 0.3
    steady_share: float = 0.7
    pull_back_share: float = 0.1
    skip_s: float = 10.0
    least_points: int = 40

    id: ClassVar[str] = "host_memory_leak"
    severities = ("warning",)
    place = Place(Question.WILL_IT_GO_ON, 4)
    reads = (
        Every(3.0),
        *(Series(name, keep=2, axis="time", ranks="apart") for name in _SERIES),
        Series("step_time_s", merge="median"),
    )
    charts = _SERIES
    life = Life(for_s=60.0, clear_s=60.0, restated=True)
    english = Words(
        name="Host memory leak",
        meaning="The memory of the training processes and their loader workers grows without end.",
        fires=(
            "When the resident memory of all ranks and their workers has risen through the whole attempt: by at "
            "least {grown_pct:g} % and 64 MiB, steadily and without falling back, for three minutes at least. The "
            "first {skip_s:g} s do not count. The finding says how fast it grows."
        ),
        remedies={
            "": (
                "Drop what is kept of every step: lists of losses or outputs hold the whole graph unless they are "
                "detached (loss.item() or loss.detach()), and so do hooks and caches without a bound. tracemalloc "
                "shows which line allocates what stays."
            ),
            "loader workers": (
                "The loader's workers grow: lists of Python objects in the dataset are copied page by page as their "
                "reference counts change. Keep them in numpy or Arrow arrays, which workers share, and look for "
                "caches in __getitem__; persistent_workers=False starts them anew in each epoch."
            ),
        },
    )
    chinese = Words(
        name="主机内存泄漏",
        meaning="训练进程及其加载 worker 的内存不断增长。",
        fires=(
            "所有 rank 及其 worker 的常驻内存在整个运行期间持续上升：至少 {grown_pct:g} % 且 64 MiB，"
            "并且每三分之一时段都在增长而没有回落、至少持续三分钟时触发。前 {skip_s:g} 秒不计。结论给出增长速度。"
        ),
        remedies={
            "": (
                "不要保留每一步的内容：未 detach 的损失或输出列表会保留整个计算图（用 loss.item() 或 "
                "loss.detach()），无界的钩子和缓存也是如此。tracemalloc 可显示是哪一行。"
            ),
            "loader workers": (
                "加载 worker 的内存在增长：数据集中的 Python 对象列表会因引用计数变化而逐页复制。改用 worker "
                "可共享的 numpy 或 Arrow 数组，并检查 __getitem__ 中的缓存。"
            ),
        },
    )

    def judge(self, window: Window) -> Finding | Unknown | None:
        if window.series("step_time_s") is None or window.now - window.started < self.skip_s:
            return None
        # times and bytes of the points; seconds between two of them; bytes of the workers at the first one
        state = window.state_of(self, {"times": [], "bytes": [], "every_s": 0.0, "workers": 0.0})
        total, workers = (_total(window, _SERIES), _total(window, _SERIES[1:]))
        if total <= 0:
            return None
        _add_point(state, window.now, total, workers)
        points = state["bytes"]
        if len(points) < self.least_points:
            return UNKNOWN
        third = len(points) // 3
        low, middle, high = median(points[:third]), median(points[third : 2 * third]), median(points[-third:])
        grown = high - low
        if grown < max(self.grown_bytes, self.grown_pct / 100 * low):
            return None
        if min(middle - low, high - middle) < self.third_share * grown or high - middle < self.steady_share * (
            middle - low
        ):
            return None
        if max(points) - points[-1] > self.pull_back_share * grown:
            return None
        return self._finding(window, state, low, points[-1], workers)

    def _finding(self, window: Window, state: dict[str, Any], low: float, now: float, workers: float) -> Finding:
        lasted_s = state["times"][-1] - state["times"][0]
        per_hour = (now - state["bytes"][0]) / lasted_s * 3600
        of_workers = workers - state["workers"] > 0.5 * (now - state["bytes"][0])
        whose = "the loader's workers" if of_workers else "the training processes"
        return self.found(
            "warning",
            f"The memory of {whose} grows by {spell_bytes(per_hour)} an hour",
            f"The memory of {whose} grew from {spell_bytes(state['bytes'][0])} to {spell_bytes(now)} in "
            f"{spell_s(lasted_s)}, "
            f"without falling back: {spell_bytes(per_hour)} an hour.",
            cause="loader workers" if of_workers else "",
            cost=f"{spell_bytes(per_hour)} of memory an hour, until the host has none left",
            since_step=window.step,
            evidence={
                "rss_bytes": now, "first_rss_bytes": state["bytes"][0], "grown_bytes": now - low, "bytes_per_hour": per_hour,
                "over_s": lasted_s, "points": len(state["bytes"]), "workers_rss_bytes": workers,
            },
        )  # fmt: skip


def _total(window: Window, names: tuple[str, ...]) -> float:
    """Bytes of the newest readings of all ranks, of these series together."""
    total = 0.0
    for name in names:
        readings = window.by_time.get(name)
        if readings is not None:
            total += sum(readings.newest(rank) or 0.0 for rank in readings.ranks)
    return total


def _add_point(state: dict[str, Any], now: float, total: float, workers: float) -> None:
    times, points = state["times"], state["bytes"]
    if times and now - times[-1] < state["every_s"]:
        return
    if not times:
        state["workers"] = workers
    times.append(now)
    points.append(total)
    if len(points) > _MOST_POINTS:
        state["every_s"] = 2 * (times[-1] - times[0]) / len(times)
        del times[1::2], points[1::2]
