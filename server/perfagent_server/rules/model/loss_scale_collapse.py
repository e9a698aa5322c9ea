"""loss_scale_collapse: the loss scale of mixed precision falls and falls, or too many steps are skipped."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

from perfagent.wire import LOSS, Finding
from perfagent_server.rules.model import grad_scaler
from perfagent_server.rules.rule import UNKNOWN, Life, Question, Rule, Series, Unknown
from perfagent_server.rules.window import Window

__all__ = ["LossScaleCollapse"]

_SEEN = 20  # values of scale and loss in the evidence
_LEAST = 2.0**-149  # in place of a scale of zero: what float32 holds


@dataclass(frozen=True, kw_only=True)
class LossScaleCollapse(Rule):
    """The scaler is torch's, DeepSpeed's or Megatron's. It begins too high and looks for its scale: what it cuts and
    skips is no fault before it has kept its scale for search_steps, or before longest_search_steps have passed. After
    that a healthy one grows every 2,000 steps and is cut once. Of BLOOM's predecessor (tr8b) the scale fell from
    1,048,576 to 32,768 in six steps as its loss went from 2.67 to 4.37. Skipped steps are counted by amp/skipped
    where the agent sends it, else by the cuts.
    """

    halvings: float = 3.0
    within_steps: int = 10
    least_scale: float = 1.0
    skipped_pct: float = 5.0
    over_steps: int = 200
    search_steps: int = 20
    longest_search_steps: int = 100
    clear_at: float = 0.8  # of the share of skipped steps

    id: ClassVar[str] = "loss_scale_collapse"
    severities = ("warning", "critical")
    question = Question.DOES_IT_LEARN
    reads = (Series("amp/scale", merge="min", judged=True), *grad_scaler.READS, Series(LOSS), Series("lr", merge="max"))
    charts = ("amp/scale", "amp/skipped")
    life = Life(clear_steps=50, restated=True)
    joins = ("nonfinite_loss", "nonfinite_gradient")  # then no scale is small enough

    def judge(self, window: Window) -> Finding | Unknown | None:
        scale = window.by_step["amp/scale"].value
        if scale is None or not 0 <= scale < math.inf:
            return UNKNOWN
        state = window.state_of(self, _fresh(window.at, scale))
        self._note(window, state, scale)
        cuts, skips = state["cuts"], state["skips"]
        if not (cuts or skips or scale < self.least_scale):
            return None  # nearly every step ends here
        skipped = sum(count for _, count in skips) if state["counted"] is not None else sum(cut for _, cut, _ in cuts)
        halved = sum(share for step, _, share in cuts if step > window.at - self.within_steps)
        at_minimum = scale <= self.least_scale < state["highest"]
        still_skips = any(step > window.at - self.within_steps for step, _ in skips)
        lowest_pct = self.skipped_pct * (self.clear_at if window.is_firing(self.id) else 1.0)
        if at_minimum and (scale < self.least_scale or still_skips):
            return self._finding(window, state, scale, skipped, "minimum")
        if halved >= self.halvings or 100 * skipped > lowest_pct * self.over_steps:
            return self._finding(window, state, scale, skipped, "" if halved >= self.halvings else "skipped steps")
        return None

    def _note(self, window: Window, state: dict[str, Any], scale: float) -> None:
        """Takes a note of what the scaler did in this step."""
        at, before, gap = window.at, state["scale"], max(1, window.at - state["step"])
        skipped = window.by_step.get("amp/skipped")
        count = skipped.at(at) if skipped is not None else None
        cut = math.log2(before / max(scale, _LEAST)) if scale < before else 0.0
        more = count - state["counted"] if count is not None and state["counted"] is not None else 0.0
        if cut or more > 0:
            state["busy"] = at
        if state["searching"]:
            quiet = at - state["busy"] >= self.search_steps
            state["searching"] = not quiet and at - state["first"] < self.longest_search_steps
        else:
            if cut:
                state["cuts"].append([at, cut, cut * min(1.0, self.within_steps / gap)])
            if more > 0:
                state["skips"].append([at, more])
        for noted in (state["cuts"], state["skips"]):
            while noted and noted[0][0] <= at - self.over_steps:
                del noted[0]
        state.update(step=at, scale=scale, highest=max(state["highest"], scale))
        if count is not None:
            state["counted"] = count

    def _finding(self, window: Window, state: dict[str, Any], scale: float, skipped: float, why: str) -> Finding:
        cuts = state["cuts"]
        latest = [one for one in cuts if one[0] > window.at - self.within_steps]
        times = 2 ** sum(cut for _, cut, _ in latest)
        first = min((int(noted[0][0]) for noted in (cuts, state["skips"]) if noted), default=window.at)
        since = state["busy"] if why == "minimum" else first if why else latest[0][0]
        losses, rose = _losses(window, since)
        return self.found(
            "critical" if why == "minimum" else "warning",
            cause="loss" if rose and why != "minimum" else why,
            since_step=since,
            evidence={
                "scale": scale, "highest_scale": state["highest"], "scale_before": scale * times, "times": times,
                "steps": window.at - since + 1, "since_step": since, "step": window.at, "skipped": skipped or None,
                "skipped_pct": 100 * skipped / self.over_steps if skipped else None, "over_steps": self.over_steps,
                "last_scales": window.by_step["amp/scale"].last(_SEEN), "loss_before": losses[0], "loss": losses[1],
                "lr": window.value("lr"),
            },
        )  # fmt: skip


def _fresh(at: int, scale: float) -> dict[str, Any]:
    """first, step: the first and the newest step judged; scale, highest: the newest and the highest; busy: the newest step
    with a cut or a skip; searching: whether the scaler still looks for its scale; counted: steps skipped so far, None if
    not known; cuts: [step, halvings, of which within_steps have]; skips: [step, how many]."""
    return {
        "first": at, "step": at, "scale": scale, "highest": scale, "busy": at, "searching": True, "counted": None,
        "cuts": [], "skips": [],
    }  # fmt: skip


def _losses(window: Window, since: int) -> tuple[tuple[float | None, float | None], bool]:
    """The loss before a step and now (medians of up to 5 and 3), and whether it rose; None where it is not known."""
    name = window.loss_name
    track = window.by_step.get(name) if name is not None else None
    if track is None:
        return (None, None), False
    before = [value for value in track.before(since - 1, 5) if math.isfinite(value)]
    now = [value for value in track.before(window.at, min(3, window.at - since + 1)) if math.isfinite(value)]
    if not before or not now:
        return (None, None), False
    was, is_now = median(before), median(now)
    return (was, is_now), is_now - was > 0.05 * abs(was)
