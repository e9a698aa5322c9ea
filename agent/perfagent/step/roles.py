"""The parts of a run that a step's state refers to, by what is asked of them: no import points to the rooms above."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from perfagent.device import DeviceClock, Value
    from perfagent.step.row import Note, Row, StepRow, Taken
    from perfagent.step.state import StepState
    from perfagent.step.trace import Entry

__all__ = [
    "BatchContents", "GradientReport", "GradientSchedule", "Investigator", "JointStep", "LoopAccount", "Measured",
    "StepFlops", "StepReader",
]  # fmt: skip


class Measured(Protocol):
    """Numbers on their way from a device: norms of gradients, or how far weights moved."""

    def ready(self) -> bool:
        """True when all of them have arrived. Never blocks."""


class GradientSchedule(Protocol):
    """signals.gradient_schedule.Health"""

    rank: int

    def measure(self, p: StepState, optimizer: Any, *, after: bool = False) -> None: ...
    def measure_other(self, p: StepState, optimizer: Any) -> Measured | None: ...
    def measure_unnamed(self, p: StepState, gradients: list[Any]) -> None: ...
    def measure_pieces(
        self, p: StepState, pieces: list[tuple[Any, Any]], model: Any, carried: Value | None
    ) -> None: ...
    def compares(self, p: StepState) -> bool: ...
    def keep_other(self, p: StepState, optimizer: Any) -> Any: ...
    def compare_other(self, p: StepState, optimizer: Any, kept: Any) -> Measured | None: ...
    def finish(self, p: StepState, optimizer: Any, step_ns: int) -> None: ...
    def found_model(self) -> None: ...
    def forget(self) -> None: ...
    def took_of_device(self, p: StepState, ns: float, cost_ns: int) -> None: ...
    def come_back(self, p: StepState) -> None: ...


class GradientReport(Protocol):
    """signals.gradient_report.GradientReport"""

    on_nonfinite: Callable[[int, list[str]], None] | None

    def report_step(
        self,
        p: StepState,
        when: tuple[int, float, float],
        values: dict[str, float],
        rows: list[dict[str, float]],
        all_taken: Sequence[Taken],
        *,
        skipped: bool,
    ) -> None: ...


class JointStep(Protocol):
    """hooks.multi_optimizer.Together"""

    clipped: tuple[int, Any]
    kept: Any

    def forget(self) -> None: ...
    def steps(self, p: StepState, optimizer: Any) -> None: ...
    def skips(self, p: StepState, optimizer: Any) -> None: ...
    def moved(self, p: StepState, optimizer: Any) -> None: ...
    def of_step(self, p: StepState) -> list[Taken]: ...
    def measure_clipped(self, p: StepState, clips: Any, clip: Any) -> None: ...


class LoopAccount(Protocol):
    """decode.phase_times.Account"""

    averages: bool | None
    divided_later: bool
    embedded: bool
    evaluations: Any
    batches: Any

    def trains(self, entries: Sequence[Entry]) -> bool: ...


class StepReader(Protocol):
    """decode.step_decoder.StepReader"""

    flops: Any
    investigator: Any
    loss_by_user: bool

    def loss_is_bad(self, row: StepRow) -> bool: ...
    def needs_next_step(self, row: StepRow) -> bool: ...
    def row(self, note: Note, clock: DeviceClock | None = None) -> Row: ...


class Investigator(Protocol):
    """rootcause.investigator.Investigator"""

    stop: Any

    def passing(self, error: BaseException) -> None: ...
    def stays_bad(self, step: int) -> bool: ...
    def pressing(self, taken: Any) -> None: ...
    def judged(self, step: int, values: dict[str, float]) -> None: ...


class BatchContents(Protocol):
    """signals.batches.contents.Contents"""

    cost_ns: int

    def look(self, iteration: int, batch: Any) -> None: ...
    def begun(self, loader: Any, iteration: int) -> None: ...
    def ended(self, iteration: int) -> None: ...
    def report(self) -> dict[str, float]: ...


class StepFlops(Protocol):
    """signals.flops.step_flops.StepFlops"""

    def add(self, step: int, values: dict[str, float], samples: int, tokens: int, seconds: float) -> None: ...
