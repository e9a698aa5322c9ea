"""Many steps of one kind are read at once, column by column.

Most steps of a training do the same things in the same order. What one of them says about the time of its phases is then a
difference of two columns: a fifth of the work of reading each by itself (reading.py), which stays for all other steps and is the
measure of what is found here: the same names, the same values to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import compress, groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from perfagent.hooks.account import BACKWARD, BACKWARD_END, CLEARED, DATA, FORWARD, OPTIMIZER, OPTIMIZER_END, RETURNED
from perfagent.hooks.reading import interned

if TYPE_CHECKING:
    from perfagent.hooks.reading import Row, StepReader

__all__ = ["Block", "Noted", "read_alike", "runs"]

FEWEST = 4
"""Steps for which it is worth it."""
_kind = itemgetter(0)
Noted = Sequence[Any]
"""The fields of a Note, as they come from a file."""


class Block(NamedTuple):
    """Rows of one shape: a column for each of the names, all as long as `steps`. times: Unix, monotonics: seconds."""

    names: tuple[str, ...]
    steps: Sequence[int]
    times: Sequence[float]
    monotonics: Sequence[float]
    columns: Sequence[Sequence[float]]


class _Plan(NamedTuple):
    """Where in a trace the entries of a usual step are; None where such a step has none. logged: the user logs a loss as well."""

    data: int | None
    forward: int
    returned: int | None
    cleared: int | None
    backward: int
    logged: bool


_plans: dict[tuple[bool, tuple[int, ...]], _Plan | None] = {}


def runs(notes: Sequence[Noted]) -> Iterator[tuple[_Plan | None, list[Noted]]]:
    """Notes that follow one another and can be read together; None in place of a plan where each is to be read by itself."""
    plan = _plan_of(notes[0]) if len(notes) >= FEWEST else None
    if plan is not None and _same_kinds(notes, logged=plan.logged):
        yield plan, [*notes]
        return
    for plan, run in groupby(notes, _plan_of):
        alike = [*run]
        yield (plan if len(alike) >= FEWEST else None), alike


def _same_kinds(notes: Sequence[Noted], *, logged: bool) -> bool:
    """Whether all have the plan of the first: a look at columns, a third of the time of finding each note's plan."""
    _, _, begans, roots, _, user_losses, _, traces, _ = zip(*notes, strict=True)
    try:
        return (
            roots.count(1) == len(notes)
            and all(begans)
            and user_losses.count(None) == (0 if logged else len(notes))
            and len({*map(len, traces)}) == 1
            and all(len({*map(_kind, entries)}) == 1 for entries in zip(*traces, strict=True))
        )
    except TypeError:  # damaged on the disk
        return False


def _plan_of(note: Noted) -> _Plan | None:
    _, _, began, roots, _, user_loss, _, trace, _ = note
    if roots != 1 or not began:
        return None
    try:
        kinds = user_loss is not None, tuple(map(_kind, trace))
        return _plans[kinds]
    except TypeError:  # damaged on the disk
        return None
    except KeyError:
        plan = _planned(kinds[1], logged=kinds[0])
        if len(_plans) < 1000:
            _plans[kinds] = plan
        return plan


def _planned(kinds: tuple[int, ...], *, logged: bool) -> _Plan | None:
    """One batch at most, one call of the model, one backward pass, one optimizer."""
    if kinds[-4:] != (BACKWARD, BACKWARD_END, OPTIMIZER, OPTIMIZER_END):
        return None
    start, middle = kinds[:-4], len(kinds) - 4
    data = 0 if start[:1] == (DATA,) else None
    rest = start if data is None else start[1:]
    if rest[:1] != (FORWARD,) or rest[1:] not in ((), (RETURNED,), (CLEARED,), (RETURNED, CLEARED)):
        return None
    returned = kinds.index(RETURNED) if RETURNED in rest else None
    cleared = kinds.index(CLEARED) if CLEARED in rest else None
    return _Plan(data, kinds.index(FORWARD), returned, cleared, middle, logged)


def read_alike(reader: StepReader, plan: _Plan, notes: Sequence[Noted]) -> tuple[Block, list[Row]] | None:
    """What these steps say: the rows that hold nothing rare, and those that do. None where the steps are less alike than they
    seem; nothing was learned from them then."""
    steps, walls, begans, _, rates, logged, _, traces, rare = zip(*notes, strict=True)
    entries = [*zip(*traces, strict=True)]
    losses = [*map(itemgetter(3), entries[plan.backward])]
    size, forward = _size(reader, plan, entries), _forward_ns(plan, entries)
    if size is None or forward is None or not _are_floats(losses) or not (rates[0] is None or _are_floats(rates)):
        return None
    if not math.isfinite(sum(losses)) or any(one is not None and one.get("grad/nonfinite") for one in rare):
        return None  # an inquiry may begin with such a step
    if reader.flops is not None and not reader.flops.is_steady(steps[0], steps[-1]):
        return None
    ends = [*map(itemgetter(1), entries[-1])]
    seconds = [(end - began) / 1e9 for end, began in zip(ends, begans, strict=True)]
    phases = _phases(plan, entries, forward)
    if min(seconds) <= 0.0 or phases is None:
        return None
    table: dict[str, Sequence[float]] = {}
    if plan.logged:
        reader.compare(logged, losses)
    elif not reader.loss_by_user:
        table["loss"] = losses
    if rates[0] is not None:
        table["lr"] = rates
    table["step_time_s"] = seconds
    _add_rates(table, reader, steps[-1], size, seconds)
    table.update(phases)
    known = map(sum, zip(*phases.values(), strict=True))
    table["phase/other_s"] = [whole - one if whole > one else 0.0 for whole, one in zip(seconds, known, strict=True)]
    if plan.data is not None:
        reader.account.took(entries[plan.data][-1][3])
    monotonics = [end / 1e9 for end in ends]
    epoch = reader.epoch
    times = [wall or epoch + at for wall, at in zip(walls, monotonics, strict=True)]
    return _divided(reader, Block((*table,), steps, times, monotonics, [*table.values()]), rare)


