"""checkpoint_stale: the newest checkpoint is far older than those before it ever became."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import ClassVar

from perfagent.wire import Finding
from perfagent_server.rules.memory.growth import spell_long_s
from perfagent_server.rules.memory.saves import SAVED_BYTES, SAVES, Save, follow_saves
from perfagent_server.rules.rule import Every, Life, Place, Question, Rule, Series, Words
from perfagent_server.rules.window import Window

__all__ = ["CheckpointStale"]

_FOLDER = "disk/checkpoint_free_bytes"


@dataclass(frozen=True, kw_only=True)
class CheckpointStale(Rule):
    """The newest save is stale_times the usual interval of this run old, in steps and in time, and older than the longest
    interval so far by a margin. Saves at uneven intervals (each time a metric is best) are only a remark, at
    uneven_times the longest.

    A run that was never seen to save is a remark after never_s. Saves on another thread are seen by their folder, and
    perfagent's own when they are there; a run that began after step 0 came from a checkpoint, so it has some.
    """

    stale_times: float = 2.0
    uneven_times: float = 3.0
    longest_times: float = 1.3
    uneven_at: float = 1.5
    fewest_saves: int = 3
    least_s: float = 300.0
    never_s: float = 7200.0
    never_steps: int = 100

    id: ClassVar[str] = "checkpoint_stale"
    severities = ("info", "warning")
    place = Place(Question.WILL_IT_GO_ON, 5)
    reads = (
        Every(15.0),
        SAVES,
        SAVED_BYTES,
        Series(_FOLDER, keep=2, axis="time", ranks="apart"),
        Series("step_time_s", merge="median"),
    )
    charts = ("phase/checkpoint_s", "step_time_s")
    life = Life(restated=True)
    english = Words(
        name="Checkpoint too old",
        meaning="The run has not saved for much longer than it usually does, so a crash would cost much.",
        fires=(
            "When the newest checkpoint is {stale_times:g} times the usual interval old, in steps and in time, "
            "{longest_times:g} times the longest interval so far, and {least_s:g} s, after at least {fewest_saves} saves "
            "(warning). Where intervals differ by more than {uneven_at:g} times, as with saves of the best model only, at "
            "{uneven_times:g} times the longest (info). Also when a run of {never_steps} steps was not seen to save in "
            "{never_s:g} s (info)."
        ),
        remedies={
            "": (
                "Look at the log and the disk for a save that failed or hangs, and save now. If the run saves only when a "
                "metric is best, save the newest state as well (save_last=True in Lightning, save_strategy='steps' in "
                "transformers, perfagent.Checkpoint with every=)."
            ),
            "never": (
                "Save now and then: perfagent.Checkpoint in a few lines, save_steps in transformers, ModelCheckpoint in "
                "Lightning, or torch.save of the state dicts of model, optimizer and scheduler. A good interval costs 1 % "
                "of the time. If it saves in a way that perfagent does not see, switch this rule off for the run."
            ),
        },
    )
    chinese = Words(
        name="检查点过旧",
        meaning="运行已远超平常的间隔没有保存，一旦崩溃损失很大。",
        fires=(
            "至少保存过 {fewest_saves} 次之后，最新检查点的步数和时间均达到平常间隔的 {stale_times:g} "
            "倍、迄今最长间隔的 {longest_times:g} 倍且超过 {least_s:g} 秒时触发（警告）。若间隔相差超过 {uneven_at:g} "
            "倍（例如只保存最佳模型），则为最长间隔的 {uneven_times:g} 倍（提示）。运行超过 {never_steps} 步且 "
            "{never_s:g} 秒内未见保存时也会提示。"
        ),
        remedies={
            "": (
                "查看日志和磁盘，是否有保存失败或挂起，并立即保存。若只在指标最佳时保存，请同时保存最新状态（Lightning 的 "
                "save_last=True、transformers 的 save_strategy='steps'、perfagent.Checkpoint 的 every=）。"
            ),
            "never": (
                "请定期保存：几行代码的 perfagent.Checkpoint、transformers 的 save_steps、Lightning 的 ModelCheckpoint，"
                "或对模型、优化器和调度器的 state dict 使用 torch.save。合适的间隔约花费 1 % 的时间。"
                "若以 perfagent 看不到的方式保存，可为此运行关闭该规则。"
            ),
        },
    )

    def judge(self, window: Window) -> Finding | None:
        if window.series("step_time_s") is None:
            return None
        count, saves = follow_saves(window, window.state_of(self, {}))
        if count == 0:
            return self._never(window)
        if len(saves) < self.fewest_saves:
            return None
        age_s, age_steps = window.now - saves[-1].time, window.step - saves[-1].step
        if age_s < self.least_s:
            return None
        steps, seconds = _intervals(saves)
        is_even = max(steps) <= self.uneven_at * min(steps)
        longest = self.longest_times if is_even else self.uneven_times
        if any(
            age <= max(self.stale_times * median(past), longest * max(past))
            for age, past in ((age_steps, steps), (age_s, seconds))
        ):
            return None
        usual = f"the {len(steps)} intervals before had {median(steps):,.0f} steps ({spell_long_s(median(seconds))})"
        return self.found(
            "warning" if is_even else "info",
            f"No checkpoint for {age_steps:,} steps",
            f"The newest checkpoint is of step {saves[-1].step:,}, {age_steps:,} steps and {spell_long_s(age_s)} ago; "
            f"{usual}{'' if is_even else ', at most ' + format(max(steps), ',')}. A crash now would cost all of that.",
            cost=f"{spell_long_s(age_s)} of training, if it crashes",
            since_step=saves[-1].step,
            evidence={
                "age_steps": age_steps, "age_s": age_s, "usual_steps": median(steps), "usual_s": median(seconds),
                "longest_steps": max(steps), "newest_step": saves[-1].step, "saves": count,
            },
        )  # fmt: skip

    def _never(self, window: Window) -> Finding | None:
        age_s, steps = window.now - window.started, window.step - window.start_step
        if age_s < self.never_s or steps < self.never_steps or window.start_step > 0 or _FOLDER in window.by_time:
            return None
        if "checkpoint" in window.wall.whole().often:
            return None
        return self.found(
            "info",
            f"No checkpoint in {spell_long_s(age_s)}",
            f"perfagent has seen no save in {spell_long_s(age_s)} and {steps:,} steps: a crash would cost all of them.",
            cause="never",
            cost=f"{spell_long_s(age_s)} of training, if it crashes",
            since_step=window.start_step,
            evidence={"age_steps": steps, "age_s": age_s, "saves": 0},
        )


def _intervals(saves: list[Save]) -> tuple[list[int], list[float]]:
    """Steps and seconds between the saves."""
    steps = [later.step - earlier.step for earlier, later in pairwise(saves)]
    return steps, [later.time - earlier.time for earlier, later in pairwise(saves)]
