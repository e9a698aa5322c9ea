"""Since when the learning rate is zero, as two rules on the loss ask it."""

from __future__ import annotations

from typing import Any

from perfagent_server.rules.window import Window

__all__ = ["FRESH", "follow", "stays_zero"]

FRESH: dict[str, Any] = {"step": -1, "peak": 0.0, "last": 0.0, "since": None, "decayed": False}
"""The part of a rule's state. peak: the highest rate; last: the newest that was not zero; since: the first step at zero;
decayed: whether it came there little by little, as at the end of a schedule."""
_LITTLE = 0.02  # of the peak: a schedule that ends is there before zero, or before what a log rounds to zero
_END_SHARE = 0.05  # of the run


def follow(state: dict[str, Any], rate: float, step: int, *, zero_share: float = 0.0) -> None:
    """Takes the rate of a step; what is at most zero_share of the peak counts as zero."""
    if step == state["step"]:
        return
    state.update(step=step, peak=max(state["peak"], rate))
    if rate > zero_share * state["peak"]:
        state.update(since=None, last=rate)
    elif state["since"] is None:
        state.update(since=step, decayed=0 < state["last"] <= _LITTLE * state["peak"])


def stays_zero(window: Window, state: dict[str, Any], steps: int) -> bool:
    """Whether it has been zero for so many steps, for longer than the end of a schedule may take, and no weight is known
    to have moved since: the rate is that of the first parameter group, and others may train."""
    since = state["since"]
    if since is None:
        return False
    least = max(steps, _END_SHARE * (since - window.start_step)) if state["decayed"] else steps
    if state["step"] - since < least:
        return False
    ratios = window.series("update/ratio")
    return ratios is None or ratios.value == 0 or (ratios.step or 0) <= since