def _divided(reader: StepReader, block: Block, rare: Sequence[dict[str, float] | None]) -> tuple[Block, list[Row]]:
    """Takes the rows that hold something rare out of the block."""
    names, steps, times, monotonics, columns = block
    investigator = reader.investigator
    if investigator is not None:
        investigator.judged_sound(steps, names, partial(_newest, block, rare, investigator.history_steps))
    if rare.count(None) == len(rare):
        return block, []
    apart = [at for at, more in enumerate(rare) if more is not None]
    told = {at: dict(zip(names, [column[at] for column in columns], strict=True)) | (rare[at] or {}) for at in apart}
    rows = [(steps[at], times[at], monotonics[at], interned((*told[at],)), [*told[at].values()]) for at in apart]
    usual = [more is None for more in rare]
    kept = [[*compress(column, usual)] for column in (times, monotonics, *columns)]
    return Block(names, [*compress(steps, usual)], kept[0], kept[1], kept[2:]), rows


def _newest(block: Block, rare: Sequence[dict[str, float] | None], most: int) -> list[tuple[int, Mapping[str, float]]]:
    """The last steps of a block by themselves, with their values."""
    recent = zip(*[column[-most:] for column in block.columns], strict=True)
    told = [dict(zip(block.names, values, strict=True)) for values in recent]
    known = [values | (more or {}) for values, more in zip(told, rare[-most:], strict=True)]
    return [*zip(block.steps[-most:], known, strict=True)]


def _are_floats(column: Sequence[Any]) -> bool:
    return set(map(type, column)) == {float}


def _size(reader: StepReader, plan: _Plan, entries: list[Any]) -> tuple[int, int] | None:
    """Samples and tokens of each step; None where they differ, or where batches may have been fetched ahead."""
    at = plan.forward if plan.data is None else plan.data
    sizes = [entry[4] for entry in entries[at]]
    loaders = {entry[3] for entry in entries[at]} if plan.data is not None else {None}
    size = sizes[0]  # a list where it comes from a file
    if sizes.count(size) < len(sizes) or len(loaders) > 1 or reader.account.has_waiting(loaders.pop()):
        return None
    if plan.data is not None and size is None:
        return None
    if size is None:
        return 0, 0
    samples, tokens, only_with_embedding = size
    if only_with_embedding and not reader.account.embedded:
        tokens = 0
    return samples or 0, tokens or 0


def _forward_ns(plan: _Plan, entries: list[Any]) -> list[int] | None:
    """As long as the model's call where it returned the loss, else until backward starts."""
    calls = entries[plan.forward]
    if not all(map(itemgetter(3), calls)):
        return None  # in evaluation mode
    end = plan.backward
    if plan.returned is not None:
        hold_loss = {entry[3] for entry in entries[plan.returned]}
        if len(hold_loss) > 1:
            return None
        if hold_loss.pop():
            end = plan.returned
    spent = [after[1] - call[1] for call, after in zip(calls, entries[end], strict=True)]
    if plan.cleared is not None and plan.cleared < end:
        spent = [ns - (cleared[2] - cleared[1]) for ns, cleared in zip(spent, entries[plan.cleared], strict=True)]
    return spent


def _phases(plan: _Plan, entries: list[Any], forward: list[int]) -> dict[str, list[float]] | None:
    """None where a phase took no time at all: such a row has other names."""
    backward, optimizer = plan.backward, plan.backward + 2
    phases: dict[str, list[float]] = {}
    if plan.data is not None:
        phases["phase/data_s"] = [(entry[2] - entry[1]) / 1e9 for entry in entries[plan.data]]
    phases["phase/forward_s"] = [ns / 1e9 for ns in forward]
    for name, at in (("phase/backward_s", backward), ("phase/optimizer_s", optimizer)):
        phases[name] = [(end[1] - begin[1]) / 1e9 for begin, end in zip(entries[at], entries[at + 1], strict=True)]
        if 0.0 in phases[name]:
            return None
    return phases


def _add_rates(
    table: dict[str, Sequence[float]], reader: StepReader, last: int, size: tuple[int, int], seconds: list[float]
) -> None:
    samples, tokens = size
    if samples:
        table["samples_per_s"] = [samples / one for one in seconds]
    if tokens:
        table["tokens_per_s"] = [tokens / one for one in seconds]
    if reader.flops is not None:
        flops = reader.flops.of(last, samples, tokens)
        if flops is not None:
            table["flops_per_s"] = [flops / one for one in seconds]
