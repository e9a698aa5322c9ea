"""Runs for the rules to judge: series in, alerts out, through the same evaluator as the server's engine."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perfagent.wire import Event, Finding, Group, Series, Timing, to_json
from perfagent_server.alerts.state_machine import Change
from perfagent_server.engine.evaluator import Evaluator
from perfagent_server.rules.catalogue import all_rules
from perfagent_server.rules.plan import Plan
from perfagent_server.rules.rule import Rule
from perfagent_server.rules.texts import LANGUAGES, said_in
from perfagent_server.runs.figures import timing_of
from perfagent_server.store.codec.tail import TailGroup
from perfagent_server.store.stored import FromTail
from perfagent_server.verdict.healthy import Healthy

DATA = Path(__file__).parent / "data"
START = 1_700_000_000.0


def read_curve(path: Path) -> dict[str, list[float]]:
    """Columns of a CSV with step, loss and others; an empty cell is NaN in `step`'s place only where the column is
    empty."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    columns: dict[str, list[float]] = {
        "step": [float(row["step"]) for row in rows],
        "loss": [float(row["loss"]) for row in rows],
    }
    for name, into in (("lr", "lr"), ("grad_norm", "grad/norm")):
        if all(row.get(name) for row in rows):
            columns[into] = [float(row[name]) for row in rows]
    return columns


def frame(
    series: Mapping[str, Sequence[float]],
    steps: Sequence[int],
    *,
    ident: int = 1,
    rank: int = 0,
    attempt: int = 1,
    received: float | None = None,
    step_s: float = 0.1,
    events: Sequence[Event] = (),
    run: str = "r",
    late_s: float = 0.0,
) -> FromTail:
    """One frame of one rank: the columns belong to `steps`. late_s: added to the times of the samples."""
    times = [START + late_s + step_s * step for step in steps]
    columns = {name: list(values) for name, values in series.items()}
    groups = [TailGroup.of_group(Group(list(steps), times, times, columns))] if steps else []  # type: ignore[arg-type]
    at = received if received is not None else (times[-1] if times else START)
    return FromTail(ident, run, attempt, rank, f"s{attempt}-{rank}", ident, at, groups, list(events))


def state(name: str, *, step: int | None = None, **data: Any) -> Event:
    return Event(kind="state", time=START, step=step, data={"state": name, **data})


def make_evaluator(run: str = "r", rules: Sequence[Rule] | None = None) -> Evaluator:
    """An evaluator of these rules, of all by default."""
    return Evaluator(run, Plan(all_rules() if rules is None else rules))


def restored(evaluator: Evaluator) -> Evaluator:
    """The evaluator, after it was put into bytes and back."""
    return Evaluator.restore(evaluator.snapshot(), evaluator.plan)


def judge_series(
    series: Mapping[str, Sequence[float]],
    *,
    first_step: int = 1,
    rows: int = 50,
    rules: Sequence[Rule] | None = None,
    step_s: float = 0.1,
    evaluator: Evaluator | None = None,
) -> tuple[list[Change], Evaluator]:
    """Feeds whole columns in frames of `rows` rows."""
    evaluator = evaluator or make_evaluator(rules=rules)
    length = len(next(iter(series.values())))
    changes: list[Change] = []
    for begin in range(0, length, rows):
        piece = {name: values[begin : begin + rows] for name, values in series.items()}
        steps = range(first_step + begin, first_step + min(begin + rows, length))
        changes += evaluator.take(frame(piece, steps, ident=evaluator.upto + 1, step_s=step_s))
    return changes, evaluator


def fired(changes: Sequence[Change], rule: str | None = None) -> list[Change]:
    return [change for change in changes if change.kind == "fire" and (rule is None or change.finding.rule == rule)]


def assert_said_by_its_evidence(finding: Finding) -> None:
    """What is stored of a finding is enough to say it again, in any language."""
    stored = json.loads(to_json(finding.evidence))
    for language in LANGUAGES if finding.title and finding.rule in {rule.id for rule in all_rules()} else ():
        words = said_in(finding.rule, finding.cause, stored, language)
        assert words is not None, (finding.rule, finding.cause, language, stored)
        assert all((words.title, words.message, words.fix)), (finding.rule, finding.cause, language)
        assert language != "en" or (words.title, words.cost) == (finding.title, finding.cost)
        assert language != "en" or finding.message.startswith(words.message)


class Judged:
    """A run whose frames an evaluator gets. changes: of its alerts, so far."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.evaluator: Evaluator = make_evaluator(rules=rules or None)
        self.changes: list[Change] = []

    @property
    def fired(self) -> list[Change]:
        for change in self.changes:
            assert_said_by_its_evidence(change.finding)
        return fired(self.changes)

    @property
    def kinds(self) -> list[str]:
        """Of the changes, but for updates of what is known."""
        return [change.kind for change in self.changes if change.kind != "update"]


def finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def figures_of(columns: Mapping[str, Sequence[float]], *, first_step: int = 1, whole_run: bool = False) -> Timing:
    """The figures of a window in which one rank sent these columns."""
    return timing_of({name: samples(name, column, first_step) for name, column in columns.items()}, whole_run=whole_run)


def samples(name: str, values: Sequence[float], first_step: int = 1) -> Series:
    ones, columns = [1] * len(values), list(values)
    steps = list(range(first_step, first_step + len(values)))
    return Series(
        name=name, rank="all", unit="", exact=True, step=steps, min=columns, max=columns, mean=columns, count=ones,
        nonfinite=[int(not math.isfinite(value)) for value in values],
    )  # fmt: skip


def told(judge: Evaluator, columns: Mapping[str, Sequence[float]], *, whole_run: bool = False) -> Finding:
    """The verdict as GET /verdict answers it: a healthy one with the figures of these columns."""
    found = judge.verdict()
    return found.with_figures(figures_of(columns, whole_run=whole_run)) if isinstance(found, Healthy) else found
