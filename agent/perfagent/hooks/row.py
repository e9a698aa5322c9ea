"""Rows on their way from the training thread to the sender: what was noted there becomes names and values here.

The training thread stores references; everything else (which loss rule applies, which phases are known, device values) happens
in `row()` on the sender's thread, once the row is ready.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from perfagent.cost import step_ns
from perfagent.device import Reading, Value, ready, value_of, waiting
from perfagent.hooks.account import DATA, FORWARD, Breakdown, Entry, events_of, forward_passes, roots_of

if TYPE_CHECKING:
    from perfagent.hooks.progress import Progress

__all__ = ["EarlyLog", "Extra", "LoggedLater", "Rare", "StepRow"]

_SETTLE_S = 0.15
"""A step's row waits this long for an explicit loss of the same step, unless the next step starts sooner: less than a tick of
the spool, so that a kill loses no more than it would anyway."""
_EARLY_S = 5.0
_NAMES: dict[tuple[str, ...], tuple[str, ...]] = {}
_SAME = 1e-3
"""Relative difference up to which a logged loss and the one we see are the same quantity (rounding, a bf16 copy)."""


class Extra(Protocol):
    """What was measured in some steps only, and may still be on the device."""

    def ready(self) -> bool:
        """Never blocks."""

    def add(self, values: dict[str, float], rows: list[dict[str, float]], *, skipped: bool) -> None:
        """Adds to the step's own series, and rows of its own where the names are many; once, when ready."""


class Rare:
    """What not every step has: measured or clipped gradients, mixed precision, extras."""

    __slots__ = ("_clip", "_extras", "_grad_scale", "_gradients", "_scale", "_skipped", "_skipped_before")

    def __init__(
        self, gradients: Any, clip: list[Value], grad_scale: Value | None, scale: Value | None, skipped: Any, skipped_before: int,
        extras: list[Extra],
    ) -> None:  # fmt: skip
        self._gradients, self._clip, self._grad_scale, self._extras = gradients, clip, grad_scale, extras
        self._scale, self._skipped, self._skipped_before = scale, skipped, skipped_before

    def ready(self) -> bool:
        if not all(map(ready, (self._scale, self._skipped, self._grad_scale, *self._clip))):
            return False
        if self._gradients is not None and not self._gradients.ready():
            return False
        return all(extra.ready() for extra in self._extras)

    def add(self, values: dict[str, float], p: Progress, when: tuple[int, float, float]) -> None:
        """when: step, Unix time and monotonic time of the rows that this adds besides."""
        scale = value_of(self._scale) if self._scale is not None else None
        on_device = isinstance(self._skipped, (Reading, float))  # a fused optimizer skips on the device
        skipped = value_of(self._skipped) > 0 if on_device else bool(self._skipped)
        if skipped and on_device:
            p.skipped += 1  # only here is it known
        if scale is not None:
            values["amp/scale"] = scale
            values["amp/skipped"] = float(p.skipped if on_device else self._skipped_before)
        norm: float | None = None
        nonfinite: int | None = None
        if self._gradients is not None:
            carried = 1.0 if self._grad_scale is None else value_of(self._grad_scale)
            report = self._gradients.report(carried)
            if not skipped:
                norm, nonfinite = p.health.tell(p, when, values, report)
        clip = [value_of(part) for part in self._clip]
        if clip:
            norm = clip[0] if len(clip) == 1 else math.sqrt(math.fsum(part * part for part in clip))
            if nonfinite is None and math.isfinite(norm):
                nonfinite = 0
        rows: list[dict[str, float]] = []
        for extra in self._extras:
            extra.add(values, rows, skipped=skipped)
        p.rows.extend((*when, row) for row in rows)
        if skipped:  # gradients of a skipped step are infinite by design; `amp/skipped` says so
            return
        if norm is not None:
            values["grad/norm"] = norm
        if nonfinite is not None:
            values["grad/nonfinite"] = float(nonfinite)


