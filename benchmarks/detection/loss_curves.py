"""How well the rules on the loss do on recorded training curves: alerts on healthy ones, and spikes and ramps put in.

    PYTHONPATH=benchmarks:tests python benchmarks/detection/loss_curves.py [FOLDER...] [--per-curve 8]

FOLDER holds CSV files with the columns step and loss, and lr and grad_norm where they were logged; without one, the
curves of tests/data/loss_curves are taken. Everything here is a pure function of curves; runs are judged by the
evaluator that the server uses.

Two thresholds of loss_spike were chosen anew on each half of the families and tested on the other (HELD_OUT and the
rest): z 2.25 and 3 % both times, 98 % of +0.5 nat "recover" and 99 to 100 % of "stick" found within ten steps, and no
alert on the healthy curves of either half. What ships (2.5 and 4 %) is a little stricter.
"""

from __future__ import annotations

import argparse
import csv
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import healthy_losses

from perfagent.wire import Group
from perfagent_server.alerts.state_machine import Change
from perfagent_server.engine.evaluator import Evaluator
from perfagent_server.rules.catalogue import all_rules
from perfagent_server.rules.plan import Plan
from perfagent_server.store.codec.tail import TailGroup
from perfagent_server.store.stored import FromTail

__all__ = [
    "FORMS", "HELD_OUT", "LOSS_RULES", "Curve", "family_of", "healthy", "is_held_out", "judge", "load", "made_up", "raised",
    "spikes",
]  # fmt: skip

CURVES = Path(__file__).resolve().parents[2] / "tests" / "data" / "loss_curves"
HELD_OUT = ("ShortcutsTweaks", "CastBf16", "Replicateleloykun", "ValueEmbed")
"""Families of KellerJordan/modded-nanogpt that are kept apart from the others when thresholds are chosen."""

LOSS_RULES = (
    "loss_spike", "loss_divergence", "loss_plateau", "overfit", "lr_anomaly", "poor_init", "frozen_training",
)  # fmt: skip
WITHIN_STEPS = 10
"""A spike counts as found if an alert fires in the step in which it begins or in one of the ten after it."""
WARM_STEPS = 200
_ROWS = 50
_START = 1_700_000_000.0
_NAMES = {"loss": "loss", "lr": "lr", "grad_norm": "grad/norm"}
_DECAY_STEPS = 15.0
_RAMP_STEPS = 300
_HISTORY = 1400
"""Steps before a spike that are judged with it: more than any rule on the loss keeps."""


@dataclass(frozen=True, slots=True)
class Curve:
    """family: runs of one model and recipe; columns: by the names on the wire, `loss` among them."""

    name: str
    family: str
    columns: Mapping[str, Sequence[float]]

    @property
    def steps(self) -> int:
        return len(self.columns["loss"])


def load(folder: Path) -> list[Curve]:
    """The curves of a folder, by name. A column with an empty cell is left out."""
    return [_read(path) for path in sorted(Path(folder).glob("*.csv"))]


def made_up(seeds: int) -> list[Curve]:
    """Healthy losses of every kind, made of formulas and noise, so many of each."""
    return [
        Curve(f"{kind} {seed}", kind, healthy_losses.made(kind, seed))
        for kind in healthy_losses.HEALTHY
        for seed in range(seeds)
    ]


def is_held_out(curve: Curve) -> bool:
    return curve.family.endswith(HELD_OUT)


def _read(path: Path) -> Curve:
    with path.open() as file:
        rows = list(csv.DictReader(file))
    columns = {
        name: [float(row[column]) for row in rows]
        for column, name in _NAMES.items()
        if all(row.get(column) not in (None, "") for row in rows)
    }
    return Curve(path.stem, family_of(path.stem), columns)


def family_of(name: str) -> str:
    """`track_1_short__2024-11-08_CastBf16__a833bed8` is of the family `2024-11-08_CastBf16`."""
    parts = name.split("__")
    return parts[1] if len(parts) > 2 else parts[0]


def judge(columns: Mapping[str, Sequence[float]], rule_ids: Iterable[str], *, first_step: int = 1) -> list[Change]:
    """What the rules say of a run of one rank, in frames of 50 steps."""
    rules = {rule.id: rule for rule in all_rules()}
    judge = Evaluator("r", Plan([rules[one] for one in rule_ids]))
    length = len(next(iter(columns.values())))
    changes: list[Change] = []
    for begin in range(0, length, _ROWS):
        steps = list(range(first_step + begin, first_step + min(begin + _ROWS, length)))
        times = [_START + 0.5 * step for step in steps]
        values = {name: list(column[begin : begin + _ROWS]) for name, column in columns.items()}
        groups = [TailGroup.of_group(Group(steps, times, times, values))]  # type: ignore[arg-type]
        changes += judge.take(FromTail(judge.upto + 1, "r", 1, 0, "s", judge.upto + 1, times[-1], groups, []))
    return changes


