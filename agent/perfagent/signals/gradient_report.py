"""Reports what was measured of the gradients and weights of a step: series of the step, and rows of its layers.

Everything here runs on the sender's thread, once all numbers have arrived.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from perfagent.device import Value, value_of
from perfagent.signals.gradients import GradientNorms, Plan, Report, joint_report, named
from perfagent.signals.updates import UpdateRatios, joint_ratios

if TYPE_CHECKING:
    from perfagent.signals.gradient_schedule import Health
    from perfagent.step.row import Taken
    from perfagent.step.state import StepState

__all__ = ["GradientReport"]

_MOST_COUNTED = 64
"""Most parameters of a run whose NaN and Inf are reported as counts, since each name is a series."""
_OF_ALL = ("grad/local_square_sum", "grad/zero_share", "grad/vanishing_share")
"""Series that mean nothing for only a part of the gradients."""


class GradientReport:
    """The reports of one run.

    on_nonfinite: called with a step and the names of the parameters whose gradient held NaN or Inf (not for steps that
        mixed precision skipped).
    """

    def __init__(self, schedule: Health) -> None:
        self._schedule = schedule
        self._counted: set[str] = set()
        self.on_nonfinite: Callable[[int, list[str]], None] | None = None

    def report_step(
        self,
        p: StepState,
        when: tuple[int, float, float],
        values: dict[str, float],
        rows: list[dict[str, float]],
        all_taken: Sequence[Taken],
        *,
        skipped: bool,
    ) -> None:
        """Adds `grad/...` and `update/ratio` of one step to its values, and rows of its layers. Called
        once, when ready.

        all_taken: the gradients that each optimizer used. skipped: a scaler let none of them step; infinite gradients
        are then expected, and `amp/skipped` reports the step.
        """
        taken = [one for one in all_taken if not value_of(one.skipped) > 0]
        partly = len(taken) < len(all_taken)
        scales = [1.0 if one.scale is None else value_of(one.scale) for one in taken]
        report, clipped = _report_of(taken, scales), _clipped_norm(taken, scales)  # always: buffers go to their pool
        if skipped:
            return
        norm, nonfinite = None, None
        if report is not None:
            norm, nonfinite = self._add(p, when, values, report)
            if partly or any(one.norms is None for one in taken):
                for name in _OF_ALL:
                    values.pop(name, None)
                norm, nonfinite = None, nonfinite or None
        if clipped is not None and not partly:
            norm = clipped
        moves = [cast("UpdateRatios | None", one.moved) for one in taken]
        _add_moves(values, rows, moves, whole=not partly)
        values.update(named(norm, nonfinite))

    def _add(
        self, p: StepState, when: tuple[int, float, float], values: dict[str, float], found: Report
    ) -> tuple[float | None, int]:
        """Adds the results of a pass: more series of the step, and rows of layers. Returns the norm (None if ranks hold
        parts of it) and the number of parameters with NaN or Inf."""
        values.update(found.shares)
        plan = found.plan
        if plan is not None:
            self._add_layers(p, when, plan, found.layers)
            self._add_bad(p, when, plan, found)
        if not found.sharded:
            return math.sqrt(found.square_sum or 0.0), len(found.nonfinite)
        if found.square_sum is not None:
            values["grad/local_square_sum"] = found.square_sum
        return None, len(found.nonfinite)

    def _add_layers(
        self, p: StepState, when: tuple[int, float, float], plan: Plan, squares: list[float | None]
    ) -> None:
        present = [square for square in squares if square is not None]
        if not present or (plan.same_everywhere and self._schedule.rank):
            return
        if plan.titles is None:
            group = "grad_square_sum" if plan.sharded else "grad_norm"
            plan.titles = _interned(tuple([f"{group}/{name}" for name in plan.layers.names]))
        titles = plan.titles
        if len(present) < len(titles):
            titles = _interned(
                tuple([title for title, square in zip(titles, squares, strict=True) if square is not None])
            )
        p.rows.append((*when, titles, present if plan.sharded else list(map(math.sqrt, present))))

    def _add_bad(self, p: StepState, when: tuple[int, float, float], plan: Plan, found: Report) -> None:
        counts = {plan.names[place]: count for place, count in found.counts.items()}
        self._counted.update(name for name in counts if len(self._counted) < _MOST_COUNTED)
        told = {f"grad_nonfinite/{name}": count for name, count in counts.items() if name in self._counted}
        if told:
            p.rows.append((*when, told))
        if not found.nonfinite:
            return
        # not known in advance which parameters would be bad: count their numbers in the next step, once
        investigator = p.links.investigator
        stays_bad = investigator is not None and investigator.stays_bad(when[0])
        if not found.counts and not stays_bad:
            known = {place for place in found.nonfinite if plan.names[place] in self._counted}
            self._schedule.count_next(p, found.nonfinite, known)
        if self.on_nonfinite is not None:
            self.on_nonfinite(when[0], [plan.names[place] for place in found.nonfinite])


def _add_moves(
    values: dict[str, float],
    rows: list[dict[str, float]],
    moved: Sequence[UpdateRatios | None],
    *,
    whole: bool,
) -> None:
    """Adds how far a step moved the weights. moved: by each optimizer; None if not known. whole: there are no
    other optimizers."""
    known = [ratios for ratios in moved if ratios is not None]
    if not known:
        return
    total, layers = joint_ratios(known)
    if total is not None and whole and len(known) == len(moved):
        values["update/ratio"] = total
    if layers:
        rows.append({f"update_ratio/{name}": ratio for name, ratio in layers.items()})


def _report_of(all_taken: Sequence[Taken], scales: Sequence[float]) -> Report | None:
    """Combines the measurements of a step's gradients. Called once, when ready."""
    taken = zip(all_taken, scales, strict=True)
    measured = [(cast("GradientNorms", one.norms), scale) for one, scale in taken if one.norms is not None]
    if len(measured) < 2:
        return measured[0][0].report(measured[0][1]) if measured else None
    return joint_report(measured)


def _clipped_norm(all_taken: Sequence[Taken], scales: Sequence[float]) -> float | None:
    """Returns the norm of all gradients of a step as clipping computed it; None if clipping did not cover
    all of them."""
    norms: dict[int, tuple[Value, float]] = {}  # by id: one call may have held the gradients of several optimizers
    for one, scale in zip(all_taken, scales, strict=True):
        if not one.clips:
            return None
        norms.update({id(norm): (norm, scale) for norm in one.clips})
    values = [value_of(norm) / scale if scale else math.inf for norm, scale in norms.values()]
    return values[0] if len(values) == 1 else math.sqrt(math.fsum(value * value for value in values))


_rows: dict[tuple[str, ...], tuple[str, ...]] = {}


def _interned(names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns one tuple object per set of layers, so that the sender groups rows by identity."""
    if len(_rows) > 256:  # parameters whose gradients come and go
        _rows.clear()
    return _rows.setdefault(names, names)
