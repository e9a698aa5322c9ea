"""Looks at the variables of functions that are being executed, or that an exception left, without leaving a trace in
them: for the batch of a bad step, and for a loss that is NaN or infinite."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from traceback import walk_stack, walk_tb
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from perfagent.causes.batch import MOST_TENSORS
from perfagent.device import read_number_later, ready, value_of
from perfagent.measure.batches.places import places_in
from perfagent.measure.source_lines import short
from perfagent.wire.evidence import Reason

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["bad_loss_in", "in_callers", "variables_of"]

MOST_FRAMES = 20
WAIT_S = 0.25
_MOST_IN_ONE, _MOST_IN_ALL = 1_000, 20_000
"""Objects of one variable, and of all these functions."""
_OPTIMIZED = 0x1  # inspect.CO_OPTIMIZED: the variables are no dict
_READS_ITS_OWN = frozenset(("locals", "vars", "dir", "eval", "exec"))


@contextlib.contextmanager
def variables_of(frame: FrameType) -> Iterator[list[tuple[str, Any]]]:
    """The local variables of a function that is being executed.

    Up to Python 3.12 a function's `f_locals` is a dict that stays with the frame and keeps every object in it alive
    until the function returns, so it is emptied again (as numexpr does). It is also what `locals()` hands out: a
    function that uses that name, or whose dict somebody holds, is left alone.
    """
    code = frame.f_code
    if not code.co_flags & _OPTIMIZED:
        yield list(frame.f_globals.items()) if frame.f_locals is frame.f_globals else []
        return
    if sys.version_info >= (3, 13):
        yield list(frame.f_locals.items())
        return
    if sys.gettrace() is not None or not _READS_ITS_OWN.isdisjoint(code.co_names):
        yield []
        return
    held = frame.f_locals
    try:
        yield list(held.items())
    finally:
        if sys.getrefcount(held) <= 3:  # the frame's, ours, and that of the call
            held.clear()


def bad_loss_in(where: TracebackType | FrameType) -> tuple[Tensor | None, FrameType | None]:
    """A loss that is no number, among the variables of the functions that an exception left, or of one that is being
    executed and its callers: a tensor of one value with a graph behind it. And the function that it was found in. The
    script has read it, so that its device is not waited for for long."""
    frames = [*walk_tb(where)][::-1] if isinstance(where, TracebackType) else walk_stack(where)
    torch: Any = sys.modules.get("torch")
    until = time.monotonic() + WAIT_S
    for frame, _ in islice(frames, MOST_FRAMES) if torch is not None else ():
        with variables_of(frame) as variables:
            scalars = [
                value for _, value in variables
                if type(value) is torch.Tensor and value.numel() == 1 and value.grad_fn is not None and not value.is_complex()
            ]  # fmt: skip
        for value in scalars:
            read = read_number_later(value.detach())
            while not ready(read) and time.monotonic() < until:
                time.sleep(0.001)
            if read is not None and ready(read) and not math.isfinite(value_of(read)):
                return value, frame
    return None, None


def in_callers(samples: int | None, frame: FrameType) -> tuple[Reason, list[tuple[str, Tensor]]]:
    """The batch among the local variables of whoever called backward: tensors without gradients whose first dimension
    is the batch's. Answers where it was found and the named tensors; ({}, []) where nothing looks like it."""
    objects, ours = iter(range(_MOST_IN_ALL)), ("torch.", "perfagent.", "perfagent_loop.")
    of_script = (one for one in walk_stack(frame) if not one[0].f_globals.get("__name__", "").startswith(ours))
    for caller, line in islice(of_script, MOST_FRAMES):
        with variables_of(caller) as variables:
            found = _batch_among(variables, samples, objects)
        if found:
            place = f"{short(caller.f_code.co_filename)}:{line}"
            return {"key": "local_variables", "function": caller.f_code.co_name, "line": place}, found
    return {}, []


def _batch_among(
    variables: Iterable[tuple[str, Any]], samples: int | None, left: Iterator[int]
) -> list[tuple[str, Tensor]]:
    """The tensors that may be the batch's. Variables that hold more of them than a batch has come last: a list of all
    batches that the loop iterates over is not the batch of this step."""
    found = [
        [one for one in places_in({name: value}, islice(left, _MOST_IN_ONE)) if _is_batch(one.tensor, samples)]
        for name, value in variables
        if not issubclass(type(value), sys.modules["torch"].nn.Module)
    ]
    found.sort(key=lambda places: len(places) > MOST_TENSORS)
    return [(place.label, place.tensor) for places in found for place in places][:MOST_TENSORS]


def _is_batch(tensor: Tensor, samples: int | None) -> bool:
    return not tensor.requires_grad and bool(tensor.dim()) and (samples is None or tensor.shape[0] == samples)
