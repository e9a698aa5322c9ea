"""grad_vanishing: layers get next to no gradient while others do."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from perfagent.wire import Finding
from perfagent_server.rules.rule import UNKNOWN, Life, Question, Rule, Series, Unknown
from perfagent_server.rules.window import Window

__all__ = ["GradVanishing"]


@dataclass(frozen=True, kw_only=True)
class GradVanishing(Rule):
    """The measure is SageMaker Debugger's (a mean below 1e-7), taken on norms and compared with the layers of the same step
    that get the most (alive_share of them: where depth kills a gradient, it is next to nothing in most layers). A
    gradient of exactly zero is no vanished one: frozen layers, experts that got no token, LoRA's A before B has moved.
    Nor is that of a bias whose weight learns: what a normalization or a softmax comes after has no use for one. Warm-up
    is left out, and a run in which all layers are as small (then it is the loss that is scaled down).
    sparse_observations: for an agent that measures layers now and then only.
    """

    vanished_norm: float = 1e-6
    vanished_share: float = 1e-4
    alive_share: float = 0.1
    observations: int = 20
    sparse_observations: int = 4
    sparse_steps: int = 200
    skip_steps: int = 20

    id: ClassVar[str] = "grad_vanishing"
    severities = ("warning",)
    question = Question.DOES_IT_LEARN
    after = ("dead_units",)
    reads = (Series("grad_norm/", keep=4, judged=True),)
    charts = ("grad/vanishing_share", "grad/norm")
    life = Life(clear_steps=1, restated=True)

    def judge(self, window: Window) -> Finding | Unknown | None:
        family = window.by_family.get("grad_norm/")
        if family is None:
            return None
        # the newest step that was counted, and for each layer in how many measured steps in a row it had vanished
        state = window.state_of(self, {"step": -1, "counted": 0, "rows": {}, "since": {}})
        layers, steps, norms = family.matrix(window.step - 1)  # the newest step may lack the layers of other ranks
        for column, step in enumerate(steps):
            if step > max(state["step"], window.start_step + self.skip_steps):
                state["step"] = step
                state["counted"] += 1
                self._count(state, layers, step, norms[:, column])
        if not steps:
            return None
        rows = {layer for layer in state["rows"] if self._is_long(layer, state)}
        vanished = [layer for layer in rows if not _is_needless(layer, rows)]
        if not vanished:
            return UNKNOWN if state["counted"] < self.observations else None
        newest = {layer: float(norm) for layer, norm in zip(layers, norms[:, -1], strict=True)}
        vanished.sort(key=lambda layer: newest.get(layer, math.nan))
        since = min(state["since"][layer] for layer in vanished)
        return self.found(
            "warning",
            since_step=since,
            evidence={
                "layers": {layer.removeprefix("grad_norm/"): newest.get(layer) for layer in vanished[:64]},
                "vanished": len(vanished), "measured": len(layers), "since_step": since,
                "median_norm": float(np.nanmedian(norms[:, -1])), "largest_norm": float(np.nanmax(norms[:, -1])),
            },
        )  # fmt: skip

    def _is_long(self, layer: str, state: dict[str, Any]) -> bool:
        """Whether its gradient has been next to nothing for long enough."""
        count: int = state["rows"][layer]
        over: int = state["step"] - state["since"][layer]
        return count >= self.observations or (count >= self.sparse_observations and over >= self.sparse_steps)

    def _count(self, state: dict[str, dict[str, int]], layers: list[str], step: int, norms: np.ndarray) -> None:
        known = np.sort(norms[np.isfinite(norms)])
        alive = float(known[int((1 - self.alive_share) * (len(known) - 1))]) if len(known) else 0.0
        limit = min(self.vanished_norm, self.vanished_share * alive)
        if not state["rows"] and (not len(known) or known[0] > limit):
            return  # most steps end here
        for layer, norm in zip(layers, norms.tolist(), strict=True):
            if math.isnan(norm):
                continue  # not measured in this step
            if 0.0 < norm <= limit:
                state["rows"][layer] = state["rows"].get(layer, 0) + 1
                state["since"].setdefault(layer, step)
            else:
                state["rows"].pop(layer, None)
                state["since"].pop(layer, None)


def _is_needless(layer: str, vanished: set[str]) -> bool:
    """Whether it is the bias of a weight that gets its gradient."""
    stem, _, last = layer.rpartition(".")
    return last == "bias" and f"{stem}.weight" not in vanished
