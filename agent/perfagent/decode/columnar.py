"""Reads many steps of one kind at once, column by column.

The time of a phase in each step is the difference of two columns: a fifth of the work of reading each step by itself
(step_decoder.py). All other steps are still read one by one, and that reader is the reference: both give the same names
and the same values to the last bit. Sending raw traces instead would take more bytes, and the server would have to read
every agent's version of them.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

from perfagent.decode.step_blocks import Layout, layout_of, words_of
from perfagent.decode.step_decoder import interned

if TYPE_CHECKING:
    from perfagent.decode.step_decoder import StepReader
    from perfagent.step.row import Row

__all__ = ["Block", "read_alike"]

_Rare = Sequence[tuple[int, dict[str, float]]]


class Block(NamedTuple):
    """Rows of one shape: one column per name, each as long as `steps`. times: Unix time; monotonics: monotonic
    time in seconds."""

    names: tuple[str, ...]
    steps: Sequence[int]
    times: Sequence[float]
    monotonics: Sequence[float]
    columns: Sequence[Sequence[float]]


class _Stamps:
    """The columns of a block of steps, addressed by the place of the entry in a step and of the item in the entry."""

    __slots__ = ("_shared", "_words", "layout")

    def __init__(self, layout: Layout, shared: Sequence[Any], words: array[int]) -> None:
        self.layout, self._shared, self._words = layout, shared, words

    def ns(self, entry: int, item: int = 0) -> array[int]:
        return self.layout.column(self._words, entry, item)

    def reals(self, entry: int, item: int) -> array[float]:
        return self.layout.reals(self._words, entry, item)

    def fixed(self, number: int) -> array[Any]:
        return self.layout.fixed(self._words, number)

    def shared(self, entry: int, item: int) -> Any:
        return self.layout.common(self._shared, entry, item)


def read_alike(
    reader: StepReader, block: Sequence[Any], knows: Callable[[tuple[str, ...]], bool]
) -> tuple[Block, list[Row]] | None:
    """Returns the rows of these steps: those without rare series as a block, and the others. Returns None, and learns
    nothing, if the steps must be read one by one.

    block: the fields of step_blocks.Steps. knows: returns whether series of these names may be stored.
    """
    (kinds, is_logged, shared), data, rare = block
    layout = layout_of(tuple(kinds))
    if layout is None:
        return None
    stamps = _Stamps(layout, shared, words_of(layout, data))
    steps, begans, walls, rates, logged = map(stamps.fixed, range(5))
    losses = stamps.reals(layout.backward, 2)
    size, forward = _size(reader, stamps), _forward_ns(stamps)
    if (
        not steps
        or size is None
        or forward is None
        or not (math.isfinite(sum(losses)) or _stay_bad(reader, steps, losses))
    ):
        return None
    if any(more.get("grad/nonfinite") for _, more in rare):
        return None  # an investigation may begin with such a step
    if reader.flops is not None and not reader.flops.is_steady(steps[0], steps[-1]):
        return None
    ends = stamps.ns(len(layout.kinds) - 1)
    seconds = [(end - began) / 1e9 for end, began in zip(ends, begans, strict=True)]
    phases = _phases(stamps, forward)
    if min(seconds) <= 0.0 or phases is None:
        return None
    table: dict[str, Sequence[float]] = {}
    if not is_logged and not reader.loss_by_user:
        table["loss"] = losses
    table["lr"] = rates
    table["step_time_s"] = seconds
    _add_rates(table, reader, steps[-1], size, seconds)
    table.update(phases)
    known = map(sum, zip(*phases.values(), strict=True))
    table["phase/other_s"] = [whole - one if whole > one else 0.0 for whole, one in zip(seconds, known, strict=True)]
    if not knows((*table,)):
        return None
    if is_logged:
        reader.compare(logged, losses)
    if layout.data is not None:
        reader.account.batches.took(stamps.shared(layout.data, 2))
    monotonics = [end / 1e9 for end in ends]
    epoch = reader.epoch
    times = [wall or epoch + at for wall, at in zip(walls, monotonics, strict=True)]
    return _divided(reader, Block((*table,), steps, times, monotonics, [*table.values()]), rare)


def _divided(reader: StepReader, block: Block, rare: _Rare) -> tuple[Block, list[Row]]:
    """Takes the rows with rare series out of the block."""
    names, steps, times, monotonics, columns = block
    reader.delivers(interned(names), len(steps))
    investigator = reader.investigator
    if investigator is not None:
        newest = partial(_newest, block, rare, investigator.history_steps)
        if _stay_bad(reader, steps, columns[0] if names[0] == "loss" else ()):
            investigator.judged_bad(steps, newest)
        else:
            investigator.judged_sound(steps, names, newest)
    if not rare:
        return block, []
    rows: list[Row] = []
    usual = [True] * len(steps)
    for at, more in rare:
        if at < len(usual):
            told = dict(zip(names, [column[at] for column in columns], strict=True)) | more
            more_names = interned((*told,))
            reader.delivers(more_names, 0)
            rows.append((steps[at], times[at], monotonics[at], more_names, [*told.values()]))
            usual[at] = False
    kept = [[*compress(column, usual)] for column in (times, monotonics, *columns)]
    return Block(names, [*compress(steps, usual)], kept[0], kept[1], kept[2:]), rows


def _stay_bad(reader: StepReader, steps: Sequence[int], losses: Sequence[float]) -> bool:
    """Whether the loss is no number in all of these steps, and was looked into before them."""
    if reader.investigator is None or not losses or not reader.investigator.stays_bad(steps[0]):
        return False
    return not any(map(math.isfinite, losses))


def _newest(block: Block, rare: _Rare, most: int) -> list[tuple[int, Mapping[str, float]]]:
    """Returns the last steps of a block one by one, with their values."""
    begin = max(0, len(block.steps) - most)
    recent = zip(*[column[begin:] for column in block.columns], strict=True)
    more = dict(rare)
    told = [dict(zip(block.names, values, strict=True)) | more.get(at, {}) for at, values in enumerate(recent, begin)]
    return [*zip(block.steps[begin:], told, strict=True)]


def _size(reader: StepReader, stamps: _Stamps) -> tuple[int, int] | None:
    """Returns the samples and tokens of each step; None if batches may have been prefetched."""
    data = stamps.layout.data
    size = stamps.shared(stamps.layout.forward if data is None else data, 3)  # a list if read from a file
    batches = reader.account.batches
    if batches.has_waiting(None if data is None else stamps.shared(data, 2)) or (data is not None and batches.parted):
        return None
    if data is None:
        batches.goes_on()
    if size is None:
        return (0, 0) if data is None else None
    samples, tokens, only_with_embedding = size
    if only_with_embedding and not reader.account.embedded:
        tokens = 0
    return samples or 0, tokens or 0


def _forward_ns(stamps: _Stamps) -> list[int] | None:
    """Returns the ns of each forward pass: the model's call if it returned the loss, otherwise until
    backward starts."""
    layout = stamps.layout
    if not stamps.shared(layout.forward, 2):
        return None  # evaluation mode
    end = layout.backward
    if layout.returned is not None and stamps.shared(layout.returned, 2):
        end = layout.returned
    spent = [after - call for call, after in zip(stamps.ns(layout.forward), stamps.ns(end), strict=True)]
    if layout.cleared is not None and layout.cleared < end:
        cleared = zip(stamps.ns(layout.cleared), stamps.ns(layout.cleared, 1), strict=True)
        spent = [ns - (ended - began) for ns, (began, ended) in zip(spent, cleared, strict=True)]
    return spent


def _phases(stamps: _Stamps, forward: list[int]) -> dict[str, list[float]] | None:
    """Returns the seconds of each phase; None if a phase took no time at all, since such a row has other names."""
    backward, optimizer, data = stamps.layout.backward, stamps.layout.backward + 2, stamps.layout.data
    phases: dict[str, list[float]] = {}
    if data is not None:
        phases["phase/data_s"] = _seconds(stamps.ns(data), stamps.ns(data, 1))
    phases["phase/forward_s"] = [ns / 1e9 for ns in forward]
    for name, at in (("phase/backward_s", backward), ("phase/optimizer_s", optimizer)):
        phases[name] = _seconds(stamps.ns(at), stamps.ns(at + 1))
        if 0.0 in phases[name]:
            return None
    return phases


def _seconds(begins: array[int], ends: array[int]) -> list[float]:
    return [(end - begin) / 1e9 for begin, end in zip(begins, ends, strict=True)]


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
