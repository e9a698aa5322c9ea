"""Looks at the numbers of a batch for the mistakes that loaders make: labels that the loss leaves out, inputs that are
the same in every row, data sorted by class, inputs that nobody normalized.

Tensors are known by name in mappings; of a pair, the first is the input and the second has the labels.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from perfagent.signals.batch_padding import TOKENS, count_zeros, some_rows
from perfagent.signals.batch_tensors import Path, Place, reached

__all__ = ["IGNORED", "LABELS", "LEAST_ROWS", "LOSS_MASKS", "BatchValues", "Summary"]

LABELS = ("labels", "label", "targets", "target", "y")
LOSS_MASKS = ("loss_mask", "label_mask", "assistant_masks")
IGNORED = -100
"""torch's ignore_index."""
LEAST_ROWS = 4
"""In smaller batches it is no wonder if all rows, or their classes, are alike."""
_MOST_NUMBERS = 2**12
"""Most numbers of the input of which mean and spread are taken, and most of a row that is compared at first."""
_MOST_ROWS = 2**10


class Summary:
    """What some batches held, added up.

    padding, places: padded places of sequences, and all. ignored, labels: labels that the loss leaves out, and all.
    inputs, constant: batches with inputs, and those in which all rows are the same. classified, pure: batches with one
    class a row, and those with one class in all rows. mean, spread: of the newest input of floats; None if there was
    none.
    """

    __slots__ = ("classified", "constant", "ignored", "inputs", "labels", "mean", "padding", "places", "pure", "spread")

    def __init__(self) -> None:
        self.padding = self.places = self.ignored = self.labels = 0
        self.inputs = self.constant = self.classified = self.pure = 0
        self.mean: float | None = None
        self.spread: float | None = None

    def add(self, other: Summary) -> None:
        for name in ("padding", "places", "ignored", "labels", "inputs", "constant", "classified", "pure"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.mean is not None:
            self.mean, self.spread = other.mean, other.spread

    def series(self, *, sorted_by_class: bool) -> dict[str, float]:
        """sorted_by_class: there were batches of one class and batches of another."""
        values: dict[str, float] = {}
        if self.places:
            values["batch/padding_pct"] = 100 * self.padding / self.places
        if self.labels:
            values["batch/ignored_pct"] = 100 * self.ignored / self.labels
        if self.inputs:
            values["batch/constant_pct"] = 100 * self.constant / self.inputs
        if self.classified and sorted_by_class:
            values["batch/one_class_pct"] = 100 * self.pure / self.classified
        if self.mean is not None and self.spread is not None:
            values["batch/input_mean"], values["batch/input_std"] = self.mean, self.spread
        return values


class BatchValues:
    """How to look at batches with tensors in these places. classes: of batches in which all rows had the same one."""

    __slots__ = ("_input", "_labels", "_loss_mask", "_only_masked", "classes")

    def __init__(self, places: Sequence[Place], classes: set[float]) -> None:
        self.classes = classes
        labels = _labels(places)
        masks = [place for place in places if place.name in LOSS_MASKS and place.tensor.dim() == 2]
        self._labels: Path | None = None if labels is None else labels.path
        self._loss_mask: Path | None = masks[0].path if masks else None
        inputs = [place for place in places if place is not labels and "mask" not in place.name]
        named = [place for place in inputs if place.name in TOKENS]
        biggest = max(inputs, key=lambda place: int(place.tensor.numel()), default=None)
        chosen = named[0] if named else biggest
        self._input: Path | None = None if chosen is None else chosen.path

    def look(self, batch: Any, summary: Summary) -> None:
        """Adds what a batch holds. Raises LookupError or TypeError for one of another structure."""
        if self._loss_mask is not None:
            ignored, labels = count_zeros(reached(batch, self._loss_mask))
            summary.ignored += ignored
            summary.labels += labels
        if self._labels is not None:
            self._look_at_labels(reached(batch, self._labels), summary)
        if self._input is not None:
            _look_at_input(reached(batch, self._input), summary)

    def _look_at_labels(self, labels: Any, summary: Summary) -> None:
        torch: Any = sys.modules["torch"]
        if self._loss_mask is None:
            counted, places = count_zeros(some_rows(labels.reshape(len(labels), -1)) == IGNORED)
            summary.ignored += places - counted
            summary.labels += places
        if labels.dim() == 1 and len(labels) >= LEAST_ROWS:
            summary.classified += 1
            first = labels[0]
            if bool(torch.equal(labels, first.expand_as(labels))):
                summary.pure += 1
                if len(self.classes) < LEAST_ROWS:
                    self.classes.add(float(first))


def _look_at_input(values: Any, summary: Summary) -> None:
    torch: Any = sys.modules["torch"]
    if not values.numel() or not values.is_contiguous() or values.is_complex():
        return
    values = values.detach()
    summary.inputs += 1
    flat = values.view(-1)
    few = flat[:: flat.numel() // _MOST_NUMBERS + 1]
    if values.is_floating_point() and values.element_size() > 1:
        spread, mean = torch.std_mean(few.float(), correction=0)
        summary.mean, summary.spread = float(mean), float(spread)
    rows = values.view(len(values), -1) if len(values) >= LEAST_ROWS else flat.view(-1, 1)
    some = rows[:, :: rows.shape[1] // _MOST_NUMBERS + 1 | 1]  # an odd number: not the same column of a picture
    if len(rows) < LEAST_ROWS or not torch.equal(some[0], some[-1]):
        return  # nearly every batch ends here
    some = some[:: len(rows) // _MOST_ROWS + 1]
    # Sparse rows may differ where nobody looked: all of them are compared before they count.
    summary.constant += bool(
        torch.equal(some, some[:1].expand_as(some)) and torch.equal(rows, rows[:1].expand_as(rows))
    )


def _labels(places: Sequence[Place]) -> Place | None:
    torch: Any = sys.modules["torch"]
    integers = [place for place in places if place.tensor.dtype in (torch.int64, torch.int32)]
    named = [place for place in integers if place.name.lower() in LABELS]
    paired = [place for place in integers if not place.name and place.position > 0]
    return next(iter((*named, *paired)), None)
