"""dead_units: units of a layer are zero for every sample, so they learn nothing any more."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

from perfagent.wire import LOSS, Finding
from perfagent_server.rules.model.layer_rows import LayerRow, layer_rows
from perfagent_server.rules.model.learning import is_flat, loss_left
from perfagent_server.rules.rule import UNKNOWN, Every, Life, Question, Rule, Series, Unknown, within
from perfagent_server.rules.window import Window

__all__ = ["DeadUnits"]

_SHARES = "dead_share/"
_BY_DESIGN = ("expert", "moe")
_LOSSES = 9


@dataclass(frozen=True, kw_only=True)
class DeadUnits(Rule):
    """SageMaker Debugger's DeadRelu calls a layer dead from 50 % on. Here the agent has counted the units that are zero
    in 64 rows or more, now and then. A sparse network is no sick one (sparse autoencoders, language models with ReLU
    or its square, pretrained networks): where the loss has come down to learned_share of what it was at first, it is
    only a remark, unless next to no unit is left. So it is where the units were dead when they were first measured
    and the loss moves at all, or did not have settled_steps to do so: a pretrained network begins with a low loss.
    Where a network grows sparse its loss falls meanwhile; where the loss is above that of the time before the units died,
    it is no learned sparsity, however low it is. The first skip_steps are left out, and experts that got no token.
    """

    dead_pct: float = 50.0
    certain_pct: float = 90.0
    all_pct: float = 99.9
    observations: int = within(2, least=1, most=4)
    skip_steps: int = 5
    least_steps: int = 100
    settled_steps: int = 500
    learned_share: float = 0.5
    rise_pct: float = within(10.0, most=10_000)
    still_share: float = 0.95
    clear_at: float = 0.8  # of the percentages

    id: ClassVar[str] = "dead_units"
    severities = ("info", "warning")
    question = Question.DOES_IT_LEARN
    after = ("wrong_optimizer",)
    reads = (Series(_SHARES, keep=4, judged=True), Series(LOSS), Every(10.0))
    charts = ("dead/share",)
    life = Life(clear_steps=1, restated=True)
    state_version = 3

    def judge(self, window: Window) -> Finding | Unknown | None:
        if _SHARES not in window.by_family:
            return None
        # began: of each layer, the share when it was first measured; alive: the loss when fewer were dead
        state = window.state_of(self, {"began": {}, "alive": {}, "first_loss": None})
        left = loss_left(window, state)
        lowered = self.clear_at if window.is_firing(self.id) else 1.0
        known = layer_rows(window, _SHARES, window.start_step + self.skip_steps)
        rows = [row for row in known if not _is_sparse_by_design(row.layer)]
        if not rows:
            return UNKNOWN
        for row in layer_rows(window, _SHARES, window.start_step):
            state["began"].setdefault(row.layer, row.values[0])
            if 100 * row.values[-1] < self.dead_pct and (level := _level(window, row.steps[-1])) is not None:
                state["alive"][row.layer] = level
        dead = [row for row in rows if self._is_dead(row, lowered)]
        if not dead:
            return None
        dead.sort(key=lambda row: -row.values[-1])
        nothing_left = 100 * dead[0].values[-1] >= self.all_pct
        if not nothing_left and window.step - window.start_step < self.least_steps:
            return UNKNOWN
        is_sick = nothing_left or any(self._harms(window, state, row, left) for row in dead)
        return self._finding(state["began"], dead, len(rows), left, is_sick=is_sick)

    def _harms(self, window: Window, state: dict[str, Any], row: LayerRow, left: float | None) -> bool:
        """Whether it is why the run does not learn, as far as its loss can tell."""
        share, alive, now = row.values[-1], state["alive"].get(row.layer), _level(window, window.step)
        has_risen = 100 * (share - state["began"][row.layer]) >= self.rise_pct
        if left is None or (left <= self.learned_share and not (has_risen and alive and now and now > alive)):
            return False
        if has_risen:
            return True
        has_settled = 100 * share >= self.certain_pct or window.step - window.start_step >= self.settled_steps
        return has_settled and left > self.still_share and is_flat(window)

    def _is_dead(self, row: LayerRow, lowered: float) -> bool:
        shares = [100 * share for share in row.values[-self.observations :]]
        if shares[-1] >= lowered * self.certain_pct:
            return True
        return len(shares) == self.observations and min(shares) >= lowered * self.dead_pct

    def _finding(
        self, began: dict[str, float], dead: list[LayerRow], measured: int, left: float | None, *, is_sick: bool
    ) -> Finding:
        worst = dead[0]
        return self.found(
            "warning" if is_sick else "info",
            cause="from the start" if is_sick and 100 * began[worst.layer] >= self.dead_pct else "",
            since_step=worst.steps[0],
            evidence={
                "layer": worst.layer, "dead_pct": 100 * worst.values[-1], "dead": len(dead), "measured": measured,
                "step": worst.steps[-1], "loss_left_pct": None if left is None else 100 * left,
                "layers": {row.layer: row.values[-1] for row in dead[:64]},
                "others": [row.layer for row in dead[1:64]],
                "shares": dict(zip(map(str, worst.steps), worst.values, strict=True)),
            },
        )  # fmt: skip


def _level(window: Window, step: int) -> float | None:
    track = window.by_step.get(window.loss_name or LOSS)
    values = [value for value in track.before(step, _LOSSES) if math.isfinite(value)] if track else []
    return median(values) if values else None


def _is_sparse_by_design(layer: str) -> bool:
    """Whether it belongs to an expert, which sees but few tokens."""
    return any(part.lower().startswith(_BY_DESIGN) for part in layer.split("."))
