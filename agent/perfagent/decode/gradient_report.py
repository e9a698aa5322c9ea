"""Reports what was measured of the gradients and weights of a step: series of the step, and rows of its layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from perfagent.decode.layers import layers_of
from perfagent.device import Value, value_of
from perfagent.step.gradients import GradientNorms, ParameterTable, WeightChanges

if TYPE_CHECKING:
    from perfagent.step.row import OptimizerGradients
    from perfagent.step.state import StepState

__all__ = ["VANISHING_RMS", "GradientReport", "Summary", "ratios_of", "summarize"]

VANISHING_RMS = 1e-7
"""Root mean square of a gradient below which its parameter no longer trains: as SageMaker's VanishingGradient."""
_MOST_COUNTED = 64
"""Most parameters of a run whose NaN and Inf are reported as counts, since each name is a series."""

When = tuple[int, float, float]
"""Step, Unix time and monotonic time of a row."""


class GradientReport:
    """The reports of one run. on_nonfinite: called with a step and the names of the parameters whose gradient held NaN or Inf
    (not for steps that mixed precision skipped)."""

    def __init__(self) -> None:
        self._counted: set[str] = set()
        self.on_nonfinite: Callable[[int, list[str]], None] | None = None

    def add(
        self,
        p: StepState,
        when: When,
        values: dict[str, float],
        gradients: Sequence[OptimizerGradients],
        *,
        skipped: bool,
    ) -> None:
        """Adds `grad/...` and `update/ratio` of one step to its values, and rows of its layers. Called once, when ready.
        skipped: a scaler let no optimizer step; infinite gradients are then expected, and `amp/skipped` reports the step.
        """
        used = [one for one in gradients if not value_of(one.skipped) > 0]
        scales = [1.0 if one.scale is None else value_of(one.scale) for one in used]
        measured = [(one.norms, scale) for one, scale in zip(used, scales, strict=True) if one.norms is not None]
        found = summarize(measured) if measured else None  # also of a skipped step: buffers go back to their pool
        norm, nonfinite = _clipped_norm(used, scales), None
        if skipped:
            return
        whole = len(used) == len(gradients)
        if found is not None:
            self._add_rows(p, when, found)
            nonfinite = len(found.nonfinite) or None
            if whole and len(measured) == len(used):  # these mean nothing for only a part of the gradients
                nonfinite = len(found.nonfinite)
                values.update(found.shares)
                if not found.sharded and norm is None:
                    norm = math.sqrt(found.square_sum or 0.0)
                elif found.sharded and found.square_sum is not None:
                    values["grad/local_square_sum"] = found.square_sum
        moves = [one.moved for one in used if one.moved is not None]
        if moves:
            ratio, layers = ratios_of(moves)
            if ratio is not None and len(moves) == len(gradients):
                values["update/ratio"] = ratio
            if layers:
                p.rows.append((*when, {f"update_ratio/{name}": ratio for name, ratio in layers.items()}))
        if norm is not None and whole:
            values["grad/norm"] = norm
            if nonfinite is None and math.isfinite(norm):  # so there are none
                nonfinite = 0
        if nonfinite is not None:
            values["grad/nonfinite"] = float(nonfinite)

    def _add_rows(self, p: StepState, when: When, found: Summary) -> None:
        """Adds the norms of layers, and the NaN and Inf of parameters."""
        table, names = found.table, found.table.names
        present = [square for square in found.layers if square is not None]
        if present and not (table.same_everywhere and p.links.rank):
            missing = frozenset(place for place, square in enumerate(found.layers) if square is None)
            norms = present if table.sharded else list(map(math.sqrt, present))
            p.rows.append((*when, _titles(table, missing), norms))
        counts = {names[place]: count for place, count in found.counts.items()}
        self._counted.update(name for name in counts if len(self._counted) < _MOST_COUNTED)
        counts = {f"grad_nonfinite/{name}": count for name, count in counts.items() if name in self._counted}
        if counts:
            p.rows.append((*when, counts))
        if not found.nonfinite:
            return
        # not known in advance which parameters would be bad: count their numbers in the next step, once
        is_known = bool(found.counts) or p.links.investigator.stays_bad(when[0])
        if not is_known and any(place < found.own and names[place] not in self._counted for place in found.nonfinite):
            p.measured.suspects = found.nonfinite
            p.measure_at = min(p.measure_at, p.completed)
        if self.on_nonfinite is not None:
            self.on_nonfinite(when[0], [names[place] for place in found.nonfinite])


class Summary(NamedTuple):
    """The results of a pass.

    square_sum: of all gradients that this rank accounts for (for a sharded model, its share); None if the number of
        copies is not known.
    nonfinite: places of the parameters whose gradient holds NaN or Inf.
    shares: series name -> of the parameters with a gradient, the share whose gradient is all zero, and the share below
        VANISHING_RMS but not zero.
    layers: for each layer the sum of squares; None if none of its parameters has a gradient.
    counts: for some parameters, by place, how many numbers of the gradient are NaN or Inf.
    own: how many parameters the first optimizer has, whose NaN and Inf can be counted.
    """

    table: ParameterTable
    sharded: bool
    square_sum: float | None
    nonfinite: list[int]
    shares: dict[str, float]
    layers: list[float | None]
    counts: dict[int, float]
    own: int


