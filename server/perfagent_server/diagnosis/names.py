"""Maps common metric names, such as `grad_norm`, to the names that the rules read, such as `grad/norm`. An import keeps the run's
own names; rules look them up here.

Losses are not in it: rules know them by their words (`perfagent.wire.loss_names`), whatever stands around.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from perfagent.wire import CATALOGUE

__all__ = ["read_as", "renamed"]

_OURS = {
    "lr": "lr learning_rate current_lr lr_group0 lr_pg0 lr_0 opt_lr optimizer_lr group0_lr lr_step",
    "grad/norm": "grad_norm gradient_norm grad_norm_total total_grad_norm global_grad_norm gradient_norm_total total_norm "
    "gnorm grad_l2_norm grad_2.0_norm_total",
    "amp/scale": "loss_scale grad_scale amp_scale scaler_scale grad_scaler_scale",
    "step_time_s": "step_time_s seconds_per_step sec_per_step",
    "tokens_per_s": "tokens_per_s tokens_per_second tokens_per_sec",
    "samples_per_s": "samples_per_s samples_per_second samples_per_sec",
}
_TABLE = {theirs: ours for ours, names in _OURS.items() for theirs in names.split()}
_BEFORE = re.compile(r"^(trainer|training|train|optim|optimizer|opt|global|perf|metrics|actor|custom)[/._ ]")
"""What stands before such a name without changing it."""
_OF_OPTIMIZER = re.compile(
    r"^(lr|learning_rate)[-_/ ](\w*(adam|sgd|lion|adafactor|rmsprop|muon|shampoo|adagrad)\w*)([-/_]pg1)?$"
)
"""Lightning's LearningRateMonitor: the optimizer's class, and its parameter group counted from 1."""


def read_as(name: str) -> str:
    """The name by which rules read a series; its own where they know no other."""
    if name in CATALOGUE:
        return name
    plain = name.strip().lower().replace(" ", "_").replace("-", "_")
    for _ in range(2):
        short = re.sub(r"[/.]", "_", plain)
        if found := _TABLE.get(plain) or _TABLE.get(short):
            return found
        if _OF_OPTIMIZER.match(plain):
            return "lr"
        plain = _BEFORE.sub("", plain, count=1)
    return name


def renamed(names: Iterable[str]) -> dict[str, str]:
    """Name -> that by which rules read it. No two get the same: the one that has it already keeps it, else the first."""
    given = list(names)
    taken = {name for name in given if read_as(name) == name}
    found = {}
    for name in given:
        ours = read_as(name)
        found[name] = ours if ours not in taken else name
        taken.add(found[name])
    return found
