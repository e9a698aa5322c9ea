"""Chooses the metric that ranks runs, and whether higher or lower is better. Its name decides, unless the user chooses."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from perfagent.errors import WireError
from perfagent.wire import CATALOGUE, FAMILIES
from perfagent.wire.loss_names import LOGGED, LOSS, loss_kind

__all__ = ["Goal", "goal_in", "goals_among"]

_MORE_IS_BETTER = re.compile(
    r"(?<![a-z])(acc|accurac(y|ies)|f1|auc|auroc|auprc|ap|map|iou|miou|dice|bleu|rouge|meteor|chrf|rewards?|returns?|scores?|"
    r"r2|precision|recall|success|pass|em|psnr|ssim|wins?|correct|top)\d*(?![a-z])",
    re.IGNORECASE,
)
_EVALUATED = re.compile(r"(val|valid|validation|eval|evaluation|test|dev)(?![a-z])", re.IGNORECASE)
_SPEED = ("tokens_per_s", "samples_per_s", "step_time_s")
_WAYS = {"max": True, "min": False}


@dataclass(frozen=True, slots=True)
class Goal:
    """name: of a series. higher: whether more of it is better."""

    name: str
    higher: bool

    @property
    def spelled(self) -> str:
        return f"{'max' if self.higher else 'min'}:{self.name}"


def goal_in(text: str) -> Goal:
    """Of `max:val/acc`, or of a name alone. Raises WireError."""
    way, colon, name = text.partition(":")
    if colon and way in _WAYS and name:
        return Goal(name, _WAYS[way])
    if not text or colon:
        raise WireError(f"goal is {text[:80]!r}; give max:NAME, min:NAME or NAME of a metric")
    return Goal(text, _is_better_high(text))


def goals_among(names: Iterable[str]) -> list[Goal]:
    """What may be the goal of runs that send these series, the likeliest first: how an evaluation went, what else their
    script logs, the loss, speed."""
    fit = [name for name in names if name in (LOSS, *_SPEED) or _is_logged(name)]
    return [Goal(name, _is_better_high(name)) for name in sorted(fit, key=_place)]


def _is_logged(name: str) -> bool:
    return (
        name not in CATALOGUE
        and name.partition("/")[0] + "/" not in FAMILIES
        and not name.startswith((LOGGED, "node_gpu"))
    )


def _place(name: str) -> tuple[int, str]:
    evaluated, high = _EVALUATED.match(name) is not None, _is_better_high(name)
    if name in _SPEED:
        return 5, name
    if evaluated:
        return (0 if high else 1 if "loss" in name.lower() else 2), name
    return (2 if high else 3 if loss_kind(name) == "whole" else 4), name


def _is_better_high(name: str) -> bool:
    if name in CATALOGUE:
        return CATALOGUE[name].better == "higher"
    return _MORE_IS_BETTER.search(name) is not None
