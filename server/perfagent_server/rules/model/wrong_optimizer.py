"""wrong_optimizer: parameters get gradients, and no optimizer has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perfagent.wire import Finding
from perfagent.wire.limits import whole
from perfagent_server.rules.evidence import spell_pct
from perfagent_server.rules.model.parameter_events import PARAMETERS, fraction, named, names_in, newest
from perfagent_server.rules.rule import Life, Place, Question, Rule, Words
from perfagent_server.rules.window import Noted, Window

__all__ = ["WrongOptimizer"]


@dataclass(frozen=True, kw_only=True)
class WrongOptimizer(Rule):
    """Trainable parameters receive gradients over 20 steps, nobody moves them, and no optimizer of the process has them.

    The agent compares the model's parameters with those of the optimizers, also of those whose turn has not come, and
    says so every half a minute; this rule weighs the share. Frozen parameters get no gradients and do not count. The
    other way round, an optimizer whose parameters all go without a gradient in 20 steps has others than are trained.
    """

    share_pct: float = 1.0

    id: ClassVar[str] = "wrong_optimizer"
    severities = ("warning",)
    place = Place(Question.DOES_IT_LEARN, 6)
    reads = (PARAMETERS,)
    charts = ("params/unoptimized_share",)
    life = Life(restated=True)
    english = Words(
        name="Parameters without an optimizer",
        meaning="Trainable parameters get gradients, but no optimizer has them, so they never change.",
        fires=(
            "When parameters that make up at least {share_pct:g} % of the trainable numbers have received gradients "
            "over 20 steps, have not changed meanwhile, and are in no optimizer of the process. It is checked every "
            "30 seconds. Also when no parameter of the optimizer had a gradient in 20 of its steps in a row."
        ),
        remedies={
            "no gradient": (
                "The optimizer has other parameters than those that are trained: build it after the model is complete (a "
                "layer that is replaced or moved later, as with model.fc = nn.Linear(...), needs a new optimizer). If it "
                "has the right ones, the gradients are gone when it steps: call zero_grad() before backward(), not "
                "between backward() and step()."
            ),
            "": (
                "Give them to the optimizer: build it after the whole model exists (from model.parameters(), not from "
                "a part), or call optimizer.add_param_group for layers that were added or unfrozen later. If they are "
                "meant to stay as they are, freeze them with requires_grad_(False): that also saves their part of the "
                "backward pass and of the memory."
            ),
        },
    )
    chinese = Words(
        name="没有优化器的参数",
        meaning="可训练参数得到了梯度，但不属于任何优化器，因此永远不会改变。",
        fires=(
            "占可训练数值至少 {share_pct:g} % 的参数在 20 步内得到了梯度、没有改变，且不在进程的任何优化器中时触发；"
            "每 30 秒检查一次。优化器连续 20 步中所有参数都没有梯度时也触发。"
        ),
        remedies={
            "no gradient": (
                "优化器持有的不是正在训练的参数：请在模型完整之后再构造优化器（之后替换或移动的层，如 "
                "model.fc = nn.Linear(...)，需要新的优化器）。若参数无误，则是梯度在 step() 之前被清除："
                "应在 backward() 之前调用 zero_grad()，而不是在 backward() 与 step() 之间。"
            ),
            "": (
                "把它们交给优化器：在整个模型建好之后再构造优化器（用 model.parameters() 而不是其中一部分），"
                "或对之后添加或解冻的层调用 optimizer.add_param_group。若本意是保持不变，请用 requires_grad_(False) "
                "冻结：这还能省去它们的反向传播和内存。"
            ),
        },
    )

    def judge(self, window: Window) -> Finding | None:
        starved = newest(window, "without_gradient")
        if starved is not None and fraction(starved, "share"):
            return self._without_gradient(window, starved)
        told = newest(window, "unoptimized")
        if told is None:
            return None
        share = 100 * fraction(told, "share")
        if share < self.share_pct:
            return None
        step, steps = told.step or window.step, whole(told.data.get("steps")) or 0
        return self.found(
            "warning",
            f"{spell_pct(share, 2)} of the model gets gradients that no optimizer uses",
            f"{spell_pct(share, 2)} of the trainable numbers received gradients over {steps} steps up to step {step:,}, and no "
            f"optimizer has them: {named(told)}. They stay as they were initialized.",
            cost=f"{spell_pct(share, 2)} of the model does not learn",
            since_step=max(window.start_step, step - steps),
            evidence={
                "share_pct": share, "parameters": names_in(told), "count": told.data.get("count"),
                "numbers": told.data.get("numbers"), "steps": steps,
            },
        )  # fmt: skip

    def _without_gradient(self, window: Window, told: Noted) -> Finding:
        step, steps = told.step or window.step, whole(told.data.get("steps")) or 0
        return self.found(
            "warning",
            "The optimizer steps, and none of its parameters has a gradient",
            f"None of the {whole(told.data.get('numbers')) or 0:,} numbers of the optimizer had a gradient in {steps} steps "
            f"in a row up to step {step:,}: it changes nothing. What is trained is not what the optimizer has, or the "
            "gradients are cleared before it steps.",
            cause="no gradient",
            cost="the model does not learn",
            since_step=max(window.start_step + 1, step - steps),
            evidence={"share_pct": 100.0, "numbers": told.data.get("numbers"), "steps": steps},
        )
