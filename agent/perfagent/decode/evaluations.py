"""Recognizes an evaluation by its loader alone, where no call of a model is seen.

A model that no step calls (an average of the weights) is not watched. Its evaluation begins a loader between two
steps, reads it to its end and uses the batches; training then continues with other batches. A loop that only
collects batches spends its time in the loader; and if training continues without fetching from another loader, it
trained on those batches.

Every pass over a loader is not enough: `list(loader)`, losses summed over all batches, chunks that are trained on later
and episodes are no evaluations. A search for uncalled models whenever a loader begins, by torch's hooks for all
modules, was tried: those hooks stay on until the next step, so that `torch.export` after a last evaluation raised,
dynamo compiled nothing, and a loop over 400 layers by hand took 0.9 s once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from perfagent.step.trace import BACKWARD, BESIDE, DATA, EVALUATED, FORWARD, OPTIMIZER, PHASE, Entry

__all__ = ["unseen_evaluations"]

_OWN_SHARE = 0.1
"""Least share of the time that the loop spends outside the loader, using the batches: for `list(loader)`
it is 1 to 2 %."""
_TRAINS = (FORWARD, EVALUATED, BESIDE, BACKWARD, OPTIMIZER)


def unseen_evaluations(entries: Sequence[Entry]) -> list[range]:
    """Returns the places of the entries of each such evaluation, in order."""
    found = []
    end, is_trained_on = len(entries), False
    for places in reversed([places for places in _whole_passes(entries) if _uses_batches(entries, places)]):
        is_trained_on = _trains(entries, range(places.stop, end), otherwise=is_trained_on)
        end = places.start
        if not is_trained_on:
            found.append(places)
    return found[::-1]


def _whole_passes(entries: Sequence[Entry]) -> Iterator[range]:
    """Yields the places of loaders that were begun and read to their end, with nothing else in between."""
    begin, fed = -1, 0  # fed: the loader of the fetch before
    for place, entry in enumerate(entries):
        if entry[0] == PHASE and entry[3] == "compile":
            continue  # by the model that is evaluated, at its first batch
        loader, size = entry[3:] if entry[0] == DATA else (None, None)
        if loader is None:
            begin = -1
        elif not loader:
            begin = place
        elif begin < 0:
            continue
        elif fed and fed != loader:
            begin = -1
        elif size is None:
            if fed:
                yield range(begin, place + 1)
            begin = -1
        fed = loader or 0


def _uses_batches(entries: Sequence[Entry], places: range) -> bool:
    waited = sum(entries[place][2] - entries[place][1] for place in places if entries[place][0] == DATA)
    took = entries[places[-1]][2] - entries[places[0]][1]
    return bool(took - waited >= _OWN_SHARE * took)


def _trains(entries: Sequence[Entry], behind: range, *, otherwise: bool) -> bool:
    """True if training continues without fetching from another loader: with kept batches, or with the last batch of a
    loop that prefetches one. otherwise: the answer if the entries do not show it."""
    for place in behind:
        kind = entries[place][0]
        if kind in _TRAINS or (kind == DATA and entries[place][4] is not None):
            return bool(kind != DATA)
    return otherwise
