"""data_repeats: the same batch comes more than once within an epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perfagent.wire import Finding
from perfagent_server.rules.data.batch_readings import reading_of, readings
from perfagent_server.rules.rule import Life, Place, Question, Rule, Series, Words
from perfagent_server.rules.window import Window

__all__ = ["DataRepeats"]

_SERIES = ("batch/repeats", "batch/distinct")
_NEWEST_STEPS = 20


@dataclass(frozen=True, kw_only=True)
class DataRepeats(Rule):
    """Batches that had come before within their epoch, `repeats` times or more, and again within quiet_steps.

    The agent counts them by fingerprints. A training on a single batch is usual as a test (it must overfit), so that is
    a remark only, unless a loader is asked for each batch and always gives the same. Where about (n - 1) of n batches
    are repeats, n loader workers each read all of the data.
    """

    repeats: int = 3
    quiet_steps: int = 500
    most_workers_share: float = 0.45

    id: ClassVar[str] = "data_repeats"
    severities = ("info", "warning")
    place = Place(Question.DOES_IT_LEARN, 11)
    reads = (
        *(reading_of(name, keep=4) for name in _SERIES),
        *(Series(name, merge="median") for name in ("step_time_s", "phase/data_s")),
    )
    charts = _SERIES
    life = Life(restated=True)
    english = Words(
        name="Repeated batches",
        meaning="The same batch comes more than once within an epoch.",
        fires=(
            "When {repeats} batches repeat an earlier batch of their epoch, or the batch before (known by fingerprints). "
            "It is resolved after {quiet_steps} steps without a repeat. A training on a single batch that comes from no "
            "loader is an info. Single samples may repeat."
        ),
        remedies={
            "": (
                "Look at the sampler: it draws batches with replacement, or a list of files or indices holds entries "
                "twice. With several ranks, use DistributedSampler and call sampler.set_epoch(epoch) before each "
                "epoch; without it, every epoch also has the same order."
            ),
            "several times in a row": (
                "Each loader worker of an IterableDataset reads all of the data. In __iter__, let worker i of n take "
                "every n-th sample (torch.utils.data.get_worker_info()), or use split_dataset_by_node and shards; "
                "num_workers=0 or 1 shows whether that is it."
            ),
            "one batch": (
                "Good as a test that the model can overfit. To train, iterate over the loader: next(iter(loader)) in "
                "each step begins anew and gives its first batch again, and a sampler that is seeded for each batch draws "
                "the same samples every time."
            ),
        },
    )
    chinese = Words(
        name="重复的批次",
        meaning="同一个批次在一个 epoch 内出现不止一次。",
        fires=(
            "至少 {repeats} 个批次与前一个批次或同一 epoch 内的另一个批次相同（由指纹识别）时触发，"
            "直到 {quiet_steps} 步内不再出现。只在一个批次上训练且不经过加载器时仅作提示（info）。逐个抽取的样本可以出现两次。"
        ),
        remedies={
            "": (
                "检查采样器：它有放回地抽取批次，或文件、索引列表中有重复项。多个 rank 时使用 DistributedSampler，"
                "并在每个 epoch 前调用 sampler.set_epoch(epoch)；否则每个 epoch 的顺序也相同。"
            ),
            "several times in a row": (
                "IterableDataset 的每个加载 worker 都读取了全部数据。在 __iter__ 中让 n 个 worker 中的第 i 个只取每 n "
                "个样本中的一个（torch.utils.data.get_worker_info()），或使用 split_dataset_by_node 和分片；"
                "设 num_workers=0 或 1 可验证。"
            ),
            "one batch": (
                "作为模型能否过拟合的测试没有问题。要训练，请遍历加载器：每步调用 next(iter(loader)) "
                "会重新开始并再次给出第一个批次；每个批次都重新设种子的采样器每次抽到相同的样本。"
            ),
        },
    )

    def judge(self, window: Window) -> Finding | None:
        counts = readings(window, "batch/repeats", 1)
        if not counts or not counts[0]:
            return None  # nearly every run
        # repeats that are told of already; the newest count, and the steps of its first and its last rise
        state = window.state_of(self, {"told": 0.0, "count": 0.0, "first": window.step, "last": window.step})
        count = counts[0]
        if count < state["count"]:  # another process counts anew
            state.update(told=0.0, count=0.0)
        if count > state["count"]:
            state["count"], state["last"] = count, window.step
        if window.step - state["last"] > self.quiet_steps:
            state["told"], state["first"] = count, window.step
        found = count - state["told"]
        return self._finding(window, state["first"], found) if found >= self.repeats else None

    def _finding(self, window: Window, first: int, count: float) -> Finding:
        distinct = next(iter(readings(window, "batch/distinct", 1)), 0.0)
        alone = 0 < distinct <= 1
        share = count / (count + distinct) if distinct else 0.0
        cause = "one batch" if alone else "several times in a row" if share >= self.most_workers_share else ""
        title = (
            "The training sees one batch again and again"
            if alone
            else f"{count:,.0f} batches came again in their epoch"
        )
        others = "no other batch was among them" if alone else f"the epoch has {distinct:,.0f} different batches so far"
        return self.found(
            "info" if alone and not _is_fed(window) else "warning",
            title,
            f"{count:,.0f} of the batches that were looked at had come before in their epoch; {others}. The model learns "
            "them by heart, and sees less of the data than the number of steps says.",
            cause=cause,
            since_step=first,
            evidence={"repeats": count, "distinct": distinct, "share_pct": 100 * share, "step": window.step},
        )


def _is_fed(window: Window) -> bool:
    """Whether the newest steps got their batches from a loader."""
    waits = window.series("phase/data_s")
    return waits is not None and bool(waits.value) and (waits.step or 0) >= window.step - _NEWEST_STEPS
