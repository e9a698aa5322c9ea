"""Obeys the server's commands: stacks, a profile, other sampling, a flush, the end. On the sender's thread.

Each command has an id and is obeyed once, however often it arrives. Its outcome is an event of kind `command`: accepted,
done or refused, with the reason. A command carries numbers and words, never code.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING
from urllib.parse import quote

from perfagent.causes.profile import MOST_STEPS, Profile, Summary
from perfagent.causes.stacks import all_stacks
from perfagent.causes.trace import busiest
from perfagent.wire.evidence import ProfileEvidence, Reason
from perfagent.wire.limits import whole

if TYPE_CHECKING:
    from perfagent.causes.watch import Watch

__all__ = ["KINDS", "Commands"]

KINDS = ("flush", "profile", "sampling", "stacks", "stop")
_REMEMBERED = 256
_SETTLES = 2.5
"""Rank 0 names a step that begins so many send intervals from now: the others ask for commands once in each."""

Parameters = Mapping[str, object]


class Refused(Exception):  # noqa: N818 - no error
    """Why a command is not obeyed."""

    def __init__(self, key: str, **figures: str | int | list[str]) -> None:
        self.why: Reason = {"key": key, **figures}


class Commands:
    """Obeys the commands that one process is given."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._seen: deque[str] = deque(maxlen=_REMEMBERED)
        self._profile: Profile | None = None
        # the alert for which it is taken, by its rule and the step in which it began; None where a person asked
        self._explained: tuple[str, int | None] | None = None
        self._stopping: list[str] = []  # the commands whose step is still to come

    def obey(self, command: Parameters) -> None:
        """Carries out one command, or says why not."""
        identity, kind = str(command.get("id") or ""), str(command.get("kind") or "")
        if identity and identity in self._seen:
            return
        self._seen.append(identity)
        given = command.get("params")
        parameters: Parameters = given if isinstance(given, Mapping) else {}
        try:
            state, more = "done", {}
            if kind == "stacks":
                self._send_stacks(identity, parameters)
            elif kind == "profile":
                state, more = "accepted", self._start_profile(identity, parameters)
            elif kind == "sampling":
                more = self._sampling(parameters)
            elif kind == "stop":
                state, more = "accepted", self._stop(identity, parameters)
            elif kind != "flush":  # which delivery itself has seen (send_loop.py)
                raise Refused("unknown", known=list(KINDS), kind=repr(kind[:40]))
            self._answer(identity, kind, state, **more)
        except Refused as refused:
            self._answer(identity, kind, "refused", refused.why)
        if kind == "profile" and self._profile is not None and self._profile.command == identity:
            self._watch.add(self._profile)

    def poll(self) -> None:
        """Every tick: a profile that is under way, and a stop."""
        profile = self._profile
        if profile is not None:
            profile.poll()
            if profile.done:
                self._report(profile)
        while self._stopping and self._watch.stop.due:
            self._answer(self._stopping.pop(0), "stop", "done")

    def close(self) -> None:
        """The run ends. On the thread that ends it; what is recorded goes with the sender's last tick."""
        if self._profile is not None:
            self._profile.close()
        self.poll()

    def _report(self, profile: Profile) -> None:
        self._profile = None
        if profile.problem:
            self._answer(profile.command, "profile", "refused", profile.problem)
            return
        self._answer(profile.command, "profile", "done", profile.cut_short, profile=profile.id)
        if self._explained is not None and profile.summary.get("shares", {}).get("steps_s"):
            self._explain(*self._explained, profile.summary)

    def _send_stacks(self, identity: str, parameters: Parameters) -> None:
        p = self._watch.progress
        data: dict[str, object] = {"command": identity, "step": p.completed, "threads": all_stacks(p.thread)}
        if isinstance(parameters.get("why"), str):
            data["why"] = parameters["why"]
        self._watch.sender.event("stacks", data, step=p.in_progress())

    def _start_profile(self, identity: str, parameters: Parameters) -> dict[str, object]:
        steps, rule = parameters.get("steps", 5), parameters.get("rule")
        if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= MOST_STEPS:
            raise Refused("steps", most=MOST_STEPS, steps=f"{steps!r:.40}")
        if self._profile is not None:
            raise Refused("under_way")
        if self._watch.progress.last is None:
            raise Refused("no_step")
        options = {name: parameters.get(name) is True for name in ("shapes", "memory", "python")}
        self._profile = Profile(self._watch, identity, steps, options)
        since = whole(parameters.get("since_step"))
        self._explained = (rule[:64], since) if isinstance(rule, str) and rule else None
        return {"profile": self._profile.id}

    def _stop(self, identity: str, parameters: Parameters) -> dict[str, object]:
        """Rank 0 answers with the step that it names; the others get that with the command."""
        stop = self._watch.stop
        if not stop.allowed:
            raise Refused("not_stoppable")
        if self._watch.progress.last is None:
            raise Refused("no_step")
        if stop.at is None:
            stop.saves = parameters.get("saves", not self._watch.is_bad) is not False
            stop.why, named = str(parameters.get("why") or ""), whole(parameters.get("step"))
            stop.at = self._last_step() if named is None else named
            self._watch.add(stop)
        self._stopping.append(identity)
        return {"step": stop.at, "saves": stop.saves}

    def _last_step(self) -> int:
        """The step to stop after: the one in progress where there is one rank, else one that leaves the others time to
        learn it."""
        sender, completed = self._watch.sender, self._watch.progress.completed
        if sender.identity.world_size == 1:
            return completed + 1
        times = [row["step_time_s"] for row in self._watch.history() if row.get("step_time_s")]
        ahead = _SETTLES * sender.config.flush_s / max(median(times), 1e-4) if times else 1.0
        return completed + 2 + math.ceil(ahead)

    def _explain(self, rule: str, since_step: int | None, summary: Summary) -> None:
        """What the profile shows becomes part of the alert whose rule asked for it."""
        run = self._watch.sender.identity.run
        evidence: ProfileEvidence = {
            "profile": summary["profile"], "steps": [summary["first_step"], summary["last_step"]],
            "shares": summary["shares"], "gaps": {"of": summary["gaps"]["of"], "idle_pct": summary["gaps"]["idle_pct"]},
            "operators": busiest(summary["operators"]),
        }  # fmt: skip
        if "no_trace" not in summary and run is not None:
            evidence["url"] = f"/api/v1/runs/{quote(run, safe='')}/profiles/{summary['profile']}"
        data: dict[str, object] = {"rule": rule, "explains": [rule], "severity": "info", "evidence": evidence}
        if since_step is not None:
            data["since_step"] = since_step
        self._watch.sender.event("finding", data, step=summary["last_step"])

    def _sampling(self, parameters: Parameters) -> dict[str, object]:
        changed: dict[str, object] = {}
        budget, period = _number(parameters.get("overhead_budget_pct")), _number(parameters.get("sample_s"))
        if 0.01 <= budget <= 50:
            self._watch.progress.links.governor.set_budget(budget)
            changed["overhead_budget_pct"] = budget
        if 0.5 <= period <= 3600 and self._watch.set_sample_period is not None:
            self._watch.set_sample_period(period)
            changed["sample_s"] = period
        if not changed:
            raise Refused("sampling")
        return changed

    def _answer(self, identity: str, kind: str, state: str, why: Reason | None = None, /, **more: object) -> None:
        data = {"command": identity, "kind": kind, "state": state, **({"why": why} if why else {}), **more}
        self._watch.sender.event("command", data, step=self._watch.progress.in_progress())


def _number(value: object) -> float:
    """NaN for what is none."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