def raised(changes: Iterable[Change], rule_ids: Iterable[str]) -> list[Change]:
    """The alerts at warning or above, each where it first was one."""
    wanted, seen = set(rule_ids), set()
    found = []
    for change in changes:
        if change.finding.rule not in wanted or change.finding.severity == "info":
            continue
        if (
            change.kind in ("fire", "reopen", "update")
            and (change.alert, change.finding.rule, change.opening) not in seen
        ):
            seen.add((change.alert, change.finding.rule, change.opening))
            found.append(change)
    return found


def healthy(rule_ids: Iterable[str], curves: Sequence[Curve] | None = None) -> dict[str, tuple[int, int]]:
    """rule -> (alerts at warning or above, steps judged) over curves of runs in which nothing went wrong, by default
    those of tests/data."""
    wanted, curves = tuple(rule_ids), load(CURVES) if curves is None else curves
    counts = dict.fromkeys(wanted, 0)
    for curve in curves:
        for change in raised(judge(curve.columns, wanted), wanted):
            counts[change.finding.rule] += 1
    steps = sum(curve.steps for curve in curves)
    return {rule: (count, steps) for rule, count in counts.items()}


FORMS = {
    "single": lambda age: 1.0 if age == 0 else 0.0,
    "recover": lambda age: math.exp(-age / _DECAY_STEPS),
    "stick": lambda age: 1.0,
    "ramp": lambda age: min(1.0, age / _RAMP_STEPS),
}
"""What is added to the loss so many steps after the beginning, as a share of the height."""


def spikes(
    form: str,
    height_nat: float,
    seed: int,
    curves: Sequence[Curve],
    *,
    per_curve: int = 4,
    within: int = WITHIN_STEPS,
    rule_ids: Sequence[str] = ("loss_spike", "loss_divergence"),
) -> tuple[int, int, list[int]]:
    """(how many were found, of how many, after how many steps each) of spikes at random places after the warm-up.

    One is found when an alert at warning or above fires within so many steps of its beginning.
    """
    draw = random.Random(f"{form} {height_nat} {seed}")
    latencies: list[int] = []
    total = 0
    for curve in curves:
        for _ in range(per_curve):
            place = draw.randrange(WARM_STEPS, max(WARM_STEPS + 1, curve.steps - within - 1))
            total += 1
            latency = _latency(curve, place, form, height_nat, within, rule_ids)
            if latency is not None:
                latencies.append(latency)
    return len(latencies), total, latencies


def _latency(
    curve: Curve, place: int, form: str, height_nat: float, within: int, rule_ids: Sequence[str]
) -> int | None:
    begin, end = max(0, place - _HISTORY), min(curve.steps, place + within + 1)
    columns = {name: list(column[begin:end]) for name, column in curve.columns.items()}
    added = FORMS[form]
    columns["loss"] = [
        value if at < place else value + height_nat * added(at - place)
        for at, value in enumerate(columns["loss"], start=begin)
    ]
    alerts = raised(judge(columns, rule_ids, first_step=begin + 1), rule_ids)
    steps = [change.step - 1 - place for change in alerts if change.step - 1 >= place]
    return min(steps, default=None)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("folders", nargs="*", type=Path, default=[CURVES])
    arguments.add_argument("--per-curve", type=int, default=8, help="spikes of each form put into each curve")
    arguments.add_argument("--seeds", type=int, default=3, help="made-up healthy losses of each kind")
    chosen = arguments.parse_args()
    curves = [curve for folder in chosen.folders for curve in load(folder)]
    for what, those in (("recorded", curves), ("made-up", made_up(chosen.seeds))):
        for rule, (alerts, steps) in healthy(LOSS_RULES, those).items():
            print(f"{rule:16} {alerts} alerts in {steps:,} healthy steps of {len(those)} {what} runs", flush=True)
    long = [curve for curve in curves if curve.steps > 2 * WARM_STEPS]
    for name, those in (
        ("held out", [curve for curve in long if is_held_out(curve)]),
        ("others", [curve for curve in long if not is_held_out(curve)]),
    ):
        for form, height, within in _MEASURED:
            found, total, latencies = spikes(form, height, 1, those, per_curve=chosen.per_curve, within=within)
            middle = sorted(latencies)[len(latencies) // 2] if latencies else None
            print(
                f"{name:8} {form:8} +{height:g} nat: {found} of {total} within {within} steps, median after {middle}",
                flush=True,
            )


_MEASURED = (
    ("recover", 0.5, 10), ("recover", 1.0, 10), ("stick", 0.5, 10), ("stick", 3.0, 10), ("ramp", 0.5, 300), ("ramp", 2.0, 300),
)  # fmt: skip


if __name__ == "__main__":
    main()
