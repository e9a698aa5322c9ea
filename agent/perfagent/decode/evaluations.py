"""An evaluation of which no call is seen, told by its loader alone.

A model that no step calls (an average of the weights) is not watched. Its evaluation begins a loader between two steps and reads
it to its end, does something with the batches, and the training goes on with others. What only collects batches spends its time
in the loader, and where the training goes on without asking another loader, the batches were what was trained on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from perfagent.step.trace import BACKWARD, BESIDE, DATA, EVALUATED, FORWARD, OPTIMIZER, Entry, Trace

__all__ = ["read_on", "unseen_evaluations"]

_OWN_SHARE = 0.1
"""What the loop does with the batches takes so much of the time at least: of `list(loader)` it is 1 to 2 %."""
_TRAINS = (FORWARD, EVALUATED, BESIDE, BACKWARD, OPTIMIZER)


def read_on(trace: Trace, loader: int) -> bool:
    """Whether nothing was seen since this loader gave a batch."""
    return trace[-1:] == [DATA] and trace[-3] == loader and trace[-2] is not None


def unseen_evaluations(entries: Sequence[Entry]) -> list[range]:
    """Places of the entries of each, in order."""
    found = []
    end, is_trained_on = len(entries), False
    for places in reversed([places for places in _whole_passes(entries) if _uses_batches(entries, places)]):
        is_trained_on = _trains(entries, range(places.stop, end), otherwise=is_trained_on)
        end = places.start
        if not is_trained_on:
            found.append(places)
    return found[::-1]


def _whole_passes(entries: Sequence[Entry]) -> Iterator[range]:
    """Loaders that were begun and read to their end, with nothing else in between."""
    begin = -1
    for place, entry in enumerate(entries):
        loader, size = entry[3:] if entry[0] == DATA else (None, None)
        if loader is None:
            begin = -1
        elif not loader:
            begin = place
        elif begin < 0:
            continue
        elif place > begin + 1 and entries[place - 1][3] != loader:
            begin = -1
        elif size is None:
            if begin < place - 1:
                yield range(begin, place + 1)
            begin = -1


def _uses_batches(entries: Sequence[Entry], places: range) -> bool:
    waited = sum(entries[place][2] - entries[place][1] for place in places)
    took = entries[places[-1]][2] - entries[places[0]][1]
    return bool(took - waited >= _OWN_SHARE * took)


def _trains(entries: Sequence[Entry], behind: range, *, otherwise: bool) -> bool:
    """Whether the training goes on without asking another loader: with batches that were kept, or the last one of a loop that
    looks one ahead. otherwise: where that is not to be seen before the next such pass."""
    for place in behind:
        kind = entries[place][0]
        if kind in _TRAINS or (kind == DATA and entries[place][4] is not None):
            return bool(kind != DATA)
    return otherwise
