"""Evaluators of runs that another server judges, made from their newest snapshots, to read verdicts and findings."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

from perfagent_server.database import Database
from perfagent_server.engine.checkpoints import load_cursors
from perfagent_server.engine.evaluator import Evaluator
from perfagent_server.engine.evaluators import Evaluators
from perfagent_server.store.shards import shard_of

__all__ = ["SnapshotEvaluators"]

_KEPT_S = 2.0  # then one is made anew, from the snapshot of that moment
_MOST = 512


class SnapshotEvaluators:
    """clock: Unix seconds; monotonic: measures how old one is."""

    def __init__(
        self,
        database: Database,
        evaluators: Evaluators,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._database, self._evaluators, self._clock, self._monotonic = database, evaluators, clock, monotonic
        self._made: OrderedDict[str, tuple[float, Evaluator | None]] = OrderedDict()

    def of(self, run: str) -> Evaluator | None:
        """None where there is no such run."""
        now = self._monotonic()
        made, judge = self._made.get(run, (-math.inf, None))
        if now - made > _KEPT_S:
            with self._database.read() as connection:
                cursors = load_cursors(connection)
            judge = self._evaluators.made(run, self._clock(), lambda name: cursors[shard_of(name)])
            self._made[run] = now, judge
            self._made.move_to_end(run)
            if len(self._made) > _MOST:
                self._made.popitem(last=False)
        return judge

    def forget(self, run: str) -> None:
        self._made.pop(run, None)
