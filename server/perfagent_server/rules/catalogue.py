"""Every rule that there is, and the rules of a project: found in this package, so that a new rule is one file.

Overrides are one mapping of a rule's id to its settings: thresholds by name, `enabled`, `profile` and `stop`. The same format
stands in `rules.toml` and in the body of `PUT /api/v1/rules/{rule}`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import cache
from graphlib import TopologicalSorter
from typing import Any, NamedTuple

from perfagent.errors import ConfigError
from perfagent_server import rules as package
from perfagent_server.rules.rule import Every, Question, Rule, Series, unit_of
from perfagent_server.rules.texts import LANGUAGES

__all__ = [
    "Configured", "Overrides", "all_rules", "bounds_of", "describe", "inputs", "overridden", "rules_for", "with_overrides",
]  # fmt: skip

Overrides = Mapping[str, Mapping[str, Any]]


class Configured(NamedTuple):
    """A rule with the thresholds of a project. profile: whether its alerts have the run profiled; stop: whether they
    stop it."""

    rule: Rule
    enabled: bool
    profile: bool
    stop: bool


@cache
def all_rules() -> tuple[Rule, ...]:
    """Every rule with its own thresholds, in the order of verdicts, which is also that of judging."""
    here = [one.name for one in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    for module in here:
        importlib.import_module(module)
    # a rule that somebody defines elsewhere judges only where it is given
    made = [kind() for kind in _kinds(Rule) if kind.__module__ in here]
    return tuple(_in_order(made))


def _in_order(rules: Collection[Rule]) -> Iterator[Rule]:
    """By the questions of a verdict; of one question what a rule says `after` of others; else by name."""
    by_id = {rule.id: rule for rule in rules}
    for question in Question:
        names = {rule.id for rule in rules if rule.question is question}
        sorter = TopologicalSorter({name: names.intersection(by_id[name].after) for name in names})
        sorter.prepare()
        ready: list[str] = []
        while sorter:
            ready = sorted([*ready, *sorter.get_ready()], reverse=True)
            name = ready.pop()
            yield by_id[name]
            sorter.done(name)


def _kinds(base: type[Rule]) -> Iterator[type[Rule]]:
    """All rules below a class. One without an id of its own is what several rules share."""
    for kind in base.__subclasses__():
        if "id" in vars(kind):
            yield kind
        yield from _kinds(kind)


def rules_for(*overrides: Overrides, off: Collection[str] = ()) -> tuple[Rule, ...]:
    """The rules that judge a run. overrides: from the weakest to the strongest, as the settings of the server and of
    the project say; off: rules that are switched off for this run. Raises ConfigError for a setting that is none."""
    judged = (with_overrides(rule, overrides) for rule in all_rules() if rule.id not in off)
    return tuple(one.rule for one in judged if one.enabled)


def with_overrides(rule: Rule, overrides: Sequence[Overrides]) -> Configured:
    """The rule with these settings, from the weakest to the strongest."""
    settings: dict[str, Any] = {}
    for one in overrides:
        settings.update(one.get(rule.id, {}))
    enabled, profile, stop = (
        bool(settings.pop(name, default)) for name, default in (("enabled", True), ("profile", False), ("stop", False))
    )
    return Configured(overridden(rule, settings), enabled, profile, stop)


def overridden(rule: Rule, settings: Mapping[str, Any]) -> Rule:
    """The rule with other thresholds. Raises ConfigError that says what is allowed."""
    known = rule.thresholds()
    changed = {}
    for name, value in settings.items():
        if name not in known:
            raise ConfigError(
                f"{rule.id} has no threshold {name!r}; it has {', '.join(known)}, `enabled`, `profile` and `stop`"
            )
        _check(rule, name, value, known[name])
        changed[name] = type(known[name])(value)
    return replace(rule, **changed) if changed else rule  # type: ignore[type-var]


def _check(rule: Rule, name: str, value: Any, present: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{rule.id}.{name} must be a number, not {value!r:.80}")
    least, most = bounds_of(rule, name)
    if not (least <= value <= most and (value > 0 or _may_be_zero(name))):  # NaN is within no bounds
        lowest = f"from {least:,g}" if least > 0 or _may_be_zero(name) else "above 0 and up"
        raise ConfigError(f"{rule.id}.{name} must be {lowest} to {most:,g}, not {value!r:.80}")
    if isinstance(present, int) and value != int(value):
        raise ConfigError(f"{rule.id}.{name} must be a whole number, not {value!r}")


def bounds_of(rule: Rule, name: str) -> tuple[float, float]:
    """The least and the most that a threshold may be: its own bounds; else a share of a whole has at most 100 %, and
    anything else is at most a thousand times its default."""
    threshold = next(field for field in fields(rule) if field.name == name)  # type: ignore[arg-type]  # all rules are dataclasses
    if "bounds" in threshold.metadata:
        least, most = threshold.metadata["bounds"]
        return least, most
    default: Any = threshold.default
    least = 1 if isinstance(default, int) and not _may_be_zero(name) else 0
    return least, 100 if unit_of(name) == "%" else 1000 * default


def _may_be_zero(name: str) -> bool:
    """Whether 0 says something: nothing is left out at the start, or waited for."""
    return name.startswith(("skip_", "warmup_", "excused_", "settle_", "wait_steps", "answers_"))


def describe(configured: Configured) -> dict[str, Any]:
    """A rule as GET /rules shows it."""
    rule = configured.rule
    defaults = {one.id: one for one in all_rules()}[rule.id].thresholds()
    texts = {language: rule.text(language) for language in LANGUAGES}
    words = {
        language: {
            "name": text.name, "meaning": text.meaning, "fires": text.fires.format(**rule.thresholds()),
            "remedies": text.remedies,
        }
        for language, text in texts.items()
    }  # fmt: skip
    return {
        "rule": rule.id,
        "enabled": configured.enabled,
        "profile": configured.profile,
        "stop": configured.stop,
        "profile_helps": rule.profile_helps,
        "name": texts["en"].name,
        "description": texts["en"].meaning,
        "severities": list(rule.severities),
        "question": rule.question.name.lower(),
        "reads": inputs(rule),
        "charts": list(rule.charts),
        "thresholds": rule.thresholds(),
        "defaults": defaults,
        "units": {name: unit for name in defaults if (unit := unit_of(name))},
        "life": asdict(rule.held_life()),
        "words": words,
    }


def inputs(rule: Rule) -> list[str]:
    """What a rule reads, in words: names of series, "event KIND", "every N s"."""
    said: dict[str, None] = {}
    for one in rule.reads:
        if isinstance(one, Series):
            said[one.name] = None
        else:
            said[f"every {one.seconds:g} s" if isinstance(one, Every) else f"event {one.kind}"] = None
    return list(said)
