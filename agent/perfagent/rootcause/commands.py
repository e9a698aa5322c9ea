"""Obeys the server's commands: stacks, a profile, other sampling, a flush, the end. On the sender's thread.

Each command has an id and is obeyed once, however often it arrives. Its outcome is an event of kind `command`:
accepted, done or refused, with a sentence that says why (or why a profile was cut short). A command can only ask for
what is written here: it carries numbers and words, never code.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from perfagent.rootcause.profile import MOST_STEPS, Profile
from perfagent.rootcause.shares import busiest
from perfagent.wire.evidence import ProfileEvidence
from perfagent.wire.limits import whole

if TYPE_CHECKING:
    from perfagent.rootcause.investigator import Investigator

__all__ = ["KINDS", "Commands"]

KINDS = ("flush", "profile", "sampling", "stacks", "stop")
_REMEMBERED = 256
NOT_STOPPABLE = (
    "not stoppable: say attach(stoppable=True), read run.should_stop in the loop, or train with perfagent.loop"
)
_SETTLES = 2.5
"""Rank 0 names a step that begins so many send intervals from now: the others ask for commands once in each."""


@dataclass(frozen=True, slots=True)
class Explained:
    """The alert for which a profile is taken, as the server names it: by its rule and the step in which it began."""

    rule: str
    since_step: int | None

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> Explained | None:
        """None where nobody but a person asked."""
        rule = parameters.get("rule")
        return cls(rule[:64], whole(parameters.get("since_step"))) if isinstance(rule, str) and rule else None


class Commands:
    """Obeys the commands that one process is given."""

    def __init__(self, investigator: Investigator) -> None:
        self._investigator = investigator
        self._seen: deque[str] = deque(maxlen=_REMEMBERED)
        self._profile: Profile | None = None
        self._explained: Explained | None = None  # by that profile
        self._stopping: list[str] = []  # the commands whose step is still to come

    def obey(self, command: Mapping[str, Any]) -> None:
        """Carries out one command, or says why not."""
        identity, kind = str(command.get("id") or ""), str(command.get("kind") or "")
        if identity:
            if identity in self._seen:
                return
            self._seen.append(identity)
        parameters = command.get("params")
        if not isinstance(parameters, Mapping):
            parameters = {}
        if kind == "stacks":
            self._stacks(identity, parameters)
        elif kind == "profile":
            self._start_profile(identity, parameters)
        elif kind == "sampling":
            self._sampling(identity, parameters)
        elif kind == "stop":
            self._stop(identity, parameters)
        elif kind == "flush":
            self._answer(identity, kind, "done")  # delivery itself has seen it (send_loop.py)
        else:
            self._answer(identity, kind, "refused", f"this agent knows {', '.join(KINDS)}, not {kind[:40]!r}")

    def poll(self) -> None:
        """Every tick: a profile that is under way."""
        if self._profile is not None:
            self._profile.poll()
            self._tell_if_done()
        self._tell_if_stopped()

    def close(self) -> None:
        """The run ends. On the thread that ends it; what is recorded goes with the sender's last tick."""
        if self._profile is not None:
            self._profile.close()
            self._tell_if_done()
        self._tell_if_stopped()

    def _tell_if_done(self) -> None:
        profile = self._profile
        if profile is None or not profile.done:
            return
        self._profile = None
        if profile.problem:
            self._answer(profile.command, "profile", "refused", profile.problem)
        else:
            self._answer(profile.command, "profile", "done", profile.cut_short, profile=profile.id)
            if self._explained is not None:
                self._explain(self._explained, profile.summary)

    def _stacks(self, identity: str, parameters: Mapping[str, Any]) -> None:
        from perfagent.rootcause.stacks import all_stacks

        p = self._investigator.progress
        data: dict[str, Any] = {"command": identity, "step": p.completed, "threads": all_stacks(p.thread)}
        if isinstance(parameters.get("why"), str):
            data["why"] = parameters["why"]
        self._investigator.sender.event("stacks", data, step=p.in_progress())
        self._answer(identity, "stacks", "done")

    def _start_profile(self, identity: str, parameters: Mapping[str, Any]) -> None:
        steps = parameters.get("steps", 5)
        p = self._investigator.progress
        if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= MOST_STEPS:
            why = f"steps must be a whole number from 1 to {MOST_STEPS}, not {steps!r:.40}"
            self._answer(identity, "profile", "refused", why)
        elif self._profile is not None:
            self._answer(
                identity, "profile", "refused", "a profile of this process is under way; ask again when it is done"
            )
        elif p.last is None:
            self._answer(
                identity, "profile", "refused", "this process has not completed a step of a torch optimizer yet"
            )
        else:
            options = {name: parameters.get(name) is True for name in ("shapes", "memory", "python")}
            self._profile = Profile(self._investigator, identity, steps, options)
            self._explained = Explained.of(parameters)
            self._answer(identity, "profile", "accepted", profile=self._profile.id)
            self._investigator.add(self._profile)

    def _stop(self, identity: str, parameters: Mapping[str, Any]) -> None:
        """Rank 0 answers with the step that it names; the others get that with the command."""
        stop, p = self._investigator.stop, self._investigator.progress
        named = whole(parameters.get("step"))
        if not stop.allowed:
            self._answer(identity, "stop", "refused", NOT_STOPPABLE)
        elif p.last is None:
            self._answer(identity, "stop", "refused", "this process has not completed a step of a torch optimizer yet")
        else:
            if stop.at is None:
                saves = parameters.get("saves", not self._investigator.is_bad)
                stop.saves, stop.why = saves is not False, str(parameters.get("why") or "")
                stop.at = self._last_step() if named is None else named
                self._investigator.add(stop)
            self._stopping.append(identity)
            self._answer(identity, "stop", "accepted", step=stop.at, saves=stop.saves)

    def _tell_if_stopped(self) -> None:
        while self._stopping and self._investigator.stop.due:
            self._answer(self._stopping.pop(0), "stop", "done")

    def _last_step(self) -> int:
        """The step to stop after: the one in progress where there is one rank, else one that leaves the others time to
        learn it."""
        sender = self._investigator.sender
        if sender.identity.world_size == 1:
            return self._investigator.progress.completed + 1
        times = [row["step_time_s"] for row in self._investigator.history() if row.get("step_time_s")]
        ahead = _SETTLES * sender.config.flush_s / max(median(times), 1e-4) if times else 1.0
        return self._investigator.progress.completed + 2 + math.ceil(ahead)

    def _explain(self, asked: Explained, summary: Mapping[str, Any]) -> None:
        """What the profile shows becomes part of the alert whose rule asked for it."""
        if not summary.get("shares", {}).get("steps_s"):
            return
        identity = self._investigator.sender.identity
        evidence: ProfileEvidence = {
            "profile": summary["profile"], "steps": [summary["first_step"], summary["last_step"]],
            "shares": summary["shares"], "gaps": {"of": summary["gaps"]["of"], "idle_pct": summary["gaps"]["idle_pct"]},
            "operators": busiest(summary["operators"]),
        }  # fmt: skip
        if "trace_left_out" not in summary and identity.run is not None:
            evidence["url"] = f"/api/v1/runs/{quote(identity.run, safe='')}/profiles/{summary['profile']}"
        data: dict[str, Any] = {
            "rule": asked.rule, "explains": [asked.rule], "severity": "info", "evidence": evidence,
        }  # fmt: skip
        if asked.since_step is not None:
            data["since_step"] = asked.since_step
        self._investigator.sender.event("finding", data, step=summary["last_step"])

    def _sampling(self, identity: str, parameters: Mapping[str, Any]) -> None:
        budget, period = parameters.get("overhead_budget_pct"), parameters.get("sample_s")
        changed: dict[str, Any] = {}
        if _number(budget) and 0.01 <= budget <= 50:  # type: ignore[operator]
            self._investigator.progress.links.governor.set_budget(float(budget))  # type: ignore[arg-type]
            changed["overhead_budget_pct"] = budget
        if _number(period) and 0.5 <= period <= 3600 and self._investigator.set_sample_period is not None:  # type: ignore[operator]
            self._investigator.set_sample_period(float(period))  # type: ignore[arg-type]
            changed["sample_s"] = period
        if changed:
            self._answer(identity, "sampling", "done", **changed)
        else:
            self._answer(
                identity,
                "sampling",
                "refused",
                "sampling takes overhead_budget_pct (0.01 to 50) and sample_s (0.5 to 3600)",
            )

    def _answer(self, identity: str, kind: str, state: str, message: str = "", **more: Any) -> None:
        data = {"command": identity, "kind": kind, "state": state, **({"message": message} if message else {}), **more}
        self._investigator.sender.event("command", data, step=self._investigator.progress.in_progress())


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
