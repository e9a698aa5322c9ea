"""Rules on the gradients: NaN and infinity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perfagent.wire import Finding
from perfagent_server.alerts.life import Life
from perfagent_server.diagnosis.remedies import REMEDIES
from perfagent_server.rules.loss import named_ranks, surroundings, was_skipped
from perfagent_server.rules.window import Window

__all__ = ["NonfiniteGradient"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NonfiniteGradient:
    """A gradient of a step is NaN or infinite on any rank, and the step was taken.

    With a GradScaler, overflow is how it looks for its scale: a step that it skipped is no fault, while the scale is
    above lowest_scale and not more than excused_steps in a row are skipped (its search from 65536 takes 16 halvings at
    most). The counter of skipped steps may follow one step later, so that such a run is judged wait_steps behind its
    newest step.
    """

    excused_steps: int = 20
    lowest_scale: float = 1.0
    wait_steps: int = 1

    id: ClassVar[str] = "nonfinite_gradient"
    on: ClassVar[tuple[str, ...]] = ("grad/norm", "grad/nonfinite")
    urgent: ClassVar[str] = "gradient"
    life: ClassVar[Life] = Life(clear_steps=50, outlives_run=True)

    def judge(self, window: Window) -> Finding | None:
        bad = window.bad_at("gradient", window.at)
        if bad is None:
            return None
        scale = window.tracks.get("amp/scale")
        scaling = scale is not None and bool(scale.values)
        if scaling and scale is not None and was_skipped(window, window.at, later=self.wait_steps):
            row = 0
            while row <= self.excused_steps and window.bad_at("gradient", window.at - row) is not None:
                row += 1
            if row <= self.excused_steps and scale.values[-1] >= self.lowest_scale:
                return None
        where = f" on {named_ranks(bad.ranks, window.world_size)}" if window.world_size > 1 else ""
        counts = window.tracks.get("grad/nonfinite")
        count = (
            next((value for step, value in zip(counts.steps, counts.values, strict=True) if step == window.at), None)
            if counts
            else None
        )
        tensors = f" ({count:.0f} parameter tensor{'' if count == 1 else 's'})" if count else ""
        losses = window.tracks["loss"].before(window.at, 20) if "loss" in window.tracks else []
        return Finding(
            rule=self.id,
            severity="critical",
            message=f"The gradient became NaN or infinite in step {window.at}{where}{tensors}.",
            since_step=window.at,
            ranks=list(bad.ranks),
            evidence={"step": window.at, "tensors": count, **surroundings(window), "last_losses": losses},
            fix=REMEDIES[self.id],
        )