class StepRow(NamedTuple):
    """One completed step. A tuple, since that is what the training thread makes fastest; the sender's thread asks it for more.

    began: end of the step before, 0 for the first; the last entry of the trace says when this one ended. roots: how many losses
    were backpropagated in it.
    """

    progress: Progress
    step: int
    trace: list[Entry]
    began: int
    roots: int
    lr: Value | None
    rare: Rare | None

    def ready(self) -> bool:
        """Never blocks. Waits until the next step starts, since a loss logged by the user for this step takes precedence."""
        p = self.progress
        if not p.ended:
            hurried = p.completed > self.step or p.opened or time.perf_counter_ns() - self.trace[-1][1] >= _SETTLE_S * 1e9
            if not hurried and not self._bad():
                return False
            if self.roots > 1 and p.completed < self.step + 2 and self._undecided() and not self._bad():
                return False
        return (self.rare is None or self.rare.ready()) and ((p.clock is None and not waiting()) or self._arrived())

    def _arrived(self) -> bool:
        """Whether what was on its way from a device has come."""
        if not all(ready(value) for value in (self.lr, *(root.value for root in roots_of(self.trace)))):
            return False
        if self.progress.clock is None:
            return True
        events = events_of(self.trace)
        return not events or bool(events[-1].query())

    def _bad(self) -> bool:
        """A loss that is not finite waits for nothing."""
        return any(isinstance(root.value, float) and not math.isfinite(root.value) for root in roots_of(self.trace))

    def _undecided(self) -> bool:
        """Several backward passes, and it is not yet known whether each had a batch of its own: the next step will tell."""
        return (
            self.progress.account.averages is None
            and not roots_of(self.trace)[0].divided
            and not any(entry[0] in (DATA, FORWARD) for entry in self.trace)
        )

    def row(self) -> tuple[int, float, float, tuple[str, ...], list[float]]:
        """The finished row; once, when ready."""
        p = self.progress
        ended = self.trace[-1][1]
        trace = self.trace if type(self.trace) is list else p.account.evaluations.fold(p, self.step, self.trace)
        parts = p.account.read(trace, device=p.clock is not None)
        values: dict[str, float] = {}
        loss = self._seen_loss(parts)
        if loss is not None and not p.loss_by_user:
            values["loss"] = loss
        if self.lr is not None:
            values["lr"] = value_of(self.lr)
        p.hooks_ns += step_ns(len(self.trace))
        seconds = (ended - self.began) / 1e9 if self.began else 0.0
        if seconds:
            values["step_time_s"] = seconds
            if parts.samples:
                values["samples_per_s"] = parts.samples / seconds
            tokens = parts.tokens + (parts.embedded_tokens if p.account.embedded else 0)
            if tokens:
                values["tokens_per_s"] = tokens / seconds
        self._add_phases(values, parts, seconds)
        when = self.step, time.time() - (time.perf_counter_ns() - ended) / 1e9, ended / 1e9
        if self.rare is not None:
            self.rare.add(values, p, when)
        if p.investigator is not None:
            p.investigator.judged(self.step, values)
        return *when, _interned(tuple(values)), [*values.values()]

    def _seen_loss(self, parts: Breakdown) -> float | None:
        """The loss of the backward roots; None where there is none, or where the user's own stands for this step."""
        p = self.progress
        loss = value_of(parts.root) if self.roots == 1 and parts.root is not None else self._combined(parts)
        if not p.user_losses:
            return loss
        for step in [*p.user_losses]:  # a copy first: the training thread may be adding to it
            if step < self.step:
                p.user_losses.pop(step, None)
        user_loss = p.user_losses.pop(self.step, None)
        if user_loss is None or loss is None:
            return loss
        if math.isfinite(user_loss) and math.isfinite(loss) and not _alike(user_loss, loss):
            p.loss_by_user = True  # the user means something else by "loss": that series is theirs from here on
        return None

    def _combined(self, parts: Breakdown) -> float | None:
        """One root is the loss. Several roots that the user divided (accumulation with scaling, as every framework does) add
        up. Several undivided roots are averaged when each had a batch of its own, and added when they share one."""
        roots = roots_of(self.trace)
        if len(roots) <= 1:
            return value_of(roots[0].value) if roots and roots[0].value is not None else None
        values = [value_of(root.value) for root in roots if root.value is not None]
        average = False
        if not roots[0].divided:
            account, latest = self.progress.account, self.progress.last
            batches = parts.batches or parts.forwards
            if not batches and account.averages is None and latest is not None:
                batches = forward_passes(latest.trace)
            if batches:
                account.averages = batches >= len(values)
            average = bool(account.averages)
        total = math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
        return total / len(values) if average else total

    def _add_phases(self, values: dict[str, float], parts: Breakdown, seconds: float) -> None:
        first = len(values)
        if parts.data_ns is not None:
            values["phase/data_s"] = parts.data_ns / 1e9
        clock = self.progress.clock
        if clock is not None:
            for name, pairs in parts.device.items():
                values[f"phase/{name}_s"] = sum(clock.seconds(begin, end) for begin, end in pairs)
            for name, begin, end in parts.device_inside:
                if f"phase/{name}_s" in values:
                    values[f"phase/{name}_s"] -= clock.seconds(begin, end)
            clock.release(events_of(self.trace))
        else:
            if parts.forward_ns is not None:
                values["phase/forward_s"] = parts.forward_ns / 1e9
            if parts.backward_ns:
                values["phase/backward_s"] = parts.backward_ns / 1e9
            if parts.optimizer_ns:
                values["phase/optimizer_s"] = parts.optimizer_ns / 1e9
        for name, spent in parts.phases_ns.items():
            values[f"phase/{name}_s"] = values.get(f"phase/{name}_s", 0.0) + spent / 1e9
        if seconds and "phase/forward_s" in values:
            values["phase/other_s"] = max(0.0, seconds - sum([*values.values()][first:]))


