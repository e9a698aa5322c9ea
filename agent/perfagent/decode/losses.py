"""Finds the loss that a step minimized: some of its backward passes belong to another optimizer or were discarded."""

from __future__ import annotations

import math
from collections.abc import Sequence

from perfagent.device import Reading, value_of
from perfagent.step import trace as kinds
from perfagent.step.trace import Entry, Loss

__all__ = ["roots_of", "with_divisors"]


def roots_of(entries: Sequence[Entry]) -> list[Loss]:
    """Returns the roots of the loss that the step minimized: those since another optimizer stepped, else those before.

    If gradients were cleared between passes, the first passes count, since they are at the original weights
    (sharpness-aware minimization). But if another batch was fetched in between, the loop discarded the first passes (an
    accumulation window that the end of an epoch cut short). If no model was called in between, all passes belong to one
    forward pass, and the loop combines the gradients of its losses (gradient surgery).
    """
    roots: list[Loss] = []
    earlier: list[Loss] = []
    first: list[Loss] = []
    before = None
    calls = calls_before = 0  # of models, now and when the gradients were cleared
    fetched = False  # since the last pass
    carried_on = _carried_on(entries)
    for place, entry in enumerate(entries):
        kind = entry[0]
        if kind == kinds.BACKWARD and entry[3] is not None and place not in carried_on:
            if first and not roots and calls and calls == calls_before:
                first, roots = [], first
            roots.append(Loss(entry[3], entry[4]))
            fetched = False
        elif kind in (kinds.FORWARD, kinds.AUXILIARY):
            calls += 1
        elif kind == kinds.CLEARED and roots and before not in (kinds.FORWARD, kinds.RETURNED):
            first, roots, calls_before = first or roots, [], calls
            if fetched:
                first, roots = _discarded(first)
        elif kind == kinds.DATA and entry[4] is not None:
            fetched = True
            if first and not roots:
                first, roots = _discarded(first)
        elif kind == kinds.OPTIMIZER_END and (first or roots):
            earlier, first, roots = first or roots, [], []
        before = kind
    return first or roots or earlier


def with_divisors(entries: list[Entry]) -> list[Entry]:
    """Replaces divisors of losses that are still on a device by their values. Called once, when ready."""
    for place, entry in enumerate(entries):
        if entry[0] == kinds.BACKWARD and isinstance(entry[4], Reading):
            entries[place] = (*entry[:4], value_of(entry[4]))
    return entries


def _carried_on(entries: Sequence[Entry]) -> set[int]:
    """Returns the places of backward passes without a loss of their own (cached gradients): they continue an earlier pass,
    before which there are only calls without gradients; as many passes follow it, with one call each."""
    found: set[int] = set()
    group: list[int] = []
    left = ungraded = calls = 0
    for place, entry in enumerate(entries):
        kind = entry[0]
        if kind == kinds.EVALUATED:
            ungraded += 1
        elif kind in (kinds.FORWARD, kinds.AUXILIARY):
            calls += 1
        elif kind == kinds.BACKWARD and entry[3] is not None:
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
        elif kind == kinds.OPTIMIZER_END:
            left = ungraded = calls = 0
    return found


def _discarded(roots: list[Loss]) -> tuple[list[Loss], list[Loss]]:
    """Returns what `roots_of` keeps of discarded losses: none, unless one is NaN or infinite."""
    return [], [] if _are_finite(roots) else roots


def _are_finite(roots: Sequence[Loss]) -> bool:
    """True if all values are finite numbers; False while they are on a device."""
    return all(isinstance(root.value, float) and math.isfinite(root.value) for root in roots)
