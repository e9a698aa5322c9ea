"""Records what happened in a step as one flat list, the trace.

A flat list is cheap to read on another processor: each entry is its fields and then its kind, so the last item of the
list is the kind of the newest entry. These are the kinds, in the order of a step (times in ns; event: of the device
clock, or None):

    began, ended, loader, size, DATA        a wait for data; size is None if it only started workers (loader 0) or
                                            ended an epoch
    began, event, training, size, FORWARD   a call of the root model with gradients on; size: set if there is no loader
    ended, event, holds_loss, RETURNED      the call returned
    began, event, value, divided, BACKWARD  the outermost backward call; value: of its root, the tensor it starts
                                            from; None if that is no loss; divided: how the script scaled the loss: the
                                            divisor of a division; True for a product or if not known; False if not
    ended, event, BACKWARD_END
    began, event, OPTIMIZER                 the optimizer's step, or GradScaler.step around it
    ended, event, OPTIMIZER_END
    began, ended, name, event, event, PHASE a part of the loop that the script named or the agent recognized; the events
                                            at its ends if device time is meant, else None twice; named UNNAMED: the
                                            closure of an optimizer's step, in which no call of the model was seen
    began, ended, CLEARED                   zero_grad between the model's call and backward, or of the gradients of the
                                            optimizer that counts, after a backward pass
    began, ended, training, event, event, EVALUATED
                                            a call of a model without gradients (hooks/evaluation.py)
    began, event, ended, AUXILIARY          a call of another model with gradients, outside the root's forward pass
                                            (hooks/selection/auxiliary_models.py)

`entries_of` turns them into tuples, the kind first, for readers that are not in a hurry.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from perfagent.device import Value

__all__ = [
    "AUXILIARY", "BACKWARD", "BACKWARD_END", "CLEARED", "DATA", "EVALUATED", "FIELDS", "FORWARD", "MOST_ITEMS", "NEWEST",
    "OPTIMIZER", "OPTIMIZER_END", "PHASE", "RETURNED", "UNNAMED", "Entry", "EvalTrace", "Loss", "LossScale", "RolloutTrace",
    "Trace", "backward_passes", "backward_since", "entries_of", "entry_count", "events_of", "forward_mode", "forward_passes",
    "only_backward_since", "only_optimizers", "shorten", "trace_of",
]  # fmt: skip

DATA, FORWARD, RETURNED, BACKWARD, BACKWARD_END, OPTIMIZER = range(6)
OPTIMIZER_END, PHASE, CLEARED, EVALUATED, AUXILIARY = range(6, 11)
FIELDS = (5, 5, 4, 5, 3, 3, 3, 6, 3, 6, 4)
"""Number of items of an entry in a trace, by kind."""
_HOST_TIMED = frozenset((CLEARED, DATA, EVALUATED, PHASE))
UNNAMED = ""
"""Name of a span that belongs to no phase, not even the optimizer's."""
MOST_ITEMS = 400_000
"""Most items of a trace that no step ends."""
Trace = list[Any]
Entry = tuple[Any, ...]
LossScale = Value | bool
"""The divisor of a loss before its backward pass; see BACKWARD."""
NEWEST = 64
"""Number of newest entries to search where a step that no optimizer ends may have any number."""


class Loss(NamedTuple):
    """The tensor that a backward pass starts from."""

    value: Value | None
    divided: LossScale


def entries_of(trace: Sequence[Any]) -> list[Entry]:
    """Turns a trace into tuples. Raises ValueError, IndexError or TypeError for a list that is no trace
    (damaged on disk)."""
    found: list[Entry] = []
    end = len(trace)
    while end:
        kind = trace[end - 1]
        begin = end - FIELDS[kind]
        if begin < 0:
            raise ValueError(f"an entry of kind {kind} has {FIELDS[kind]} items, {end} are left")
        found.append((kind, *trace[begin : end - 1]))
        end = begin
    found.reverse()
    return found


def trace_of(entries: Sequence[Entry]) -> Trace:
    """Returns the trace that holds these entries."""
    return [item for entry in entries for item in (*entry[1:], entry[0])]


def entry_count(trace: Sequence[Any]) -> int:
    """Returns about how many entries a trace has: those of a usual step have four items on average. A fetch, with which
    a trace begins where there is a loader, counts twice, since it costs twice."""
    return len(trace) // 4 + (trace[4:5] == [DATA])


def shorten(trace: Trace) -> None:
    """Drops the older half of a trace that no step ends."""
    entries = entries_of(trace)
    trace[:] = trace_of(entries[len(entries) // 2 :])


def events_of(entries: Sequence[Entry]) -> list[Any]:
    """Returns the events of the device clock in a trace; those of its last entry come last."""
    events = [event for entry in entries if entry[0] in (PHASE, EVALUATED) for event in entry[4:] if event is not None]
    return events + [entry[2] for entry in entries if entry[0] not in _HOST_TIMED and entry[2] is not None]


def forward_mode(trace: Trace) -> bool | None:
    """Whether the forward pass that runs is a training's; None if none runs. Searches the newest entries only."""
    end = len(trace)
    for _ in range(NEWEST):
        kind = trace[end - 1] if end else OPTIMIZER_END
        if kind in (BACKWARD_END, OPTIMIZER_END) or (kind == RETURNED and trace[end - 2]):
            return None
        if kind == FORWARD:
            return bool(trace[end - 3])
        end -= FIELDS[kind]
    return None


def backward_passes(trace: Trace) -> Iterator[int]:
    """Yields where the backward passes since the last step of any optimizer begin in the trace, the newest first."""
    end = len(trace)
    while end and trace[end - 1] != OPTIMIZER_END:
        end -= FIELDS[kind := trace[end - 1]]
        if kind == BACKWARD:
            yield end


def backward_since(trace: Trace, at: int) -> bool:
    """True if a backward pass has ended since the trace had `at` items."""
    end = len(trace)
    while end > at:
        kind = trace[end - 1]
        if kind == BACKWARD_END:
            return True
        end -= FIELDS[kind]
    return False


def only_backward_since(trace: Trace, at: int) -> bool:
    """True if a backward pass has ended since the trace had `at` items, and no call of a model was seen since."""
    end, ended = len(trace), False
    while end > at:
        kind = trace[end - 1]
        if kind in (FORWARD, AUXILIARY):
            return False
        ended = ended or kind == BACKWARD_END
        end -= FIELDS[kind]
    return ended


def only_optimizers(trace: Trace) -> bool:
    """True if the trace holds only optimizers' steps and their clearing of gradients."""
    return all(entry[0] in (OPTIMIZER, OPTIMIZER_END, CLEARED) for entry in entries_of(trace))


def forward_passes(entries: Sequence[Entry]) -> int:
    """Returns the number of calls of the root model, or else of batches: it distinguishes accumulation
    from several losses."""
    return sum(entry[0] == FORWARD for entry in entries) or sum(
        entry[0] == DATA and entry[4] is not None for entry in entries
    )


class EvalTrace(list[Any]):
    """A trace that may hold an evaluation. The type marks it, so that traces of ordinary steps are not searched."""


class RolloutTrace(EvalTrace):
    """A trace in which an environment was stepped: an evaluation without a loader is then a rollout."""