def summarize(parts: Sequence[tuple[GradientNorms, float]]) -> Summary:
    """Combines the passes over the gradients of one or more optimizers, each with the loss scale that they carried. Called
    once, when all are ready. The counts of NaN and Inf are those of the first pass."""
    each: list[float | None] = []
    for norms, scale in parts:
        own: list[float | None] = [None] * len(norms.table.sizes)
        for reading, places in norms.readings:
            for place, value in zip(places, reading.values(), strict=True):
                own[place] = value
        each += own if scale == 1.0 else _unscaled(own, scale)
    first = parts[0][0]
    counts = {} if first.counts is None else dict(zip(first.suspects, first.counts.values(), strict=True))
    table, sharded = joint_table(*(norms.table for norms, _ in parts)), any(norms.sharded for norms, _ in parts)
    present = [norm for norm in each if norm is not None]
    nonfinite: list[int] = []
    if not math.isfinite(sum(present)):
        nonfinite = [place for place, norm in enumerate(each) if norm is not None and not math.isfinite(norm)]
    squares = [None if norm is None else norm * norm for norm in each]
    if table.copies is not None:
        squares = [None if square is None else square / n for square, n in zip(squares, table.copies, strict=True)]
    known = not sharded or table.copies is not None
    square_sum = _sum([square for square in squares if square is not None]) if known else None
    layers = _by_layer(squares, table) if known else []
    return Summary(
        table, sharded, square_sum, nonfinite, _shares(each, _faint(table)), layers, counts, len(first.table.sizes)
    )


def _unscaled(norms: list[float | None], scale: float) -> list[float | None]:
    """Divides by the loss scale, as the optimizer does: by one that collapsed to zero, nothing stays finite."""
    return [None if norm is None else norm / scale if scale else norm * math.inf for norm in norms]


def _sum(squares: list[float]) -> float:
    """Sums squares, which are never negative. fsum raises on an overflow, or if infinities of both signs meet."""
    total = sum(squares)
    return math.fsum(squares) if math.isfinite(total) else total


@lru_cache(maxsize=32)
def _faint(table: ParameterTable) -> list[float]:
    """Returns for each gradient the norm below which it vanishes; zero for one without numbers, which never does."""
    return [VANISHING_RMS * math.sqrt(size) for size in table.sizes]


def _shares(each: list[float | None], faint: list[float]) -> dict[str, float]:
    alive = below = zero = 0
    for norm, limit in zip(each, faint, strict=True):
        if norm is None or not limit:
            continue
        alive += 1
        if norm < limit:  # true for few
            below += 1
            zero += norm == 0.0
    return {"grad/zero_share": zero / alive, "grad/vanishing_share": (below - zero) / alive} if alive else {}


def _by_layer(squares: list[float | None], table: ParameterTable) -> list[float | None]:
    layers = layers_of(table)
    if len(layers.names) == len(squares):  # each parameter is a layer
        return squares
    sums: list[float | None] = [None] * len(layers.names)
    for row, square in zip(layers.of, squares, strict=True):
        if square is not None:
            sums[row] = (sums[row] or 0.0) + square
    return sums


@lru_cache(maxsize=256)
def _titles(table: ParameterTable, missing: frozenset[int]) -> tuple[str, ...]:
    """Returns one tuple object per set of layers, so that the sender groups rows by identity."""
    group = "grad_square_sum" if table.sharded else "grad_norm"
    return tuple([f"{group}/{name}" for row, name in enumerate(layers_of(table).names) if row not in missing])


def _clipped_norm(used: Sequence[OptimizerGradients], scales: Sequence[float]) -> float | None:
    """Returns the norm of all gradients of a step as clipping computed it; None if it did not cover all of them."""
    norms: dict[int, tuple[Value, float]] = {}  # by id: one call may have held the gradients of several optimizers
    for one, scale in zip(used, scales, strict=True):
        norms.update({id(norm): (norm, scale) for norm in one.clips})
    values = [value_of(norm) / scale if scale else math.inf for norm, scale in norms.values()]
    if not values or not all(one.clips for one in used):
        return None
    return values[0] if len(values) == 1 else math.sqrt(math.fsum(value * value for value in values))


def ratios_of(parts: Sequence[WeightChanges]) -> tuple[float | None, dict[str, float]]:
    """Returns the ratio of change to weight of all weights that several optimizers moved, and of each layer; left out where
    all weights are zero. Called once, when all are ready."""
    layers = layers_of(joint_table(*(part.table for part in parts)))
    weights, changes = [0.0] * len(layers.names), [0.0] * len(layers.names)
    before = 0
    for part in parts:
        for reading, places in part.readings:
            values = reading.values()
            for place, weight, change in zip(places, values, values[len(places) :], strict=False):
                row, factor = layers.of[before + place], part.factors[place]
                weights[row] += factor * weight**2
                changes[row] += factor * change**2
        before += len(part.table.names)
    named = zip(layers.names, weights, changes, strict=True)
    ratios = {name: math.sqrt(change / weight) for name, weight, change in named if weight != 0.0}
    total = sum(weights)
    return (math.sqrt(sum(changes) / total) if total != 0.0 else None), ratios


@lru_cache(maxsize=16)
def joint_table(*tables: ParameterTable) -> ParameterTable:
    """Returns the table of these tables, in their order; the ranks that hold a sharded one's parts hold all of the others.
    A name in an earlier table (of parameters that no model names) gets its optimizer's number."""
    if len(tables) == 1:
        return tables[0]
    names: list[str] = []
    for number, table in enumerate(tables):
        earlier = set(names)
        names += [f"optimizer{number}.{name}" if name in earlier else name for name in table.names]
    known = {table.together for table in tables if table.sharded}
    together = known.pop() if len(known) == 1 else None
    copies = [table.copies or [float(together)] * len(table.sizes) for table in tables] if together else None
    return ParameterTable(
        names=names,
        sizes=[*chain.from_iterable(table.sizes for table in tables)],
        world=tables[0].world,
        sharded=any(table.sharded for table in tables),
        copies=None if copies is None else [*chain.from_iterable(copies)],
        together=together,
        same_everywhere=all(table.same_everywhere for table in tables),
    )
