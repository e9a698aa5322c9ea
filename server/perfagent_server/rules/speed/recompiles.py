"""recompiles: torch.compile compiles again and again, or gave a function up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from perfagent.wire import Finding
from perfagent_server.rules.rule import Events, Every, Life, Question, Rule, Series, within
from perfagent_server.rules.speed.compile_reasons import compiled_functions
from perfagent_server.rules.speed.pauses import note_rows
from perfagent_server.rules.wall_time import RECENT_S
from perfagent_server.rules.window import Window

__all__ = ["Recompiles"]

_MOST_ROWS = 256
_MOST_NAMED = 3
_MOST_LIMITS = 16
_SECONDS = "phase/compile_s"


@dataclass(frozen=True, kw_only=True)
class Recompiles(Rule):
    """A function reached the limit of torch.compile, or compiling takes much of the time.

    A first compilation, the last batch of an epoch and the shapes of a first evaluation are no habit: hence
    after_steps, and the longest step counts only as much as the second longest.
    """

    share_pct: float = 5.0
    after_steps: int = 10
    least_times: int = within(4, least=2, most=4000)
    least_s: float = 5.0
    clear_at: float = 0.8  # of the threshold

    id = "recompiles"
    severities = ("warning",)
    question = Question.IS_IT_FAST
    after = ("sync_bound",)
    reads = (Series(_SECONDS, merge="median", judged=True), Events("compile", keep=512), Every(15.0))
    charts = (_SECONDS, "compile/recompiles", "step_time_s")
    life = Life(clear_s=30.0, restated=True)

    def judge(self, window: Window) -> Finding | None:
        state = window.state_of(self, {"rows": [], "since": None, "limits": []})
        self._note(window, state)
        share, seconds, over_s = self._share(window, state)
        limit = self.share_pct / 100 * (self.clear_at if window.is_firing(self.id) else 1.0)
        is_much = share >= limit
        if not state["limits"] and not is_much:
            return None
        functions = compiled_functions(self._told(window, state))
        given_up = [one for one in functions if one.limit]
        named = given_up or functions
        return self.found(
            "warning",
            cause="" if not named or named[0].kind == "sizes" else named[0].kind,
            since_step=state["limits"][0]["step"] if state["limits"] else window.at,
            evidence={
                "share_pct": 100 * share, "compiling_pct": 100 * share if is_much and not given_up else None,
                "seconds": seconds, "compiling_s": seconds if is_much else None, "over_s": over_s,
                "gave_up_on": given_up[0].function if given_up else None, "times": named[0].times if named else None,
                "more_given_up": len(given_up) - 1 if len(given_up) > 1 else None,
                "functions": [one.figures for one in named[:_MOST_NAMED]],
            },
            gain_pct=100 * share if is_much else None,
        )  # fmt: skip

    def _note(self, window: Window, state: dict[str, Any]) -> None:
        """Keeps the steps that compiled, with their times, and the functions that were given up: the events of many ranks
        may push that one out of the window."""
        if state["since"] is None and window.step >= window.start_step + self.after_steps:
            state["since"] = window.wall.ended if math.isfinite(window.wall.ended) else None
        note_rows(state["rows"], window.series(_SECONDS))
        del state["rows"][:-_MOST_ROWS]
        known = {one["data"].get("function") for one in state["limits"]}
        for event in window.events("compile"):
            is_new = event.data.get("limit_reached") is True and event.data.get("function") not in known
            if is_new and len(state["limits"]) < _MOST_LIMITS:
                known.add(event.data.get("function"))
                step = window.at if event.step is None else event.step
                state["limits"].append({"step": step, "rank": event.rank, "data": event.data})

    def _share(self, window: Window, state: dict[str, Any]) -> tuple[float, float, float]:
        """What part of the newest ten minutes went into compiling, its seconds, and how long those minutes were."""
        if state["since"] is None:
            return 0.0, 0.0, 0.0
        since, ended = max(state["since"], window.wall.ended - RECENT_S), window.wall.ended
        took = sorted(
            seconds
            for step, time, seconds in state["rows"]
            if time > since and step > window.start_step + self.after_steps
        )
        over_s = ended - since
        if len(took) < self.least_times or over_s < self.least_s:
            return 0.0, 0.0, 0.0
        counted = sum(took[:-1]) + took[-2]
        return min(1.0, counted / over_s), sum(took), over_s

    def _told(self, window: Window, state: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of one rank, since all ranks compile the same; that of a function that was given up among them."""
        events = window.events("compile")
        ranks = [one["rank"] for one in state["limits"]] or sorted(event.rank for event in events)
        told = [event.data for event in events if event.rank == ranks[0]] if ranks else []
        return told + [one["data"] for one in state["limits"] if one["data"] not in told]
