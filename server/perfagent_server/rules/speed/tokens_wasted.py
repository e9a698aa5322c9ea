"""tokens_wasted: a good part of every batch is padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perfagent.wire import Finding
from perfagent_server.rules.data.batch_readings import reading_of, readings
from perfagent_server.rules.rule import Life, Place, Question, Rule, Series, Words, within
from perfagent_server.rules.window import Window

__all__ = ["TokensWasted"]

_KEPT = 48


@dataclass(frozen=True, kw_only=True)
class TokensWasted(Rule):
    """The mean share of padding in the newest readings (a minute and a half of them) is padding_pct or more, from step
    least_steps on. A remark: nothing is wrong, but the model computes on places that hold no token."""

    padding_pct: float = 30.0
    least_steps: int = 100
    least_readings: int = within(2, least=1, most=_KEPT)
    clear_at: float = 0.8  # of the threshold

    id: ClassVar[str] = "tokens_wasted"
    severities = ("info",)
    place = Place(Question.IS_IT_FAST, 23)
    reads = (reading_of("batch/padding_pct", keep=_KEPT), Series("step_time_s", merge="median"))
    charts = ("batch/padding_pct", "tokens_per_s")
    life = Life(restated=True)
    english = Words(
        name="Padding",
        meaning="A good part of every batch is padding, on which the model computes all the same.",
        fires=(
            "When padding is at least {padding_pct:g} % of the batches that were looked into, over the newest readings "
            "and from step {least_steps} on. Only a remark: shapes that stay the same for torch.compile cost padding, "
            "too."
        ),
        remedies={
            "": (
                "Batch samples of similar length (perfagent.LengthBucketBatchSampler, or TokenBudgetBatchSampler for "
                "as many tokens in each batch; group_by_length=True in transformers), pad to the longest of the batch "
                "and not to max_length, or pack several samples into one row (perfagent.PackedBatchSampler). With "
                "torch.compile, pad to a few lengths (pad_to_multiple_of) instead of one."
            ),
        },
    )
    chinese = Words(
        name="填充",
        meaning="每个批次中有相当一部分是填充，模型仍会对其计算。",
        fires=(
            "从第 {least_steps} 步起，在被查看的批次中填充至少占 {padding_pct:g} %（取最近的读数）时触发。仅作提示："
            "为 torch.compile 保持固定形状也会带来填充。"
        ),
        remedies={
            "": (
                "将长度相近的样本放入同一批次（perfagent.LengthBucketBatchSampler；或用 TokenBudgetBatchSampler 使每批 "
                "token 数相同；transformers 中设 group_by_length=True），填充到批内最长而不是 max_length，"
                "或把多个样本打包成一行（perfagent.PackedBatchSampler）。使用 torch.compile 时填充到少数几种长度"
                "（pad_to_multiple_of）而不是一种。"
            ),
        },
    )

    def judge(self, window: Window) -> Finding | None:
        shares = readings(window, "batch/padding_pct", _KEPT)
        took = window.series("step_time_s")
        if len(shares) < self.least_readings or took is None or took.total < self.least_steps:
            return None
        share = sum(shares) / len(shares)
        if share < self.padding_pct * (self.clear_at if window.is_firing(self.id) else 1.0):
            return None
        return self.found(
            "info",
            f"{share:.0f} % of the tokens are padding",
            f"{share:.0f} % of the places in the batches hold no token (mean of the newest {len(shares)} readings): the "
            f"model computes on {100 / (100 - min(share, 99.0)):.2g} times as many as there are tokens.",
            cost=f"up to {share:.0f} % of forward and backward",
            since_step=window.step,
            evidence={
                "padding_pct": share,
                "readings": len(shares),
                "lowest_pct": min(shares),
                "highest_pct": max(shares),
            },
            gain_pct=min(share, 99.0),
        )
