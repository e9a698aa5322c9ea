"""Finds the loss that is NaN or infinite among the variables of the functions that a training left, or is in."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from itertools import islice
from traceback import walk_stack, walk_tb
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from perfagent.causes.stack_variables import variables_of
from perfagent.device import read_number_later, ready, value_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["bad_loss_in", "calling", "left_by"]

MOST_FRAMES = 20
WAIT_S = 0.25


def left_by(trace: TracebackType | None) -> list[FrameType]:
    """The functions that an exception left, the innermost first."""
    return [frame for frame, _ in walk_tb(trace)][::-1]


def calling(frame: FrameType) -> list[FrameType]:
    """The functions that are being executed, the innermost first."""
    return [one for one, _ in islice(walk_stack(frame), MOST_FRAMES)]


def bad_loss_in(frames: Sequence[FrameType]) -> tuple[Tensor | None, FrameType | None]:
    """A loss that is no number, among the variables of some functions: a tensor of one value with a graph behind it. And
    the function that it was found in. The script has read it, so that its device is not waited for for long."""
    torch: Any = sys.modules.get("torch")
    until = time.monotonic() + WAIT_S
    for frame in frames[:MOST_FRAMES] if torch is not None else ():
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
