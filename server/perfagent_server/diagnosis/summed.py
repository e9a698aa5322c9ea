"""Sums the parts of a loss, and of that of an evaluation, where a file has no whole one: Ultralytics writes `train/box_loss`,
`train/cls_loss` and `train/dfl_loss`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

from perfagent.wire import LOSS, is_evaluation_loss, loss_kind
from perfagent_client.history.old_run import Samples
from perfagent_client.importing.attempts import loss_of
from perfagent_server.diagnosis.hindsight import may_rise

__all__ = ["parts", "summed"]

_OPPOSED = frozenset(
    (
        "d", "g", "gen", "disc", "discriminator", "generator", "adv", "fake", "real", "critic", "actor", "policy", "pi", "value",
        "vf", "pg", "q", "q1", "q2", "qf", "qf1", "qf2", "td", "alpha", "ent", "entropy", "temperature", "kl", "kld",
    )
)  # fmt: skip
"""Words of losses that work against each other, or that no optimizer follows as they are: their sum says nothing."""


def parts(series: Mapping[str, Samples]) -> dict[str, list[str]]:
    """The name of a sum -> those of its parts: all of one phase, at the same steps, finite and not below 0. A part that is NaN
    now and then is no fault (a batch without boxes), so parts are then judged each by itself."""
    found = [name for name in series if loss_kind(name) == "part"]
    words = {word for name in found for word in re.findall(r"[a-z]+\d*", name.lower())}
    if (
        loss_of(series) is not None
        or words & _OPPOSED
        or may_rise(series)
        or not _fit([series[name] for name in found])
    ):
        return {}
    if len({name.rpartition("/")[0] for name in found}) > 1:
        return {}
    return {LOSS: found, **dict(_evaluations(series, [name.rpartition("/")[2] for name in found]))}


def _evaluations(series: Mapping[str, Samples], tails: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """The same parts in a phase that evaluates: `val/box_loss`."""
    phases = dict.fromkeys(name.rpartition("/")[0] for name in series if name.rpartition("/")[2] == tails[0])
    for phase in phases:
        whole, names = f"{phase}/{LOSS}", [f"{phase}/{tail}" for tail in tails]
        is_new = is_evaluation_loss(whole) and whole not in series
        if is_new and series.keys() >= {*names} and _fit([series[name] for name in names]):
            yield whole, names


def _fit(several: Sequence[Samples]) -> bool:
    return (
        len(several) > 1
        and len(several[0]) > 0
        and all(one.step == several[0].step for one in several)
        and all(math.isfinite(value) and value >= 0 for one in several for value in one.value)
    )


def summed(several: Sequence[Samples]) -> Samples:
    """At the steps and times of the first."""
    total = Samples()
    total.step, total.time = several[0].step, several[0].time
    total.value.extend(map(math.fsum, zip(*(one.value for one in several), strict=True)))
    return total
