"""What a step minimized: what its backward passes started from, of which some are another optimizer's or were discarded."""

from __future__ import annotations

import math
from collections.abc import Sequence

from perfagent.device import Reading, value_of
from perfagent.step.trace import BACKWARD, BESIDE, CLEARED, DATA, EVALUATED, FORWARD, OPTIMIZER_END, RETURNED, Entry, Root

__all__ = ["roots_of", "with_divisors"]

def roots_of(entries: Sequence[Entry]) -> list[Root]:
    """What the step minimized: the roots since another optimizer stepped, or those before where there are none since.

    Of passes between which the gradients were cleared the first are at the weights as they were (sharpness-aware minimization),
    unless another batch was fetched: then the loop discarded the first ones (a window that the end of an epoch cut short). Where
    no model was called in between, all are of one forward pass, and the loop combines what each of its losses gives (gradient
    surgery).
    """
    roots: list[Root] = []
    earlier: list[Root] = []
    first: list[Root] = []
    before = None
    calls = calls_before = 0  # of models; until the gradients were cleared
    fetched = False  # since the last of the passes
    carried_on = _carried_on(entries)
    for place, entry in enumerate(entries):
        kind = entry[0]
        if kind == BACKWARD and entry[3] is not None and place not in carried_on:
            if first and not roots and calls and calls == calls_before:
                first, roots = [], first
            roots.append(Root(entry[3], entry[4]))
            fetched = False
        elif kind in (FORWARD, BESIDE):
            calls += 1
        elif kind == CLEARED and roots and before not in (FORWARD, RETURNED):
            first, roots, calls_before = first or roots, [], calls
            if fetched:
                first, roots = _discarded(first)
        elif kind == DATA and entry[4] is not None:
            fetched = True
            if first and not roots:
                first, roots = _discarded(first)
        elif kind == OPTIMIZER_END and (first or roots):
            earlier, first, roots = first or roots, [], []
        before = kind
    return first or roots or earlier


def with_divisors(entries: list[Entry]) -> list[Entry]:
    """The entries with what losses were divided by, which was on its way from a device; once, when ready."""
    for place, entry in enumerate(entries):
        if entry[0] == BACKWARD and isinstance(entry[4], Reading):
            entries[place] = (*entry[:4], value_of(entry[4]))
    return entries


def _carried_on(entries: Sequence[Entry]) -> set[int]:
    """Places of the backward passes that have no loss of their own but carry on the gradients of another one, which is of
    representations that were computed without a graph (cached gradients). No call with gradients led to that one, only some
    without; and as many passes follow it, of one call each."""
    found: set[int] = set()
    group: list[int] = []
    left = ungraded = calls = 0
    for place, entry in enumerate(entries):
        kind = entry[0]
        if kind == EVALUATED:
            ungraded += 1
        elif kind in (FORWARD, BESIDE):
            calls += 1
        elif kind == BACKWARD and entry[3] is not None:
            if ungraded > 1 and not calls:
                group, left = [], ungraded
            elif left and calls == 1 and not ungraded:
                group.append(place)
                left -= 1
                if not left:
                    found.update(group)
            else:
                left = 0
            ungraded = calls = 0
        elif kind == OPTIMIZER_END:
            left = ungraded = calls = 0
    return found


def _discarded(roots: list[Root]) -> tuple[list[Root], list[Root]]:
    """What is left of losses that the loop discarded, as `roots_of` goes on: one that is no number is told in any case."""
    return [], [] if _are_finite(roots) else roots


def _are_finite(roots: Sequence[Root]) -> bool:
    """False where they are still on a device."""
    return all(isinstance(root.value, float) and math.isfinite(root.value) for root in roots)
