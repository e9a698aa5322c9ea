"""The judge of one run: frames in, changes of alerts out. Pure, so that the engine, a backtest and the tests share it.

It holds the run's window and one alert machine a rule, and can be put into bytes and back at any point between two
frames:
judging the rest from the restored one gives the same changes, with the same alert ids.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from perfagent.wire import LOSS, SEVERITIES, Event, Finding, loss_kind
from perfagent_server.alerts.grouping import group
from perfagent_server.alerts.life import Change, Life, Machine
from perfagent_server.diagnosis import causes
from perfagent_server.ingest.limits import whole
from perfagent_server.rules.catalogue import RULES, Rule
from perfagent_server.rules.window import PATIENCE_S, TERMINAL, UTILIZATION, End, Window
from perfagent_server.store.interface import Stored
from perfagent_server.timestamps import rfc3339

__all__ = ["STATE_VERSION", "USER_ALERT", "Evaluator"]

STATE_VERSION = 1
USER_ALERT = "user_alert"
_REPORTED_LIFE = Life(outlives_run=True)
_USER_LIFE = Life(cooldown_s=60.0)
# alerts that no rule of ours raises: a script that gives each of them another title must not fill the memory
_MAX_OTHERS = 256
_SAID_S = 3600.0  # after that a user's alert may make room for another: it is a point in time, and nothing that goes on
_MAX_ENDS = 64
_NOTED = ("loss", "lr")  # the window itself takes a note of each of their steps
_LEVELS = {"warn": "warning", "error": "critical"}

_encoder = msgspec.msgpack.Encoder()


class Evaluator:
    """upto: the tail id of the newest frame that was judged; dropped: alerts for which there was no room.

    on_failure: called with the rule and its error; judging goes on without it. None, as in tests and backtests: it is
    raised.
    """

    def __init__(
        self, run: str, *, rules: Sequence[Rule] = RULES, on_failure: Callable[[str, Exception], None] | None = None
    ) -> None:
        self.window = Window(run)
        self.machines: dict[str, Machine] = {}
        self.upto = 0
        self.dropped = 0
        self.on_failure = on_failure
        self._rules = {rule.id: rule for rule in rules}
        self._on: dict[str, list[Rule]] = {}
        for rule in rules:
            for name in rule.on:
                self._on.setdefault(name, []).append(rule)
        self._urgent = {rule.urgent: rule for rule in rules if rule.urgent}

    # --- judging ------------------------------------------------------------------------------------------------------

    def take(self, stored: Stored, *, drained: bool = False) -> list[Change]:
        """Judges one frame. drained: it lay in a spool, and its sender is still lost."""
        window = self.window
        self.upto = max(self.upto, stored.id)
        window.now = max(window.now, stored.received)
        if stored.attempt < window.attempt:
            return []  # a late frame of an older start: what it says is no longer so
        changes: list[Change] = []
        if stored.attempt > window.attempt:
            changes += self._restart(stored.attempt)
        self._hear(stored.rank)
        ends: list[Event] = []
        for event in stored.events:
            if event.kind == "state" and event.data.get("state") in TERMINAL:
                ends.append(event)
            elif event.kind == "state":
                self._begin(event)
            elif event.kind == "finding" and "explains" in event.data:
                changes += self._explained(stored, event)
            elif event.kind == "finding":
                changes += self._reported(stored, event)
            elif event.kind == "alert":
                changes += self._by_user(stored, event)
        if stored.rank in window.lost and not drained:
            del window.lost[stored.rank]
            changes += self._judge_all("contact")
        ready = window.take(stored.rank, stored.groups)
        changes += self._judge_urgent()
        changes += self._judge_ready(ready)
        for event in ends:
            changes += self._end(stored, event)
        return changes

    def tick(self, now: float) -> list[Change]:
        """Time passed and nothing came: steps that waited for a slow rank are judged without it."""
        window = self.window
        window.now = max(window.now, now)
        changes = self._judge_urgent()
        return changes + self._judge_ready(window.close(list(window.tracks)))

    def needs_tick(self) -> bool:
        return self.window.waiting() or any(self.window.fresh.values())

    def silence(self, lost: dict[tuple[int, int], float], now: float) -> list[Change]:
        """(attempt, rank) that were not heard, and for how many seconds; the others are heard."""
        window = self.window
        window.now = max(window.now, now)
        window.lost = (
            {}
            if window.ended
            else {rank: quiet for (attempt, rank), quiet in lost.items() if attempt == window.attempt}
        )
        return self._judge_all("contact")

    def resolve(self, alert: str, now: float, why: str) -> list[Change]:
        """Closes one alert by hand; it opens again only after its cool-down, or at the next finding of another kind."""
        changes = []
        for machine in self.machines.values():
            if machine.alert == alert:
                change = machine.close(self.window.step, now, why)
                if change is not None:
                    changes.append(change)
        self._note_firing()
        return changes

    def _restart(self, attempt: int) -> list[Change]:
        window = self.window
        known = window.attempt >= 0
        changes = [
            change
            for machine in self.machines.values()
            if (change := machine.close(window.step, window.now, "the run was started again")) is not None
        ]
        now = window.now
        window.restart(attempt)
        window.now = now
        if known:
            self.machines = {}
        return changes

    def _hear(self, rank: int) -> None:
        window = self.window
        if rank not in window.heard:
            window.heard.add(rank)
            if window.state == "finished":
                window.state = "running"  # as lifecycle has it: those who had reported so far were not all

    def _begin(self, event: Event) -> None:
        window = self.window
        world_size, start_step = event.data.get("world_size"), whole(event.data.get("start_step"))
        if isinstance(world_size, int) and 0 < world_size <= 1_000_000:
            window.world_size = max(world_size, 1)
        if start_step is not None and start_step > window.start_step:
            window.start_step = start_step

    def _end(self, stored: Stored, event: Event) -> list[Change]:
        window = self.window
        state = str(event.data.get("state"))
        earlier = [end for end in window.ends if end.rank == stored.rank]
        # The trainer's own word comes first and says most; a watcher's only counts where it says more.
        if any(end.state == state or (end.state != "finished" and state != "oom") for end in earlier):
            return []
        words = {key: str(event.data.get(key) or "")[:8000] for key in ("reason", "exception", "traceback")}
        step = whole(event.step)
        # A watcher knows no step. What other ranks send of later steps must not move this end.
        self._note_end(End(state, stored.rank, self._time_told(event), window.step if step is None else step, **words))
        window.lost.pop(stored.rank, None)
        changes = self._judge_urgent(final=True)
        changes += self._judge_ready(window.close(list(window.tracks)))
        if state == "finished":
            if not window.heard <= window.done:
                return changes
            changes += self._judge_ready(window.close(list(window.tracks), final=True))
        if not window.ended or window.state == "finished":
            window.state = state
        changes += self._judge_all("state")
        window.lost = {}
        for rule, machine in self.machines.items():
            if not self._life(rule).outlives_run:
                machine.open_at_end = machine.open_at_end or machine.state == "firing"
                change = machine.close(window.step, window.now, f"the run ended ({state})")
                if change is not None:
                    changes.append(change)
        self._note_firing()
        return changes

    def _note_end(self, end: End) -> None:
        """Of thousands of ranks that end those that finished say nothing of interest: they make room."""
        window = self.window
        window.done.add(end.rank)
        if len(window.ends) >= _MAX_ENDS:
            place = next((at for at, known in enumerate(window.ends) if known.state == "finished"), None)
            if end.state == "finished" or place is None:
                return
            del window.ends[place]
        window.ends.append(end)

    def _judge_urgent(self, *, final: bool = False) -> list[Change]:
        """Judges steps with non-finite values the moment they are known."""
        window = self.window
        changes: list[Change] = []
        for kind in ("loss", "gradient"):
            fresh = window.fresh[kind]
            if not fresh:
                continue
            window.fresh[kind] = []
            rule = self._urgent.get(kind)
            if rule is None:
                continue
            for step in sorted(set(fresh), key=lambda step: (not self._of_the_agent(kind, step), step)):
                if not final and self._scaler_may_tell_more(kind, step):
                    window.fresh[kind].append(step)
                    continue
                window.at = step
                changes += self._judge(rule)
        return changes

    def _of_the_agent(self, kind: str, step: int) -> bool:
        """Whether it is `loss` itself, or a gradient: judged before what the script logged of the same step, or one
        beside it."""
        bad = self.window.bad_at(kind, step)
        return kind == "gradient" or (bad is not None and bad.leading == LOSS)

    def _scaler_may_tell_more(self, kind: str, step: int) -> bool:
        """Whether a GradScaler is at work whose word on this step (skipped or not) may come with the next one. Its word
        on `loss` comes with it."""
        window = self.window
        bad = window.bad_at(kind, step)
        if bad is None or window.now - bad.time > 2 * PATIENCE_S or (kind == "loss" and bad.leading == LOSS):
            return False
        words = [
            track
            for name in ("amp/skipped", "amp/scale")
            if (track := window.tracks.get(name)) is not None and track.steps
        ]
        return bool(words) and all(track.steps[-1] <= step for track in words)

    def _judge_ready(self, names: Iterable[str]) -> list[Change]:
        window = self.window
        changes: list[Change] = []
        for name in names:
            rules = self._on.get(name) or self._on_named_loss(name)
            if name == UTILIZATION:
                window.at = window.step
                for rule in rules:
                    changes += self._judge(rule)
                continue
            if name not in _NOTED and not any(self._wants(rule) for rule in rules):
                window.tracks[name].show_all()
                continue
            while window.advance(name):
                for rule in rules:
                    if rule.urgent:
                        # Steps with a bad value were judged when they came; here it counts that this one has none.
                        if (
                            self._wants(rule)
                            and window.bad_at(rule.urgent, window.at) is None
                            and self._heals(rule, name)
                        ):
                            changes += self._observe(rule, None)
                    else:
                        changes += self._judge(rule)
        return changes

    def _on_named_loss(self, name: str) -> Sequence[Rule]:
        """The rules on a loss by another name than `loss`: those on the loss, where it is the run's; else that of bad
        values."""
        if name == self.window.loss_name:
            return self._on.get(LOSS, ())
        rule = self._urgent.get("loss") if loss_kind(name) else None
        return () if rule is None else (rule,)

    def _heals(self, rule: Rule, name: str) -> bool:
        """Whether a finite value of this series says that the alert's trouble is over: of losses only the one it is
        about."""
        machine = self.machines.get(rule.id)
        if rule.urgent != "loss" or machine is None or machine.finding is None:
            return True
        return bool(machine.finding.evidence.get("series", LOSS) == name)

    def _wants(self, rule: Rule) -> bool:
        """Whether a rule has something to say about single steps: one that judges urgently has, only while an alert is
        open."""
        if not rule.urgent:
            return True
        machine = self.machines.get(rule.id)
        return machine is not None and machine.state != "inactive"

    def _judge_all(self, cause: str) -> list[Change]:
        self.window.at = self.window.step
        return [change for rule in self._on.get(cause, ()) for change in self._judge(rule)]

    def _judge(self, rule: Rule) -> list[Change]:
        """Runs a rule at the step window.at. If it raises, it has not judged this step: its findings at other steps
        stay, and the other rules go on."""
        try:
            found = rule.judge(self.window)
        except Exception as error:
            if self.on_failure is None:
                raise
            self.on_failure(rule.id, error)
            return []
        return self._observe(rule, found)

    def _observe(self, rule: Rule, found: Finding | None) -> list[Change]:
        if found is not None and self.window.ended and not rule.life.outlives_run:
            return []  # nobody would resolve it any more
        return self._carry(rule.id, rule.life, found, self.window.at)

    def _carry(self, key: str, life: Life, found: Finding | None, step: int) -> list[Change]:
        window = self.window
        machine = self.machines.get(key)
        changes: list[Change] = []
        if machine is None:
            room = self._make_room() if key not in self._rules else []
            if room is None:
                self.dropped += 1
                return []
            changes += room
            # One that made room and comes again must not count from 0: its alerts would have the ids of the earlier
            # ones.
            machine = self.machines[key] = Machine(key, count=0 if key in self._rules else self.upto)
        if found is not None and found.since is None:
            found.since = rfc3339(self._time_of(step, found.evidence.get("series")))
        change = machine.observe(life, found, step, window.now, f"{window.run}\n{window.attempt}")
        if change is None:
            return changes
        change = group(change, key, self.machines)
        if change.kind in ("fire", "reopen"):
            causes.join(window.reported, change.finding)
        self._note_firing()
        return [*changes, change]

    def _make_room(self) -> list[Change] | None:
        """Room for one more alert that is none of our rules'; None when there is none. First goes what is over, oldest
        first, then what a user said long ago."""
        window = self.window
        others = [machine for key, machine in self.machines.items() if key not in self._rules]
        if len(others) < _MAX_OTHERS:
            return []
        done = [machine for machine in others if machine.state == "inactive"] or [
            machine for machine in others if machine.rule.startswith(USER_ALERT) and window.now - machine.hit > _SAID_S
        ]
        if not done:
            return None
        oldest = min(done, key=lambda machine: machine.hit)
        del self.machines[oldest.rule]
        change = oldest.close(window.step, window.now, "newer ones took its place")
        return [] if change is None else [change]

    def _note_firing(self) -> None:
        self.window.firing = {key for key, machine in self.machines.items() if machine.state == "firing"}

    def _life(self, rule: str) -> Life:
        if rule.startswith(USER_ALERT):
            return _USER_LIFE
        return self._rules[rule].life if rule in self._rules else _REPORTED_LIFE

    def _time_of(self, step: int, series: str | None) -> float:
        """When a step was, by the clock of who measured it (first that of the series in question); else the server's
        own."""
        for name in (series or LOSS, LOSS, "step_time_s"):
            track = self.window.tracks.get(name)
            if track is not None and track.steps and track.steps[-1] >= step:
                return track.times[bisect_left(track.steps, step)]
        return self.window.now

    # --- what the agent and the user say ------------------------------------------------------------------------------

    def _time_told(self, event: Event) -> float:
        """When an event was, by the clock of its sender, if that clock says anything."""
        return event.time if math.isfinite(event.time) else self.window.now

    def _step_told(self, *told: object) -> int:
        """The first of these that is a step; else the newest step of the run."""
        return next((step for one in told if (step := whole(one)) is not None), self.window.step)

    def _reported(self, stored: Stored, event: Event) -> list[Change]:
        data = event.data
        rule, severity = str(data.get("rule", ""))[:64], str(data.get("severity", "warning"))
        if not rule or severity not in SEVERITIES:
            return []
        ranks = data.get("ranks")
        named = [rank for rank in ranks if whole(rank) is not None] if isinstance(ranks, list) else []
        evidence = data.get("evidence")
        gain = data.get("gain_pct")
        found = Finding(
            rule=rule,
            severity=severity,
            message=str(data.get("message", ""))[:2000],
            since_step=self._step_told(data.get("since_step"), event.step),
            since=rfc3339(self._time_told(event)),
            ranks=named or [stored.rank],
            evidence=evidence if isinstance(evidence, dict) else {},
            fix=str(data.get("fix", ""))[:2000],
            gain_pct=float(gain) if isinstance(gain, (int, float)) and math.isfinite(gain) else None,
        )
        return self._carry(rule, self._life(rule), found, found.since_step or self.window.step)

    def _explained(self, stored: Stored, event: Event) -> list[Change]:
        """What an agent found out about an alert that is open, or that will be: it becomes part of its evidence."""
        cause = causes.cause_of(event.data, stored.rank, self._step_told(event.step))
        if cause is None:
            return []
        for rule in cause["explains"]:
            machine = self.machines.get(rule)
            if (
                machine is not None
                and machine.state == "firing"
                and machine.finding is not None
                and not machine.absorbed
            ):
                if causes.join([cause], machine.finding):
                    return [Change("update", machine.alert, machine.finding, self.window.step, self.window.now)]
                return []
        self.window.reported = [*self.window.reported, cause][-causes.MOST :]
        return []

    def _by_user(self, stored: Stored, event: Event) -> list[Change]:
        """run.alert(title, text, level): fires at once; the same title not again within a minute."""
        title, text = str(event.data.get("title", ""))[:256], str(event.data.get("text", ""))[:4000]
        level = str(event.data.get("level", "warning")).lower()
        level = _LEVELS.get(level, level)
        key = f"{USER_ALERT}:{hashlib.sha256(title.encode('utf-8', 'replace')).hexdigest()[:16]}"
        machine = self.machines.get(key)
        changes: list[Change | None] = []
        if machine is not None and machine.state == "firing":
            if self.window.now - machine.hit < _USER_LIFE.cooldown_s:
                return []
            changes.append(machine.close(self.window.step, self.window.now, "said again"))
            machine.resolved = machine.resolved_step = None  # no cool-down: what is said again fires again
        found = Finding(
            rule=USER_ALERT,
            severity=level if level in SEVERITIES else "warning",
            message=f"{title}: {text}" if text else title,
            since_step=self._step_told(event.step),
            since=rfc3339(self._time_told(event)),
            ranks=[stored.rank],
            evidence={"title": title, "text": text},
        )
        changes += self._carry(key, _USER_LIFE, found, found.since_step or 0)
        if self.window.ended and key in self.machines:  # said by a rank that outlived the run, or late: sent, and over
            changes.append(
                self.machines[key].close(self.window.step, self.window.now, f"the run ended ({self.window.state})")
            )
            self._note_firing()
        return [change for change in changes if change is not None]

    # --- for the verdict ----------------------------------------------------------------------------------------------

    def findings(self) -> list[Finding]:
        """What is open now, or was open when the run ended."""
        return [
            machine.finding
            for machine in self.machines.values()
            if machine.state == "firing" and machine.finding is not None
        ]

    # --- persistence --------------------------------------------------------------------------------------------------

    def snapshot(self) -> bytes:
        machines = {key: machine.snapshot() for key, machine in self.machines.items()}
        return _encoder.encode({"upto": self.upto, "window": self.window.snapshot(), "machines": machines})

    @classmethod
    def restore(
        cls, data: bytes, *, rules: Sequence[Rule] = RULES, on_failure: Callable[[str, Exception], None] | None = None
    ) -> Evaluator:
        state: dict[str, Any] = msgspec.msgpack.decode(data, strict=False)
        judge = cls(state["window"]["run"], rules=rules, on_failure=on_failure)
        judge.upto = state["upto"]
        judge.window = Window.restore(state["window"])
        judge.machines = {key: Machine.restore(entry) for key, entry in state["machines"].items()}
        return judge
