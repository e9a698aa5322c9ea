"""Turns a completed step into its row: names and values."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from perfagent.decode.breakdown import Breakdown
from perfagent.decode.evaluation_spans import Evaluations
from perfagent.decode.gradient_report import GradientReport
from perfagent.decode.losses import roots_of, with_divisors
from perfagent.decode.phase_times import TraceReader
from perfagent.device import DeviceClock, Event, value_of
from perfagent.step.clusters import LoopFacts
from perfagent.step.row import Row, StepRow
from perfagent.step.trace import DATA, FORWARD, Entry, Loss, LossScale, entries_of, events_of

if TYPE_CHECKING:
    from perfagent.step.roles import Investigator

__all__ = ["StepReader"]

_SAME = 1e-3
"""Relative difference up to which a logged loss and the loss we see are the same quantity (rounding, a bf16 copy)."""
_MOST_BEGINS = 1000


class StepReader:
    """Reads the steps of one run in the order of their steps. `facts` holds what is known of the loop.

    loss_by_user: the script logs another quantity under the name "loss", so that series belongs to the script.
    """

    def __init__(self) -> None:
        self.facts = LoopFacts()
        self.traces = TraceReader()
        self.evaluations = Evaluations(self.traces)
        self.gradients = GradientReport()
        self.loss_by_user = False
        self.epoch = time.time() - time.perf_counter()
        """Unix time at the start of the monotonic clock, which the drain keeps up to date: somebody may set the clock."""
        self.investigator: Investigator | None = None
        self._end: tuple[int, int, Event] | None = None
        """The newest step: its number, its end on the host in ns, and on the device."""
        self.add_flops: Callable[[int, dict[str, float], int, int, float], None] | None = None
        """Adds to the values of a step. Gets also its number, samples, tokens and seconds."""
        self.begins: deque[int] = deque(maxlen=_MOST_BEGINS)
        """The first steps of all epochs but the first. A consumer that sums over epochs removes them."""
        self.steps = 0
        """How many steps were read."""
        self._epoch = 0.0

    def loss_is_bad(self, row: StepRow) -> bool:
        """True if a loss of the step is NaN or infinite and on the host."""
        roots = roots_of(entries_of(row.trace))
        return any(isinstance(root.value, float) and not math.isfinite(root.value) for root in roots)

    def needs_next_step(self, row: StepRow) -> bool:
        """True if only the next step shows whether each backward pass of this one had its own batch."""
        if self.facts.averages is not None:
            return False
        entries = entries_of(row.trace)
        roots = roots_of(entries)
        return len(roots) > 1 and not roots[-1].divided and not any(entry[0] in (DATA, FORWARD) for entry in entries)

    def row(
        self, row: StepRow, rare: dict[str, float] | None = None, *, user_loss: float | None = None, passes: int = 0,
        clock: DeviceClock | None = None,
    ) -> Row:  # fmt: skip
        """Returns the names and values of a step.

        rare: series that only some steps have. user_loss: the value that the script logged as "loss". passes: forward passes
        of a later step, if those of this step are not known. clock: made the device events in the trace, if any, and gets
        them back.
        """
        trace = row.trace
        entries: Sequence[Entry] = ()
        parts = self.traces.read_usual(trace) if clock is None and row.loss_count == 1 and row.began else None
        if parts is None:
            entries = entries_of(trace) if clock is None else with_divisors(entries_of(trace))
            parts = self.traces.read(entries, device=clock is not None)
        ended = trace[-3]
        values: dict[str, float] = {}
        self._note_epoch(row.step, values)
        loss = self._loss(row, parts, entries, user_loss, passes)
        if loss is not None and not self.loss_by_user:
            values["loss"] = loss
        if row.lr is not None:
            values["lr"] = value_of(row.lr)
        seconds = self._seconds(row, clock)
        if seconds:
            values["step_time_s"] = seconds
            if parts.samples:
                values["samples_per_s"] = parts.samples / seconds
            tokens = parts.tokens + (parts.embedded_tokens if self.facts.embedded else 0)
            if tokens:
                values["tokens_per_s"] = tokens / seconds
            if self.add_flops is not None:
                self.add_flops(row.step, values, parts.samples, tokens, seconds)
        _add_phases(values, parts, seconds, entries, clock)
        if rare is not None:
            values.update(rare)
        if self.investigator is not None:
            self.investigator.judged(row.step, values)
        self.steps += 1
        monotonic = ended / 1e9
        return row.step, self.epoch + monotonic, monotonic, values

    def _seconds(self, row: StepRow, clock: DeviceClock | None) -> float:
        """From the end of the step before, 0.0 if that is not known: by the device's clock if it has marked both ends, since
        the host runs ahead of the device."""
        ended, event = row.trace[-3], row.trace[-2]
        before, self._end = self._end, None if event is None else (row.step, ended, event)
        host_s = (ended - row.began) / 1e9 if row.began else 0.0
        if before is None or clock is None:
            return host_s
        device_s = clock.seconds(before[2], event) if event is not None and before[0] == row.step - 1 else None
        clock.release([before[2]])
        own_s = (row.began - before[1]) / 1e9  # what the agent did between the two steps
        return host_s if device_s is None or not row.began else max(0.0, device_s - own_s)

    def _note_epoch(self, step: int, values: dict[str, float]) -> None:
        """The number of an epoch stands in its first step."""
        epoch = self.traces.batches.epoch
        if epoch > self._epoch:
            if self._epoch:
                self.begins.append(step)
            values["batch/epoch"] = self._epoch = float(epoch)

    def _loss(
        self, row: StepRow, parts: Breakdown, entries: Sequence[Entry], user_loss: float | None, passes: int
    ) -> float | None:
        """Returns the loss of the backward roots; None if there is none, or if the script's own loss counts."""
        if row.loss_count == 1 and parts.root is not None:
            loss: float | None = value_of(parts.root)
        else:
            loss = self._combined(roots_of(entries), parts, passes)
        if user_loss is None or loss is None:
            return loss
        if math.isfinite(user_loss) and math.isfinite(loss) and not _alike(user_loss, loss):
            self.loss_by_user = True
        return None

    def _combined(self, roots: Sequence[Loss], parts: Breakdown, passes: int) -> float | None:
        """Combines several roots into one loss. Roots that the script divided (accumulation with scaling, as every
        framework does) are summed, unless each is a mean by itself. Undivided roots are averaged if each had its own
        batch, and summed if they share one."""
        values = [value_of(root.value) for root in roots if root.value is not None]
        if len(values) <= 1:
            return values[0] if values else None
        average = self._are_means([root.divided for root in roots if root.value is not None], parts)
        if self.facts.divided_later:
            average = True
        elif not roots[-1].divided:  # the first is not always checked, as it could have been the only one
            facts = self.facts
            batches = parts.batches or parts.forwards
            if not batches and facts.averages is None:
                batches = passes
            if batches:
                facts.averages = batches >= len(values)
            average = bool(facts.averages)
        total = math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
        return total / len(values) if average else total

    def _are_means(self, divisors: Sequence[LossScale], parts: Breakdown) -> bool:
        """True if each of several divided losses is the mean of its own items, as `(losses * mask).sum() / mask.sum()`: each
        loss of a window has its own divisor, or the same one, its share of the items. A divisor that scales a window is
        the same for all its losses; or the shares of the window add up to one."""
        known = [divisor for divisor in divisors if isinstance(divisor, float)]
        if (
            len(known) < 2
            or len(known) < len(divisors) - 1
            or not all(map(math.isfinite, known))
            or min(map(abs, known)) == 0.0
        ):
            return False  # the divisor of the first is not always read
        if min(known) != max(known):
            return abs(sum(1 / divisor for divisor in known) - 1) > _SAME
        if known[0] in (len(divisors), parts.batches or parts.forwards):  # a batch may have several losses
            self.facts.micro_batches = known[0]
        items = (parts.samples, parts.tokens, parts.embedded_tokens)
        return known[0] != self.facts.micro_batches and known[0] * len(divisors) in items


def _add_phases(
    values: dict[str, float], parts: Breakdown, seconds: float, entries: Sequence[Entry], clock: DeviceClock | None
) -> None:
    first = len(values)
    if parts.data_ns is not None:
        values["phase/data_s"] = parts.data_ns / 1e9
    if clock is not None:
        for name, pairs in parts.device.items():
            spans = [span for begin, end in pairs if (span := clock.seconds(begin, end)) is not None]
            if len(spans) == len(pairs):
                values[f"phase/{name}_s"] = sum(spans)
        for name, begin, end in parts.device_inside:
            if f"phase/{name}_s" in values:
                values[f"phase/{name}_s"] -= clock.seconds(begin, end) or 0.0
        clock.release([event for event in events_of(entries) if event is not entries[-1][2]])  # its end begins the next
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


def _alike(a: float, b: float) -> bool:
    return a == b or abs(a - b) <= _SAME * max(abs(a), abs(b))
