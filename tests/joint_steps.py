"""Ranks that work for some time in each step and wait for the slowest, for rules that compare them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from judging import START, Judged, frame, state

from perfagent.wire import Finding
from perfagent_server.rules.rule import Rule

__all__ = ["JointSteps", "Work"]

Work = Callable[[int, int], float]
"""(rank, step) -> seconds of own work."""


class JointSteps(Judged):
    """stages: of the pipeline, as each rank says; with_loss: the ranks that have a loss."""

    def __init__(self, *rules: Rule, ranks: int, stages: Sequence[int] = (), with_loss: Sequence[int] = ()) -> None:
        super().__init__(rules)
        self.evaluator.start_clock(START)
        self.step = 0
        self._ranks, self._with_loss = ranks, with_loss
        for rank in range(ranks):
            told = {"pipeline_stage": stages[rank]} if stages else {}
            started = state("starting", world_size=ranks, **told)
            self.evaluator.take(frame({}, [], rank=rank, ident=rank + 1, events=[started]))

    def go_on(
        self, steps: int, work: Work, *, transfer: float = 0.002, phase: str = "forward", **of_node: float
    ) -> JointSteps:
        """A step each half second. transfer: what all wait for in the end; phase: where a rank spends what it needs more
        than the fastest; of_node: readings of rank 0, `gpu__utilization_pct` stands for gpu/utilization_pct."""
        for _ in range(steps):
            self.step += 1
            now = START + 0.5 * self.step
            own = [work(rank, self.step) for rank in range(self._ranks)]
            whole, least = max(own) + transfer, min(own)
            for rank, seconds in enumerate(own):
                spent = {"comm": whole - seconds, "forward": 0.4 * least, "backward": 0.6 * least, "data": 0.0}
                spent[phase] += seconds - least
                columns = {"step_time_s": [whole], **{f"phase/{name}_s": [value] for name, value in spent.items()}}
                columns |= {"loss": [2.0]} if rank in self._with_loss else {}
                readings = of_node.items() if rank == 0 else ()
                columns |= {name.replace("__", "/"): [value] for name, value in readings}
                ident = self.evaluator.upto + 1
                self.changes += self.evaluator.take(
                    frame(columns, [self.step], rank=rank, ident=ident, received=now, step_s=0.5)
                )
            self.changes += self.evaluator.tick(now)
        return self

    @property
    def found(self) -> list[Finding]:
        """What fired."""
        return [change.finding for change in self.fired]
