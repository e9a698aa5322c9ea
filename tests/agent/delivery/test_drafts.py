"""Drafts: what a tick writes down as it was noted, and what another process reads of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from agent.delivery.test_spool import header, sent

from perfagent.decode.step_decoder import StepReader
from perfagent.delivery.columns import Columns
from perfagent.delivery.drafts import Draft, is_pressing, left_behind, read
from perfagent.delivery.row_packing import Packer
from perfagent.delivery.spool import Spool
from perfagent.step.row import Note
from perfagent.step.trace import BACKWARD, BACKWARD_END, DATA, FORWARD, OPTIMIZER, OPTIMIZER_END, trace_of
from perfagent.wire import Group

MS = 1_000_000


def note(step: int, loss: float = 0.5, **changes: object) -> Note:
    """A step of 10 ms: 1 data, 3 forward, 4 backward, 1 optimizer, 1 anything else."""
    began = 100 * MS + 10 * MS * step
    entries = [
        (DATA, began, began + MS, 7, (32, None, False)),
        (FORWARD, began + MS, None, True, None),
        (BACKWARD, began + 4 * MS, None, loss, False),
        (BACKWARD_END, began + 8 * MS, None),
        (OPTIMIZER, began + 8 * MS, None),
        (OPTIMIZER_END, began + 9 * MS, None),
    ]
    last = began - MS
    return Note(step, 1000.0 + step, last, 1, 0.1, None, 0, trace_of(entries), None)._replace(**changes)


def drafted(*notes: Note, rows: Sequence[tuple[Any, ...]] = ()) -> Draft:
    packer = Packer(Columns())
    for step, wall, monotonic, values in rows:
        packer.add(step, wall, monotonic, (*values,), values.values())
    return Draft(StepReader().context(), [*notes], packer.take())


def values(groups: list[Group]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for group in groups:
        for name in group.values:
            found.setdefault(name, []).extend(group.column(name))
    return found


def steps_in(groups: list[Group], name: str = "loss") -> list[int]:
    return sorted(step for group in groups if name in group.values for step in group.steps())


def test_draft_of_a_dead_process_is_read_as_by_itself(tmp_path: Path) -> None:
    rows = [(4, 1004.0, 2.0, {"accuracy": 0.5, "epoch": 1}), (4, 1004.0, 2.0, {"host/cpu_pct": 12.0})]
    draft = drafted(note(1), note(2, math.nan), note(3, rare={"grad/norm": 2.5}), rows=rows)
    spool = Spool(tmp_path / "s", header())
    assert spool.append(draft, now=0.0)
    spool.abandon()  # gone without a word
    found = values(sent(Spool.open(tmp_path / "s")).groups)
    assert repr(found) == repr(values(left_behind([draft])))
    assert found["phase/forward_s"] == pytest.approx([0.003] * 3)
    assert found["phase/data_s"] == pytest.approx([0.001] * 3)
    assert found["samples_per_s"] == pytest.approx([3200.0] * 3)
    assert str(sorted(found["loss"], key=str)) == "[0.5, 0.5, nan]"
    others = {"grad/norm": [2.5], "accuracy": [0.5], "epoch": [1.0], "host/cpu_pct": [12.0]}
    assert {name: found[name] for name in others} == others


def test_damaged_step_costs_itself_and_is_counted() -> None:
    lost: list[object] = []
    damaged = note(2)._replace(trace=[1, 2, 99])
    groups = read(Draft([], [note(1), damaged, note(3)]), StepReader(), Columns(), lost.append)
    assert steps_in(groups) == [1, 3]
    assert lost == [damaged]


def test_each_draft_is_read_with_what_was_known_when_noted() -> None:
    """That the user logs the loss under steps of an own count, so that ours is left out."""
    told = StepReader()
    told.loss_by_user = True
    assert steps_in(left_behind([drafted(note(1)), Draft(told.context(), [note(2)])])) == [1]


PRESSING = (
    note(1, math.nan, rare={}),  # what is not finite makes a step unusual (hooks/test_backward.py)
    note(1, -math.inf, rare={}), note(1, rare={"grad/norm": math.inf}), note(1, rare={"grad/nonfinite": 3.0}),
    (1, 0.0, 0.0, {"loss": math.nan, "x": 1}), (1, 0.0, 0.0, {"train/loss": math.inf, 3: math.nan}),
    (1, 0.0, 0.0, {"grad/nonfinite": 1.0}),
)  # fmt: skip
CALM = (
    note(1), note(1, rare={"grad/nonfinite": 0.0}), (1, 0.0, 0.0, {"accuracy": math.nan}),
    (1, 0.0, 0.0, {"val/loss": math.inf, 3: math.nan}),
)  # fmt: skip


@pytest.mark.parametrize("row", [*PRESSING, *CALM])
def test_only_a_bad_loss_or_gradient_does_not_wait(row: Any) -> None:
    assert is_pressing(row) is (row in PRESSING)
