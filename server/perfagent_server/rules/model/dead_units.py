"""dead_units: units of a layer are zero for every sample, so they learn nothing any more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from perfagent.wire import LOSS, Finding
from perfagent_server.rules.model.layer_rows import LayerRow, layer_rows, named_layers, short
from perfagent_server.rules.model.learning import is_flat, loss_left
from perfagent_server.rules.rule import UNKNOWN, Every, Life, Place, Question, Rule, Series, Unknown, Words, within
from perfagent_server.rules.window import Window

__all__ = ["DeadUnits"]

_SHARES = "dead_share/"
_BY_DESIGN = ("expert", "moe")


@dataclass(frozen=True, kw_only=True)
class DeadUnits(Rule):
    """Most units of a ReLU layer are zero for every sample of a batch, so that no gradient passes them.

    SageMaker Debugger's DeadRelu calls a layer dead from 50 % on. Here the agent has counted the units that are zero in
    64 rows or more, now and then; two measurements in a row must say so, or one of certain_pct. A sparse network is no
    sick one (sparse autoencoders, language models with ReLU or its square, pretrained networks): where the loss has come
    down to learned_share of what it was at first, it is only a remark, unless next to no unit is left. So it is where the
    units were dead when they were first measured and the loss moves at all, or did not have settled_steps to do so: a
    pretrained network begins with a low loss. Experts that got no token are left out.
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
    place = Place(Question.DOES_IT_LEARN, 7)
    reads = (Series(_SHARES, keep=4, judged=True), Series(LOSS), Every(10.0))
    charts = ("dead/share",)
    life = Life(clear_steps=1, restated=True)
    state_version = 2
    english = Words(
        name="Dead units",
        meaning="Most units of a layer are zero for every sample: they pass no gradient on and learn nothing any more.",
        fires=(
            "When at least {dead_pct:g} % of the units of a ReLU layer are zero in every row of a batch, in {observations} "
            "measurements in a row, or {certain_pct:g} % in one. It is a remark, for a network may be sparse by design. It is a "
            "warning from step {least_steps} on if the share rose by {rise_pct:g} points since it was first measured and "
            "more than {learned_share:.0%} of the first loss is left. Where it did not rise, it is a warning if the loss "
            "stands still with more than {still_share:.0%} of the first one left (below {certain_pct:g} %: from step "
            "{settled_steps} on). A layer of which {all_pct:g} % are dead is a warning at once. The first {skip_steps} "
            "steps and the experts of a mixture do not count."
        ),
        remedies={
            "": (
                "The units died in training, most often of a learning rate that is too high: lower it or warm it up over "
                "500 steps, and use GELU, SiLU or LeakyReLU, which always pass some gradient. Dead units do not come back: "
                "start again, or from a checkpoint before."
            ),
            "from the start": (
                "They were dead from the first steps, so it is the initialization or the inputs: set biases to zero and "
                "weights by Kaiming (torch.nn.init.kaiming_normal_(w, nonlinearity='relu')), and normalize the inputs to "
                "mean 0 and deviation 1 or put a LayerNorm before the layer."
            ),
        },
    )
    chinese = Words(
        name="死亡单元",
        meaning="某层的大部分单元对每个样本都为零：它们不传递梯度，也不再学习。",
        fires=(
            "某个 ReLU 层至少 {dead_pct:g} % 的单元在整个批次中都为零，连续 {observations} 次测量如此，或一次测量达到 "
            "{certain_pct:g} % 时触发，作为提示，因为网络可能本来就稀疏。从第 {least_steps} 步起，若该比例比首次测量时上升了 "
            "{rise_pct:g} 个百分点且损失仍高于最初的 {learned_share:.0%}，则为警告；未上升时，若损失停滞且仍高于最初的 "
            "{still_share:.0%} 则为警告（低于 {certain_pct:g} % 时从第 {settled_steps} 步起）。"
            "达到 {all_pct:g} % 的层立即为警告。前 {skip_steps} 步以及混合专家的专家层不计。"
        ),
        remedies={
            "": (
                "这些单元在训练中死亡，多半因学习率过高：降低学习率或用 500 步预热，并改用始终传递部分梯度的 GELU、SiLU 或 "
                "LeakyReLU。死亡的单元不会恢复：请重新开始，或从此前的检查点继续。"
            ),
            "from the start": (
                "从最初几步起就已死亡，原因在初始化或输入：将偏置设为零，权重用 Kaiming 初始化"
                "（torch.nn.init.kaiming_normal_(w, nonlinearity='relu')），并将输入归一化为均值 0、标准差 1，"
                "或在该层之前加 LayerNorm。"
            ),
        },
    )

    def judge(self, window: Window) -> Finding | Unknown | None:
        if _SHARES not in window.by_family:
            return None
        # began: of each layer, the share when it was first measured
        state = window.state_of(self, {"began": {}, "first_loss": None})
        left = loss_left(window, state)
        lowered = self.clear_at if window.is_firing(self.id) else 1.0
        rows = [
            row
            for row in layer_rows(window, _SHARES, window.start_step + self.skip_steps)
            if not _is_sparse_by_design(row.layer)
        ]
        if not rows:
            return UNKNOWN
        for row in layer_rows(window, _SHARES, window.start_step):
            state["began"].setdefault(row.layer, row.values[0])
        dead = [row for row in rows if self._is_dead(row, lowered)]
        if not dead:
            return None
        dead.sort(key=lambda row: -row.values[-1])
        nothing_left = 100 * dead[0].values[-1] >= self.all_pct
        if not nothing_left and window.step - window.start_step < self.least_steps:
            return UNKNOWN
        is_sick = nothing_left or any(self._harms(window, state, row, left) for row in dead)
        return self._finding(state, dead, len(rows), left, is_sick=is_sick)

    def _harms(self, window: Window, state: dict[str, Any], row: LayerRow, left: float | None) -> bool:
        """Whether it is why the run does not learn, as far as its loss can tell."""
        share = row.values[-1]
        if left is None or left <= self.learned_share:
            return False
        if 100 * (share - state["began"][row.layer]) >= self.rise_pct:
            return True
        has_settled = 100 * share >= self.certain_pct or window.step - window.start_step >= self.settled_steps
        return has_settled and left > self.still_share and is_flat(window)

    def _is_dead(self, row: LayerRow, lowered: float) -> bool:
        shares = [100 * share for share in row.values[-self.observations :]]
        if shares[-1] >= lowered * self.certain_pct:
            return True
        return len(shares) == self.observations and min(shares) >= lowered * self.dead_pct

    def _finding(
        self,
        state: dict[str, Any],
        dead: list[LayerRow],
        measured: int,
        left: float | None,
        *,
        is_sick: bool,
    ) -> Finding:
        worst = dead[0]
        share, step = 100 * worst.values[-1], worst.steps[-1]
        others = [f"{row.layer} ({100 * row.values[-1]:.0f} %)" for row in dead[1:]]
        also = f"; so are units of {named_layers(others)}" if others else ""
        loss = "" if left is None else f" {100 * left:.0f} % of the first loss is left."
        return self.found(
            "warning" if is_sick else "info",
            f"{share:.3g} % of the units of {short(worst.layer)} are dead",
            f"{share:.3g} % of the units of {worst.layer} were zero in every row of step {step:,}, so no gradient passes "
            f"them{also} ({len(dead)} of {measured} ReLU layers that were measured).{loss}",
            cause="from the start" if is_sick and 100 * state["began"][worst.layer] >= self.dead_pct else "",
            since_step=worst.steps[0],
            evidence={
                "layers": {row.layer: row.values[-1] for row in dead[:64]}, "measured": measured, "step": step,
                "shares": dict(zip(map(str, worst.steps), worst.values, strict=True)), "loss_left": left,
            },
        )  # fmt: skip


def _is_sparse_by_design(layer: str) -> bool:
    """Whether it belongs to an expert, which sees but few tokens."""
    return any(part.lower().startswith(_BY_DESIGN) for part in layer.split("."))
