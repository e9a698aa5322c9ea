"""checkpoint_anomaly: a save that failed, was damaged, or is far larger or slower than the others."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

from perfagent.wire import Finding
from perfagent_server.rules.evidence import spell_bytes, spell_s
from perfagent_server.rules.memory.saves import SAVE_S, SAVED_BYTES, SAVES, follow_saves
from perfagent_server.rules.rule import Every, Life, Place, Question, Rule, Series, Words
from perfagent_server.rules.window import Window

__all__ = ["CheckpointAnomaly"]

_FAILED = Series("checkpoint/failed", keep=16, merge="max")
_DAMAGED = Series("checkpoint/damaged", keep=4, merge="max")
_STATE = ("memory/parameters_bytes", "memory/optimizer_state_bytes", "memory/offloaded_bytes")


@dataclass(frozen=True, kw_only=True)
class CheckpointAnomaly(Rule):
    """The newest save stands against those before it: far_times their median in size or in time, and by more_mib or
    more_s. Against the parameters and optimizer state of all ranks it may be whole_times as large: views are saved with
    all of the tensor that they look into (the checkpoints of BigScience's tr1-13B were ten times too large for want of
    a clone).

    Saves that failed since the last one that did not, and damaged ones that were passed over when the run resumed, are
    told by perfagent's own Checkpoint.
    """

    far_times: float = 10.0
    more_s: float = 10.0
    more_mib: float = 64.0
    whole_times: float = 4.0
    fewest_saves: int = 3
    damaged_for_s: float = 1800.0

    id: ClassVar[str] = "checkpoint_anomaly"
    severities = ("info", "warning", "critical")
    place = Place(Question.WILL_IT_GO_ON, 6)
    reads = (
        Every(10.0),
        SAVES,
        SAVED_BYTES,
        SAVE_S,
        _FAILED,
        _DAMAGED,
        *(Series(name, keep=2, axis="time", ranks="apart") for name in _STATE),
    )
    charts = ("phase/checkpoint_s",)
    life = Life(restated=True)
    english = Words(
        name="Unusual checkpoint",
        meaning="A checkpoint failed, was damaged, or is far larger or slower than the others.",
        fires=(
            "When the newest save is {far_times:g} times as large or as slow as the median of at least {fewest_saves} "
            "before it, and by {more_mib:g} MiB or {more_s:g} s (warning); {whole_times:g} times as large as parameters and "
            "optimizer state of all ranks together (info); when it failed (warning; critical from the second failure in "
            "a row on); when damaged checkpoints were passed over at the start (warning). Sizes, failures and damage are "
            "known of saves by perfagent.Checkpoint, times of all that perfagent sees."
        ),
        remedies={
            "": (
                "Look at the file system that it went to: its other users, its quota, a network that is slow. Save beside "
                "the training (perfagent.Checkpoint(..., asynchronous=True)) if it stays slow."
            ),
            "large": (
                "Something large got into the state: a view is saved with all of the tensor that it looks into (clone() "
                "before saving), or a buffer, a list of outputs or a dataset became part of the state dict. Compare the "
                "sizes of its entries with those of an older checkpoint."
            ),
            "failed": (
                "Training goes on without a new checkpoint: look at the reason in the log (a full disk, a quota, a lost "
                "network disk, NaN in the model), repair it, and see that the next save succeeds."
            ),
            "damaged": (
                "An older checkpoint was used, so steps are done again. Look for the reason: a process killed while it "
                "wrote, a full disk, a file system that loses writes. perfagent.Checkpoint keeps several, so leave keep "
                "at 2 or more."
            ),
        },
    )
    chinese = Words(
        name="异常检查点",
        meaning="检查点保存失败、损坏，或远大于、远慢于其他检查点。",
        fires=(
            "最新保存的大小或耗时达到此前至少 {fewest_saves} 次中位数的 {far_times:g} 倍，且多出 {more_mib:g} MiB 或 {more_s:g} "
            "秒（警告）；达到所有 rank 参数与优化器状态总和的 {whole_times:g} 倍（提示）；保存失败（警告；"
            "连续第二次起为严重）；启动时跳过了损坏的检查点（警告）时触发。大小、失败和损坏仅对 perfagent.Checkpoint "
            "的保存可知，耗时对 perfagent 可见的所有保存可知。"
        ),
        remedies={
            "": (
                "检查保存所到的文件系统：其他使用者、配额、缓慢的网络。若一直很慢，请与训练并行保存（"
                "perfagent.Checkpoint(..., asynchronous=True)）。"
            ),
            "large": (
                "状态中混入了很大的内容：视图会连同其所指的整个张量一起保存（保存前 clone()），"
                "或缓冲区、输出列表、数据集成了 state dict 的一部分。将各项大小与较早的检查点比较。"
            ),
            "failed": (
                "训练在没有新检查点的情况下继续：查看日志中的原因（磁盘已满、配额、网络磁盘丢失、模型中有 NaN），"
                "修复后确认下一次保存成功。"
            ),
            "damaged": (
                "使用了较早的检查点，因此要重做一些步。查找原因：写入时进程被杀、磁盘已满、会丢失写入的文件系统。"
                "perfagent.Checkpoint 会保留多个，请将 keep 保持在 2 以上。"
            ),
        },
    )

    def judge(self, window: Window) -> Finding | None:
        names = (SAVES.name, SAVED_BYTES.name, _FAILED.name, _DAMAGED.name)
        if all(window.series(name) is None for name in names):
            return None
        state = window.state_of(self, {})
        return (
            self._failed(window)
            or self._damaged(window, state)
            or self._large(window)
            or self._slow(window, state.setdefault("saves_of", {}))
        )

    def _failed(self, window: Window) -> Finding | None:
        failed, saved = window.series(_FAILED.name), window.series(SAVED_BYTES.name)
        if failed is None:
            return None
        good = saved.step if saved is not None and saved.step is not None else -1
        since = [step for step in failed.last_steps(_FAILED.keep) if step > good]
        if not since:
            return None
        often = "The newest save failed" if len(since) == 1 else f"The newest {len(since)} saves failed"
        newest = f"the newest good one is of step {good:,}" if good >= 0 else "there is no good one in this attempt"
        return self.found(
            "warning" if len(since) == 1 else "critical",
            often,
            f"{often} (step {since[-1]:,}), and {newest}: a crash now would cost {window.step - max(good, 0):,} steps.",
            cause="failed",
            cost=f"{window.step - max(good, 0):,} steps, if it crashes",
            since_step=since[0],
            evidence={"failed_steps": since, "newest_good_step": good if good >= 0 else None},
        )

    def _damaged(self, window: Window, state: dict[str, Any]) -> Finding | None:
        damaged = window.series(_DAMAGED.name)
        if damaged is None or not damaged.value:
            return None
        if window.now - state.setdefault("damaged", window.now) > self.damaged_for_s:
            return None
        count = damaged.value
        what = "checkpoint was" if count == 1 else "checkpoints were"
        return self.found(
            "warning",
            f"{count:.0f} damaged {what} passed over",
            f"When the run resumed, {count:.0f} damaged {what} passed over: it went on from an older one, or from the "
            "beginning.",
            cause="damaged",
            since_step=damaged.step,
            evidence={"damaged": count},
        )

    def _large(self, window: Window) -> Finding | None:
        saved = window.series(SAVED_BYTES.name)
        if saved is None:
            return None
        *before, newest = saved.last(SAVED_BYTES.keep)
        whole = _state_bytes(window)
        usual = median(before) if len(before) >= self.fewest_saves else None
        if usual is not None and newest >= max(self.far_times * usual, usual + self.more_mib * 2**20):
            against = f"{newest / usual:.0f} times the {spell_bytes(usual)} of the {len(before)} before it"
        elif whole and newest >= max(self.whole_times * whole, whole + self.more_mib * 2**20):
            against = (
                f"{newest / whole:.1f} times the {spell_bytes(whole)} of parameters and optimizer state of all ranks"
            )
            usual = None
        else:
            return None
        return self.found(
            "info" if usual is None else "warning",
            f"The newest checkpoint has {spell_bytes(newest)}",
            f"The checkpoint of step {saved.step:,} has {spell_bytes(newest)}, {against}.",
            cause="large",
            since_step=saved.step,
            evidence={"bytes": newest, "usual_bytes": usual, "state_bytes": whole, "step": saved.step},
        )

    def _slow(self, window: Window, state: dict[str, Any]) -> Finding | None:
        _, saves = follow_saves(window, state)
        beside = window.series(SAVE_S.name)
        rows = [(save.step, save.seconds) for save in saves if save.seconds > 0]
        if beside is not None:  # how long they really took, also those for which the training did not wait
            rows = list(zip(beside.last_steps(SAVE_S.keep), beside.last(SAVE_S.keep), strict=True))
        if len(rows) <= self.fewest_saves:
            return None
        step, newest = rows[-1]
        usual = median(seconds for _, seconds in rows[:-1])
        if newest < max(self.far_times * usual, usual + self.more_s):
            return None
        return self.found(
            "warning",
            f"The newest checkpoint took {spell_s(newest)}",
            f"The save of step {step:,} took {spell_s(newest)}, {newest / usual:.0f} times the {spell_s(usual)} that "
            f"{len(rows) - 1} before it took.",
            cost=f"{spell_s(newest - usual)} of this save",
            since_step=step,
            evidence={"seconds": newest, "usual_s": usual, "saves": len(rows), "step": step},
        )


def _state_bytes(window: Window) -> float:
    """What training holds of parameters and optimizer state, of all ranks; 0 where that is not known."""
    total = 0.0
    for name in _STATE:
        readings = window.by_time.get(name)
        if readings is not None:
            total += sum(readings.newest(rank) or 0.0 for rank in readings.ranks)
    return total