class LoggedLater:
    """A log() call with values that are still on a device."""

    __slots__ = ("_metrics", "_monotonic", "_step", "_time")

    def __init__(self, step: int, wall: float, monotonic: float, metrics: dict[str, Any]) -> None:
        self._step, self._time, self._monotonic, self._metrics = step, wall, monotonic, metrics

    def ready(self) -> bool:
        return all(map(ready, self._metrics.values()))

    def row(self) -> tuple[int, float, float, Mapping[str, Any]]:
        return self._step, self._time, self._monotonic, read(self._metrics)


class EarlyLog:
    """A log() call before the first backward pass: its step is not known yet."""

    __slots__ = ("_metrics", "_monotonic", "_step", "_time")

    def __init__(self, wall: float, monotonic: float, metrics: dict[str, Any]) -> None:
        self._time, self._monotonic, self._metrics = wall, monotonic, metrics
        self._step: int | None = None

    def settle(self, step: int) -> None:
        self._step = step

    def waits_too_long(self) -> bool:
        return self._step is None and time.monotonic() - self._monotonic > _EARLY_S

    def ready(self) -> bool:
        return self._step is not None and all(map(ready, self._metrics.values()))

    def row(self) -> tuple[int, float, float, Mapping[str, Any]]:
        assert self._step is not None
        return self._step, self._time, self._monotonic, read(self._metrics)


def read(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: value_of(value) if isinstance(value, Reading) else value for name, value in metrics.items()}


def _alike(a: float, b: float) -> bool:
    return a == b or abs(a - b) <= _SAME * max(abs(a), abs(b))


def _interned(names: tuple[str, ...]) -> tuple[str, ...]:
    """One tuple object per shape of row, so that the sender groups rows by identity and hashes only once."""
    return _NAMES.setdefault(names, names)
