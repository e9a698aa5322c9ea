"""init_slow: the job was started, and no step has ended yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perfagent.wire import Finding
from perfagent_server.rules.life.answers import training_thread
from perfagent_server.rules.rule import Events, Every, Question, Rule, Series
from perfagent_server.rules.window import Window

__all__ = ["InitSlow"]

_JOINS = " in init_process_group"


@dataclass(frozen=True, kw_only=True)
class InitSlow(Rule):
    """No first step. 20 minutes are SageMaker's MaxInitializationTime, and what DLRover gives the first step. A process in
    init_process_group waits only for the other ranks, and a launcher starts all of them together.

    Only where an agent reads its process: a script that sends rows of its own may have nothing that is a step.
    """

    for_s: float = 1200.0
    joining_s: float = 300.0

    id: ClassVar[str] = "init_slow"
    severities = ("warning",)
    question = Question.DOES_IT_MOVE
    after = ("link_errors",)
    reads = (
        Every(15.0),
        Events("stacks", keep=1),
        Series("process/rss_bytes", keep=2, axis="time", ranks="apart"),
        Series("loss"),
        # The first step has phases, and no step time: it began before there was anything to time it from.
        *(Series(name, merge="median") for name in ("step_time_s", "phase/forward_s", "phase/backward_s")),
    )
    charts = ("step_time_s",)
    asks_for = "stacks"

    def judge(self, window: Window) -> Finding | None:
        waited = window.now - window.started
        # Before the first step, readings carry the step in progress: the one after start_step, or what log() has counted.
        moves = window.step > window.start_step + 1 or bool(window.by_step)
        told = window.events("stacks")
        frames = training_thread(told[-1].data.get("threads")).get("frames", ()) if told else ()
        is_joining = any(_JOINS in str(frame) for frame in frames)
        limit_s = self.joining_s if is_joining else self.for_s
        if waited < limit_s or moves or "process/rss_bytes" not in window.by_time:
            return None
        return self.found(
            "warning",
            cause="joining" if is_joining else "",
            since_step=window.step,
            ranks=sorted(window.heard - window.done - window.lost.keys()),
            evidence={
                "waited_s": waited, "heard_ranks": len(window.heard), "world_size": window.world_size,
                "lost_ranks": sorted(window.lost),
            },
        )  # fmt: skip
