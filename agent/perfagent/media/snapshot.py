"""Copies of arrays and tensors, taken on the training thread: what a script changes later is not in them.

A tensor on a device is copied there and fetched by the sender's thread once the copy is done, so that nobody waits.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from perfagent.device import duplicate, fetched, is_captured, is_tensor, reached

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    Array = NDArray[Any]
    View = Array | torch.Tensor

__all__ = ["RefusedError", "Snapshot", "numpy", "viewed"]


class RefusedError(ValueError):
    """What was given cannot be logged. The message says what is allowed."""


class Snapshot:
    """A copy of what a view from `viewed` shows. nbytes: what it holds in memory."""

    __slots__ = ("_copy", "_event", "nbytes")

    def __init__(self, view: View) -> None:
        self.nbytes = int(view.nbytes)
        self._copy: View
        if is_tensor(view):
            self._copy, self._event = duplicate(view)
        else:
            self._copy, self._event = numpy().array(view, order="C", copy=True), None

    def ready(self) -> bool:
        """Never blocks. Of a lost device it is, whose error `array` will meet."""
        try:
            return reached(self._event)
        except RuntimeError:
            return True

    def array(self) -> Array:
        """In host memory. On the sender's thread, once it is ready."""
        if is_tensor(self._copy):
            copy = fetched(self._copy)
            return (copy.float() if copy.is_floating_point() and copy.itemsize < 4 else copy).numpy()
        return numpy().asarray(self._copy)  # type: ignore[no-any-return]


def viewed(data: object) -> View:
    """A tensor without its graph, or what NumPy makes of anything else; nothing is copied yet. Raises RefusedError for
    what holds no real numbers."""
    if not is_tensor(data):
        array: Array = numpy().asarray(data)
        if array.dtype.kind not in "biuf":
            raise RefusedError(f"takes real numbers, not {type(data).__name__} of {array.dtype}")
        return array
    tensor = data.detach()
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if tensor.is_complex() or tensor.is_sparse or tensor.is_quantized or tensor.is_meta:
        raise RefusedError(f"takes a dense tensor of real numbers, not {tensor.dtype} on {tensor.device}")
    if is_captured(tensor):
        raise RefusedError("takes no tensor while a CUDA graph is captured: log it outside of the graph")
    return tensor


def numpy() -> Any:
    """NumPy, which a training with torch has nearly always. Raises RefusedError where it is not installed."""
    try:
        return importlib.import_module("numpy")
    except ImportError as error:
        raise RefusedError("needs NumPy: pip install numpy") from error
