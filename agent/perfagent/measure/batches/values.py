"""Looks at the numbers of a batch for the mistakes that loaders make: labels that the loss leaves out, inputs that are
the same in every row, data sorted by class, inputs that nobody normalized.

Tensors are known by name in mappings; of a pair, the first is the input and the second has the labels.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from perfagent.measure.batches.padding import real_tokens_of, some_rows
from perfagent.measure.batches.places import TOKENS, Path, Place, reached

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["IGNORED", "BatchValues", "Summary", "counted", "is_constant", "labels_in", "loss_mask_in", "only_class"]

LABELS = ("labels", "label", "targets", "target", "y")
LOSS_MASKS = ("loss_mask", "label_mask", "assistant_masks")
IGNORED = -100
"""torch's ignore_index."""
_LEAST_ROWS = 4
"""In smaller batches it is no wonder if all rows, or their classes, are alike."""
_MOST_COUNTED = 2**17
"""Most numbers of a mask, of labels or of tokens that are counted."""
_MOST_NUMBERS = 2**12
"""Mean and spread use at most so many numbers of the input. The first comparison of two rows uses as many of a row."""
_MOST_ROWS = 2**10
_SHARES = {
    "batch/padding_pct": ("padding", "places"),
    "batch/ignored_pct": ("ignored", "labels"),
    "batch/constant_pct": ("constant", "inputs"),
    "batch/one_class_pct": ("pure", "classified"),
}


class Summary(Counter[str]):
    """What some batches held, added up.

    padding, places: padded places of sequences, and all. ignored, labels: labels that the loss leaves out, and all.
    inputs, constant: batches with inputs, and those in which all rows are the same. classified, pure: batches with one
    class a row, and those with one class in all rows. mean_and_spread: of the newest input of floats.
    """

    mean_and_spread: tuple[float, float] | None = None

    def take(self, other: Summary) -> None:
        self.update(other)
        self.mean_and_spread = other.mean_and_spread or self.mean_and_spread

    def series(self) -> dict[str, float]:
        values = {name: 100 * self[part] / self[whole] for name, (part, whole) in _SHARES.items() if self[whole]}
        if self.mean_and_spread is not None:
            values["batch/input_mean"], values["batch/input_std"] = self.mean_and_spread
        return values


class BatchValues:
    """How to look at batches with tensors in these places. pad_id: of the model. classes: of batches in which all rows
    had the same one."""

    def __init__(self, places: Sequence[Place], pad_id: Callable[[], int | None], classes: set[float]) -> None:
        labels = labels_in(places)
        inputs = [place for place in places if place is not labels and "mask" not in place.name]
        named = [place for place in inputs if place.name in TOKENS]
        self._input = _path(max(named[:1] or inputs, key=lambda place: place.tensor.numel(), default=None))
        self._labels, self._loss_mask = _path(labels), _path(loss_mask_in(places))
        self._real, self._classes = real_tokens_of(places, pad_id), classes

    def inspect(self, batch: object, summary: Summary) -> None:
        """Adds what a batch holds. Raises LookupError or TypeError for one of another structure."""
        labels = None if self._labels is None else reached(batch, self._labels)
        if self._loss_mask is not None:
            _add_labels(some_rows(reached(batch, self._loss_mask), _MOST_COUNTED) != 0, summary)
        elif labels is not None:
            _add_labels(counted(some_rows(labels.reshape(len(labels), -1), _MOST_COUNTED)), summary)
        if labels is not None and labels.dim() == 1 and len(labels) >= _LEAST_ROWS:
            only = only_class(labels)
            summary["classified"] += 1
            summary["pure"] += only is not None
            if only is not None and len(self._classes) < 2:
                self._classes.add(only)
        if self._input is not None:
            _add_input(reached(batch, self._input).detach(), summary)
        if self._real is not None and (real := self._real(batch, _MOST_COUNTED)) is not None:
            lengths, width = real
            summary["places"] += len(lengths) * width
            summary["padding"] += len(lengths) * width - int(lengths.sum())


def labels_in(places: Sequence[Place]) -> Place | None:
    torch = sys.modules["torch"]
    integers = [place for place in places if place.tensor.dtype in (torch.int64, torch.int32)]
    named = [place for place in integers if place.name.lower() in LABELS]
    return next(iter(named or [place for place in integers if not place.name and place.position > 0]), None)


def loss_mask_in(places: Sequence[Place]) -> Place | None:
    return next((place for place in places if place.name in LOSS_MASKS and place.tensor.dim() == 2), None)


def counted(labels: Tensor, loss_mask: Tensor | None = None, ignored: int = IGNORED) -> Tensor:
    """Returns which labels the loss counts."""
    counts = labels != ignored
    return counts & (loss_mask != 0) if loss_mask is not None and loss_mask.shape == labels.shape else counts


def only_class(labels: Tensor) -> float | None:
    """Returns the class that all rows have; None if there are several."""
    return float(labels[0]) if sys.modules["torch"].equal(labels, labels[0].expand_as(labels)) else None


def is_constant(values: Tensor) -> bool:
    """Whether all rows are the same; of fewer than four rows, all numbers. Nearly every batch shows at once that they
    are not. values: contiguous, with at least one dimension and one number."""
    equal = sys.modules["torch"].equal
    rows = values.reshape(len(values), -1) if len(values) >= _LEAST_ROWS else values.reshape(-1, 1)
    some = rows[:, :: rows.shape[1] // _MOST_NUMBERS + 1 | 1]  # an odd number: not the same column of a picture
    if len(rows) < _LEAST_ROWS or not equal(some[0], some[-1]):
        return False
    some = some[:: len(rows) // _MOST_ROWS + 1]
    # Sparse rows may differ where nobody looked: all of them are compared before they count.
    return bool(equal(some, some[:1].expand_as(some)) and equal(rows, rows[:1].expand_as(rows)))


def _add_input(values: Tensor, summary: Summary) -> None:
    if not values.numel() or not values.is_contiguous() or values.is_complex():
        return
    summary["inputs"] += 1
    summary["constant"] += is_constant(values)
    if values.is_floating_point() and values.element_size() > 1:
        few = values.view(-1)[:: values.numel() // _MOST_NUMBERS + 1]
        spread, mean = sys.modules["torch"].std_mean(few.float(), correction=0)
        summary.mean_and_spread = float(mean), float(spread)


def _add_labels(counts: Tensor, summary: Summary) -> None:
    summary["labels"] += counts.numel()
    summary["ignored"] += counts.numel() - int(counts.count_nonzero())


def _path(place: Place | None) -> Path | None:
    return None if place is None else place.path
