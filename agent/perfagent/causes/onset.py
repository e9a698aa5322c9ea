"""Dates a NaN to the step in which it began. Pure: what an inquiry found, and the rows of the steps before, in; steps out.

A bad update can make the loss NaN some steps later, and gradients are measured only in some steps. A finite loss proves
that the weights of its step were good, a finite gradient that its update was good, and NaN in the optimizer's averages that
a gradient was bad, and not that the script wrote NaN into a weight. If several steps remain, the first and the last of them
are reported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from perfagent.wire.evidence import Began, NonfiniteEvidence

__all__ = ["onset", "reads_some_rows"]

_SPARSE = ("Embedding", "EmbeddingBag")
"""Layers of which a batch reads only some rows: a finite loss does not show that the others are good."""


def onset(
    found: NonfiniteEvidence,
    history: Sequence[Mapping[str, float]],
    *,
    first_step: int,
    watched: bool,
    sparse: bool = False,
) -> Began | None:
    """The steps between which it began; None where nothing can be said. by: "gradient" (measured: it was), "weights"
    (written by something else), or absent where that is not known.

    history: rows of the steps up to the bad one, as far as they were read. watched: every loss was looked at before its
    backward pass, so that the one of the step before was finite. sparse: see `reads_some_rows`.
    """
    step = found["step"]
    before, after = found.get("parameters_before"), found.get("parameters_after")
    at = {int(entry["step"]): entry for entry in history}
    if _is_finite(at.get(step, {}).get("loss")):
        return {"first": step, "last": step, "by": "gradient", "measured": True}
    if before is not None and not before["nonfinite"]:
        return {"first": step, "last": step}
    if before is None and after is not None and not after["nonfinite"] and found.get("looked_after_step", -1) >= step:
        return {"first": step, "last": step}
    if step <= first_step:
        return None  # loaded so, or made so by this step: nothing came before
    good_loss = max(
        (number for number, entry in at.items() if number < step and _is_finite(entry.get("loss"))), default=0
    )
    if watched:
        good_loss = max(good_loss, step - 1)
    earliest = max(first_step, 0 if sparse else good_loss)
    states = {number: _gradient(entry, at.get(number - 1)) for number, entry in at.items() if number < step}
    bad = min((number for number, state in states.items() if state == "bad" and number >= earliest), default=None)
    if bad is not None:
        return {"first": bad, "last": bad, "by": "gradient", "measured": True}
    good = max((number for number, state in states.items() if state == "good"), default=0)
    moments = found.get("optimizer_state")
    if before is None:
        return {"first": min(step, max(earliest, good + 1)), "last": step}
    if good == step - 1 or (moments is not None and not moments["nonfinite"]):
        return {"first": min(step - 1, max(earliest, good)), "last": step, "by": "weights"}
    began: Began = {"first": min(step - 1, max(earliest, good + 1)), "last": step - 1}
    return {**began, "by": "gradient"} if moments is not None else began


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _gradient(entry: Mapping[str, float], before: Mapping[str, float] | None) -> str:
    """Whether the gradients of a step that was taken were "good" or "bad"; "" where they were not measured."""
    if before is not None and entry.get("amp/skipped", 0.0) > before.get("amp/skipped", math.inf):
        return "good"  # nothing was updated
    norm = entry.get("grad/norm")
    if entry.get("grad/nonfinite") or (norm is not None and not math.isfinite(norm)):
        return "bad"
    return "good" if norm is not None or "grad/nonfinite" in entry else ""


def reads_some_rows(bad: Sequence[str], classes: Mapping[str, str]) -> bool:
    """Whether a finite loss does not show that these parameters were good. classes: of modules, by name."""
    return bool(bad) and all(
        classes.get(name.rpartition(".")[0]) in _SPARSE or "expert" in name.lower() for name in bad
    )
