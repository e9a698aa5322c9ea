"""Real incidents of the trainings tr1-13B and BLOOM-176B, from the log points in bigscience's chronicles.

The chronicles show only the points round an incident. Before the first one 300 healthy steps are made up at its level,
with a little noise, because no rule judges without a past; after the last one its values go on where a rule needs some
steps more. All else is as it was logged.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from records import moments_of_rows, rows_of_chronicles

from perfagent_server.backtest.replay import replay
from perfagent_server.rules.catalogue import all_rules
from perfagent_server.rules.plan import Plan

__all__ = ["INCIDENTS", "Incident", "Seen", "look_at"]

BEFORE = 300
SEEDS = 20
_NOISE = {"loss": 0.004, "grad_norm": 0.1, "iter_s": 0.002, "iter_ms": 0.002}
"""Of the made-up steps: standard deviations, as shares of the level."""

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """name: in words; first, last: iterations of the chronicle that are judged; every: iterations between two rows;
    began: iteration of the first row that is ill; rules: which must say so, each with the last iteration at which that is
    in time; repeated: how often the last row is repeated."""

    name: str
    first: int
    last: int
    began: int
    rules: Mapping[str, int]
    every: int = 1
    repeated: int = 0

    def rows(self, seed: int) -> list[Row]:
        told = [row for row in rows_of_chronicles() if self.first <= row["iteration"] <= self.last]
        draw = random.Random(f"{self.name} {seed}")
        made_up = [_noisy(told[0], self.first - self.every * back, draw) for back in range(BEFORE, 0, -1)]
        later = [_noisy(told[-1], self.last + self.every * step, draw) for step in range(1, self.repeated + 1)]
        return [*made_up, *told, *later]


@dataclass(frozen=True, slots=True)
class Seen:
    """What a rule said of an incident, each time with other noise: the iterations at which it fired, None where it did
    not, and how often it fired before the incident."""

    rule: str
    in_time_until: int
    fired: Sequence[int | None]
    early: int

    @property
    def in_time(self) -> int:
        return sum(at is not None and at <= self.in_time_until for at in self.fired)


def _noisy(row: Row, iteration: int, draw: random.Random) -> Row:
    noisy = {name: row[name] * (1 + share * draw.gauss(0, 1)) for name, share in _NOISE.items() if row[name]}
    return {**row, **noisy, "iteration": iteration}


INCIDENTS = (
    Incident(
        name="BLOOM-176B, 2022-04-12: gradients grow over four iterations, then the loss leaves its band in iteration 31219",
        first=31214, last=31251, began=31215, rules={"grad_norm_explosion": 31216},
    ),
    Incident(
        name="tr1-13B: the loss jumps from 2.77 to 7.3 while the loss scale falls (a row every ten iterations)",
        first=29020, last=29090, began=29050, every=10, repeated=10, rules={"loss_spike": 29150, "loss_scale_collapse": 29150},
    ),
    Incident(
        name="BLOOM-176B: iterations grow from 105.2 to 111.1 s, from 149 to 141 TFLOPs (5.7 %)",
        first=42780, last=42784, began=42783, repeated=40, rules={"throughput_regression": 42803},
    ),
)  # fmt: skip


def look_at(incident: Incident, seeds: int = SEEDS) -> list[Seen]:
    """Of the rules that there are."""
    rules = {rule.id: rule for rule in all_rules()}
    wanted = [rule for rule in incident.rules if rule in rules]
    fired: dict[str, list[int | None]] = {rule: [] for rule in wanted}
    early = dict.fromkeys(wanted, 0)
    for seed in range(seeds if wanted else 0):
        plan = Plan([rules[rule] for rule in wanted])
        alerts = replay(moments_of_rows(incident.rows(seed)), plan).alerts
        for rule in wanted:
            steps = [one.first_step for one in alerts if one.rule == rule and one.severity != "info"]
            early[rule] += sum(step < incident.began for step in steps)
            fired[rule].append(min((step for step in steps if step >= incident.began), default=None))
    return [Seen(rule, incident.rules[rule], fired[rule], early[rule]) for rule in wanted]
