"""An evaluator without a snapshot, from what the tables say of its run.

Snapshots are lost with a broken database page, and are of no use after an upgrade that changed their form. The frames
that are still in the tail are then judged once more, to the same alerts: what waits for a slow rank and what is about
to fire is as it was. What came before them is taken from the tables: processes from that of sources, the recent past
of the series from the store. The alert table has the last word on what is open.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from sqlalchemy import Connection, select

from perfagent.wire import LOSS, loss_kind
from perfagent_server.alerts import history
from perfagent_server.alerts.state_machine import RUN_ENDED, Machine
from perfagent_server.alerts.tables import finding_of
from perfagent_server.database import Database
from perfagent_server.engine.evaluator import Evaluator, HalfJudgedError
from perfagent_server.engine.reports import title_key
from perfagent_server.rules.rule import USER_ALERT
from perfagent_server.rules.window import TERMINAL, End, is_end
from perfagent_server.store.attempt_starts import UNDECIDED
from perfagent_server.store.interface import MetricStore
from perfagent_server.store.stored import FromTail
from perfagent_server.store.tables import alert, source
from perfagent_server.store.tables import attempt as attempts
from perfagent_server.store.tables import run as runs

__all__ = ["rebuild"]

_MOST_FRAMES = 64  # frames that wait to be judged, of which the first steps are looked at
_MOST_PAST, _MOST_PAST_BYTES = 256, 4 * 2**20  # frames that are judged once more


def rebuild(
    judge: Evaluator, database: Database, store: MetricStore, judged: int, on_progress: Callable[[], None]
) -> None:
    """Fills a fresh evaluator with what was judged. judged: the tail id up to which; on_progress: called before each
    frame. Of a run that is new there is nothing to fill in."""
    run = judge.window.run
    frames = [stored for stored in store.since(judged, _MOST_FRAMES, run=run) if not stored.is_imported]
    with database.read() as connection:
        columns = runs.c.attempt, runs.c.attempts, runs.c.state, runs.c.world_size
        about = connection.execute(select(*columns).where(runs.c.id == run)).one()
        sources = connection.execute(select(source).where(source.c.run == run, source.c.attempt == about.attempt)).all()
        if about.attempts == 1 and _begins(sources, frames):
            return
        alerts = _alerts(connection, run, about.attempt)
        start = _start_step(connection, run, about.attempt)
    if not sources:
        return
    newest = store.until(judged, _MOST_PAST, _MOST_PAST_BYTES, run=run)
    past = [stored for stored in newest if stored.attempt == about.attempt and not stored.is_imported]
    if about.attempts > 1 or not _begins(sources, [*past, *frames]):
        _fill(judge, store, about, sources, [*past, *frames], start)
        _open_before(judge, alerts, past[0].received if past else math.inf)
    _judge_again(judge, past, on_progress)
    window = judge.window
    window.lost.update({row.rank: 0.0 for row in sources if row.state == "lost"})
    if about.state in TERMINAL and not frames:
        window.state = about.state
    _correct(judge, alerts, frames[0].received if frames else math.inf)


def _fill(
    judge: Evaluator, store: MetricStore, about: Any, sources: Sequence[Any], coming: Sequence[FromTail], start: int
) -> None:
    """What came before the frames that are still in the tail."""
    window = judge.window
    window.attempt, window.start_step, window.world_size = about.attempt, start, about.world_size or 1
    window.now = window.started = window.stepped = coming[0].received if coming else max(row.contact for row in sources)
    _processes(judge, sources, coming)
    _series(judge, store, start, {step for stored in coming for group in stored.groups for step in group.step_list()})


def _open_before(judge: Evaluator, alerts: Sequence[Mapping[str, Any]], time: float) -> None:
    """The alerts that fired before the frames, as they were then."""
    before = [dict(row) for row in alerts if (row["fired"] or 0.0) < time]
    for row in before:
        if row["resolved"] is not None and row["resolved"] >= time:
            row["state"] = "firing"
    judge.machines = {machine.rule: machine for machine in (_machine(row, time) for row in before)}
    judge.note_firing()


def _judge_again(judge: Evaluator, past: Sequence[FromTail], on_progress: Callable[[], None]) -> None:
    """Its changes are not written: the first judgment of these frames has written them. A frame that fails is passed over, as
    it was then."""
    if past:
        judge.start_clock(past[0].received)
    for stored in past:
        on_progress()
        try:
            judge.take(stored)
            if (due := judge.due()) is not None and due <= stored.received:
                judge.tick(stored.received)
        except Exception as error:
            if judge.on_failure is None:
                raise
            cause = error.__cause__ if isinstance(error, HalfJudgedError) else None
            judge.on_failure("a frame", cause if isinstance(cause, Exception) else error)
    judge.dropped = 0


def _correct(judge: Evaluator, alerts: Sequence[Mapping[str, Any]], now: float) -> None:
    """Machines that are not as their rows say: an alert that was closed by hand, or is older than the frames."""
    rows = {row["id"]: row for row in alerts}
    for key, machine in list(judge.machines.items()):
        if machine.state == "firing" and machine.alert not in rows:
            del judge.machines[key]
    machines = {machine.alert: machine for machine in judge.machines.values() if not machine.absorbed}
    for row in alerts:
        known = machines.get(row["id"])
        if known is not None and (known.state == "firing") == (row["state"] == "firing"):
            continue
        told = _machine(row, now)
        held = judge.machines.get(told.rule)
        if held is None or held.alert not in rows or rows[held.alert]["fired"] <= row["fired"]:
            judge.machines[told.rule] = told
    judge.note_firing()


def _begins(sources: Sequence[Any], frames: Sequence[FromTail]) -> bool:
    """Whether all that these sources sent is still to be judged. So it is with nearly every run that is loaded, and a
    thousand jobs may begin at once."""
    return {row.id for row in sources} <= {stored.source for stored in frames if stored.seq == 1}


def _alerts(connection: Connection, run: str, attempt: int) -> Sequence[Mapping[str, Any]]:
    """The alerts that are open, and those that fired in this attempt, oldest first."""
    its = (attempts.c.run == run) & (attempts.c.attempt == attempt)
    began = connection.execute(select(attempts.c.started).where(its)).scalar() or 0.0
    wanted = (alert.c.run == run) & ((alert.c.state == "firing") | (alert.c.fired >= began))
    rows = connection.execute(select(alert).where(wanted).order_by(alert.c.fired)).mappings()
    return [{**row, "opening": history.openings(connection, row["id"])} for row in rows]


def _start_step(connection: Connection, run: str, attempt: int) -> int:
    its = (attempts.c.run == run) & (attempts.c.attempt == attempt)
    step = connection.execute(select(attempts.c.start_step).where(its)).scalar()
    return step if step is not None and 0 <= step < UNDECIDED else 0


def _processes(judge: Evaluator, sources: Sequence[Any], frames: Sequence[FromTail]) -> None:
    """Who was heard, who ended and how. Not of those whose end is in a frame that is about to be judged."""
    window = judge.window
    coming = {stored.source for stored in frames if any(map(is_end, stored.events))}
    for row in sources:
        window.heard.add(row.rank)
        if row.state in TERMINAL and row.id not in coming:
            window.done.add(row.rank)
            window.ends.append(End(row.state, row.rank, row.ended or row.contact, row.step, row.reason))


def _machine(row: Mapping[str, Any], now: float) -> Machine:
    """The machine of an alert, as far as its row says. now: by the server clock of the frames: a clock that was set back
    meanwhile must not keep an alert open."""
    finding = finding_of(row)
    key = row["rule"]
    if key == USER_ALERT:
        key = title_key(str(finding.evidence.get("title", "")))
    is_open = row["state"] == "firing"
    step = row["last_step"] or row["since_step"] or 0
    return Machine(
        key,
        "firing" if is_open else "inactive",
        row["id"],
        since_step=finding.since_step or step,
        since=row["since"],
        hit_step=step,
        hit=min(row["fired"] or now, now),
        resolved_step=None if is_open else step,
        resolved=None if is_open else min(row["resolved"] or now, now),
        opening=row["opening"],
        open_at_end=not is_open and str(finding.evidence.get("resolved", "")).startswith(RUN_ENDED),
        written=row["fired"] or 0.0,
        finding=finding,
    )


def _series(judge: Evaluator, store: MetricStore, start: int, waiting: Set[int]) -> None:
    """The newest steps of the series that rules read, as they were stored. waiting: steps that are still to be
    judged."""
    window, plan = judge.window, judge.plan
    for name, newest in store.latest(window.run).items():
        if not plan.is_signal(name) and loss_kind(name) != "whole":
            continue
        kept = plan.series_of(name)
        first = max(start, newest.step - kept.keep - len(waiting))
        steps, values = _stored(store, window.run, name, first, newest.step)
        judged = [place for place, step in enumerate(steps) if step not in waiting]
        if not judged:
            continue
        steps, values = [steps[place] for place in judged], [values[place] for place in judged]
        series = window.begin(name)
        series.fill(steps, values)
        window.step = window.at = max(window.step, steps[-1])
        if name == LOSS:
            window.first_loss = next((value for value in values if math.isfinite(value)), None)
        elif name == "lr":
            for place, (step, rate) in enumerate(zip(steps, values, strict=True)):
                window.learning_rate.note(step, rate, values[max(0, place - 16) : place])


def _stored(store: MetricStore, run: str, name: str, first: int, last: int) -> tuple[list[int], list[float]]:
    """Steps of a series, both ends included, and their values, ranks put together as the catalogue says."""
    found = store.series(run, name, from_step=first, to_step=last, points=last - first + 1)
    return (found.step, found.mean) if found.bucket_steps == 1 else ([], [])
