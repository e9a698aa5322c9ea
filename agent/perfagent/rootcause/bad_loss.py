"""Finds the loss that is NaN or infinite among the variables of the functions that a training left, or is in."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

from perfagent.rootcause.stack_variables import variables_of

__all__ = ["bad_loss_in", "calling", "left_by"]

MOST_FRAMES = 20


def left_by(trace: TracebackType | None) -> list[FrameType]:
    """The functions that an exception left, the innermost first."""
    frames: list[FrameType] = []
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    return frames[::-1]


def calling(frame: FrameType | None) -> list[FrameType]:
    """The functions that are being executed, the innermost first."""
    frames: list[FrameType] = []
    while frame is not None and len(frames) < MOST_FRAMES:
        frames.append(frame)
        frame = frame.f_back
    return frames


def bad_loss_in(frames: Sequence[FrameType]) -> tuple[Any, FrameType | None]:
    """A loss on the CPU that is no number, among the variables of some functions: a tensor of one value with a graph
    behind it. And the function that it was found in."""
    torch: Any = sys.modules.get("torch")
    for frame in frames[:MOST_FRAMES] if torch is not None else ():
        with variables_of(frame) as variables:
            scalars = [
                value for _, value in variables
                if type(value) is torch.Tensor and value.numel() == 1 and value.is_cpu and value.grad_fn is not None
            ]  # fmt: skip
        bad = next((value for value in scalars if not bool(value.detach().isfinite().all())), None)
        if bad is not None:
            return bad, frame
    return None, None
