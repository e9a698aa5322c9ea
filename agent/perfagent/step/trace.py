"""What happened in a step, as the training noted it.

A trace is one flat list, since what is in it is looked at on another processor: entry by entry the fields and then the
kind, so that the last item tells what happened last. What it may hold, in the order in which it happened (time in ns; event: of
the device clock, or None):

    began, ended, loader, size, DATA        a wait for data; size is None when it only started workers (loader 0) or ended an
                                            epoch
    began, event, training, size, FORWARD   the root model is called with gradients on; size where there is no loader
    ended, event, holds_loss, RETURNED      it returned
    began, event, value, divided, BACKWARD  the outermost backward call; value: of its root, where it starts from; None
                                            where that is no loss; divided: the user scaled it: by what a division made it,
                                            True where a product did or that is not known, False where neither did
    ended, event, BACKWARD_END
    began, event, OPTIMIZER                 the optimizer's step, or GradScaler.step around it
    ended, event, OPTIMIZER_END
    began, ended, name, event, event, PHASE a part of the loop that the user named or that was recognised; the events at its
                                            ends where the device's time is meant, else None twice. UNNAMED: the closure of an
                                            optimizer's step, in which no call of the model was seen
    began, ended, CLEARED                   zero_grad between the model's call and backward; or of the gradients of the optimizer
                                            that counts, after a backward pass
    began, ended, training, event, event, EVALUATED     a call of a model without gradients (evaluation.py)
    began, event, ended, BESIDE             another model was called with gradients, while the root's pass did not run (beside.py)

`entries_of` makes tuples of them, the kind first: what those read that are not in a hurry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from perfagent.device import Value

__all__ = [
    "BACKWARD",
    "BACKWARD_END",
    "BESIDE",
    "CLEARED",
    "DATA",
    "EVALUATED",
    "FIELDS",
    "FORWARD",
    "MOST_ITEMS",
    "NEWEST",
    "OPTIMIZER",
    "OPTIMIZER_END",
    "PHASE",
    "RETURNED",
    "UNNAMED",
    "Divided",
    "Entry",
    "Root",
    "Trace",
    "backward_since",
    "begins_entry",
    "entries_of",
    "entry_count",
    "events_of",
    "forward_passes",
    "forward_runs",
    "only_backward_since",
    "only_optimizers",
    "shorten",
    "trace_of",
]  # fmt: skip

DATA, FORWARD, RETURNED, BACKWARD, BACKWARD_END, OPTIMIZER, OPTIMIZER_END, PHASE, CLEARED, EVALUATED, BESIDE = range(11)
FIELDS = (5, 5, 4, 5, 3, 3, 3, 6, 3, 6, 4)
"""Items of an entry in a trace, by its kind."""
_HOST_TIMED = frozenset((CLEARED, DATA, EVALUATED, PHASE))
UNNAMED = ""
"""What is no phase, and no part of the optimizer's."""
MOST_ITEMS = 400_000
"""Of a trace that no step ends."""
Trace = list[Any]
Entry = tuple[Any, ...]
Divided = Value | bool
"""What a loss was divided by before its backward pass; see BACKWARD."""
NEWEST = 64
"""As many entries are looked through where a step that no optimizer ends may have any number."""


class Root(NamedTuple):
    """The tensor that a backward pass starts from."""

    value: Value | None
    divided: Divided


def entries_of(trace: Sequence[Any]) -> list[Entry]:
    """Raises ValueError, IndexError or TypeError for what is no trace (damaged on the disk)."""
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
    """The trace that holds these."""
    return [item for entry in entries for item in (*entry[1:], entry[0])]


def entry_count(trace: Sequence[Any]) -> int:
    """About how many entries a trace has: those of a usual step have four items on average. A fetch, which is what a trace begins
    with where there is a loader, counts twice, as it costs."""
    return len(trace) // 4 + (trace[4:5] == [DATA])


def shorten(trace: Trace) -> None:
    """Drops the older half of a trace that no step ends."""
    entries = entries_of(trace)
    trace[:] = trace_of(entries[len(entries) // 2 :])


def events_of(entries: Sequence[Entry]) -> list[Any]:
    """The events of the device clock in a trace, those of its last entry last."""
    events = [event for entry in entries if entry[0] in (PHASE, EVALUATED) for event in entry[4:] if event is not None]
    return events + [entry[2] for entry in entries if entry[0] not in _HOST_TIMED and entry[2] is not None]


def forward_runs(trace: Trace) -> bool:
    """Whether the root was called and its forward pass is not over: looked for in the newest entries only."""
    end = len(trace)
    for _ in range(NEWEST):
        kind = trace[end - 1] if end else OPTIMIZER_END
        if kind in (BACKWARD_END, OPTIMIZER_END) or (kind == RETURNED and trace[end - 2]):
            return False
        if kind == FORWARD:
            return True
        end -= FIELDS[kind]
    return False


def backward_since(trace: Trace, at: int) -> bool:
    """Whether a backward pass has ended since the trace was that long."""
    end = len(trace)
    while end > at:
        kind = trace[end - 1]
        if kind == BACKWARD_END:
            return True
        end -= FIELDS[kind]
    return False


def only_backward_since(trace: Trace, at: int) -> bool:
    """Whether one has ended since then, and no call of a model was seen."""
    end, ended = len(trace), False
    while end > at:
        kind = trace[end - 1]
        if kind in (FORWARD, BESIDE):
            return False
        ended = ended or kind == BACKWARD_END
        end -= FIELDS[kind]
    return ended


def begins_entry(trace: Trace, at: int) -> bool:
    """Whether an entry of the trace begins there, or the next one will."""
    end = len(trace)
    while end > at:
        end -= FIELDS[trace[end - 1]]
    return end == at


def only_optimizers(trace: Trace) -> bool:
    """Whether nothing but optimizers' steps, and what they clear, is in it."""
    return all(entry[0] in (OPTIMIZER, OPTIMIZER_END, CLEARED) for entry in entries_of(trace))


def forward_passes(entries: Sequence[Entry]) -> int:
    """How many calls of the root model, or else batches, a trace holds: what tells accumulation from several losses."""
    return sum(entry[0] == FORWARD for entry in entries) or sum(entry[0] == DATA and entry[4] is not None for entry in entries)
