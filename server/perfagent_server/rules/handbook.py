"""docs/rules.md, written from the rules: a heading a rule, with what it means, when it fires and what to do.

python -m perfagent_server.rules.handbook > docs/rules.md
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

from perfagent.plural import some
from perfagent_server.rules.catalogue import all_rules, inputs
from perfagent_server.rules.rule import Question, Rule, unit_of

__all__ = ["MEASURED", "handbook", "measured", "seen_in_demo", "tally"]

MEASURED = Path(__file__).with_name("measured.json")
"""Rule -> what scripts/detection measured of it, and the fault of the demo that it named."""

_QUESTIONS = {
    Question.IS_IT_DEAD: "Is it dead, and of what?",
    Question.ARE_ITS_NUMBERS_FINITE: "Are its numbers finite?",
    Question.DOES_IT_MOVE: "Does it move, and is it heard?",
    Question.DOES_IT_LEARN: "Does it learn?",
    Question.WILL_IT_GO_ON: "Will it go on?",
    Question.IS_IT_FAST: "Is it fast?",
}

_HEAD = """# Rules

<!-- Written by `python -m perfagent_server.rules.handbook` from the rules themselves. Change them there. -->

A rule reads the samples and events of one run, in the order of steps. If something is wrong, the rule reports a
finding, with the evidence and a fix. The most important finding is the run's verdict. A run without findings has the
verdict `healthy`. The rules below stand in the order in which a verdict asks: sick comes before slow, and a cause
before what follows from it. `GET /api/v1/rules` shows every threshold that your server uses, with names, meanings and
remedies in English and Chinese.

{tally}

## What you see

{table}
"""

_TAIL = """
## The life of an alert

Findings with the same cause in the same step are one alert, even if they come from several ranks. An alert fires. It
is resolved when the finding has been gone for a while. A rule that compares a level (a share of waiting, utilization)
may hover around its threshold: its alert opens, changes its severity and is resolved only when that has held for
another window of the rule ("Held" above). The verdict of a young run does not wait for that. If the finding comes
back soon after, the same alert opens again under the same id. How often channels are told is in
[webhooks.md](webhooks.md#how-often-an-alert-is-sent). If an open alert describes an ongoing state (the share of
waiting, which ranks are silent), it shows the newest figures. If it describes a moment (a NaN, a jump), it shows the
first figures. The severity of an open alert falls only after the findings have been less severe for as long as it
takes to resolve the alert. When a run ends, alerts about NaN, memory and crashes stay open as the run's result. The
other alerts are resolved. A new attempt of the run resolves all alerts. If a process of the older attempt reports
only now how it ended, its alert fires and is resolved. A run whose newest loss is NaN is never called healthy, even
if somebody closed the alert.

A finding that states a time or a share is about the steps that its rule looks at, and names them ("over the newest 20
steps"). The verdict repeats its figures. A healthy verdict states the step time that every page shows: the median of
the newest 100 steps, or of the whole run when it has ended.

A run has finished when every rank that ever reported has finished. An attempt has room for 256 different alerts from
`run.alert()` and from rules of other programs. When all 256 places are taken, a new alert replaces a resolved alert,
or a user's alert that is more than an hour old. If there is no such alert, the server drops the new alert and counts
it (`dropped_alerts` of `rules` in `GET /self`). Alerts of the rules above do not use these places.

A rule whose data is missing reports nothing: without an NVIDIA GPU there is no utilization, and without a DataLoader
there is no data wait.

## Other thresholds

`rules.toml` in the server's data folder changes rules for all projects, or for one. The file is read when the server
starts:

```toml
[loss_spike]
rise_pct = 8.0

[projects.research.data_bound]
enabled = false
```

A threshold outside its bounds is refused with a sentence that names them: NaN, an infinite or a negative number, a
share above 100 %, more steps or seconds than the rule keeps, or more than a thousand times the default. 0 is allowed
where it means that nothing is left out (`skip_steps`).

`PUT /api/v1/rules/{rule}?project=NAME` with `{"enabled": true, "thresholds": {"rise_pct": 8.0}}` does the same while
the server runs, and wins over the file; without `project` it counts for all projects. `DELETE` takes it back. `PATCH
/api/v1/runs/{run}` with `{"rules_off": ["loss_spike"]}` switches rules off for a single run.

## Your own alerts

An alert of your own needs no code: say which series, what of it, and for how long. Make it in Settings, under Rules; by
command; by API; or in `rules.toml`. `--try RUN` shows when it would have fired in a run, and saves nothing; so does "Try
on a run" in Settings.

```bash
perfagent alerts add high-val --metric val/loss --above 3 --for 20 --severity warning --try RUN
perfagent alerts add stuck --metric reward --no-rise --for 500 --note "Ask Ann."
perfagent alerts add idle --metric gpu/utilization_pct --below 40 --over mean --for 10min --project research
perfagent alerts rules                                 # those that there are; `remove NAME` removes one
```

```toml
[[alerts]]
name = "high-val"
metric = "val/loss"
comparison = ">"
threshold = 3
for_steps = 20
```

| | |
|---|---|
| `name` | up to 48 letters, digits, `_`, `-` and `.`; the id of its rule is `own:NAME` |
| `metric` | a series as charts name it, or a pattern with `*` and `?`, such as `loss/*` |
| `function` | `value`: every value (usual); `mean`, `min`, `max`: over the duration; `rise`, `fall`, `missing`: below |
| `comparison`, `threshold` | `>`, `>=`, `<` or `<=`, and a number; not with `rise`, `fall` and `missing` |
| `for_steps` or `for_s` | the duration: steps (of the run, not values), or seconds; `missing` takes seconds |
| `severity` | `info`, `warning` (usual) or `critical` |
| `project`, `tags` | only runs of this project; only runs that have all of these tags |
| `note` | ends the message |

- `rise` and `fall` fire when the series has not risen, or fallen, for the duration; `missing` when it had no value.
- 20 series of a run are watched for a pattern. The message says if more match.
- Ranks are put together as on charts. A value counts until the next one comes; a silence of ten times the usual distance of
  two values begins anew. Where seconds count, the last value of each second is taken. A long mean is exact to 1/64 of its
  duration.
- NaN fulfils no comparison and is no rise or fall; means, minima and maxima leave it out.
- The alert is resolved when it was not so for as long as the duration; `rise`, `fall` and `missing` at the first value that
  says so. Within 100 steps or 10 minutes it opens again under the same id; a try counts each time.
- It is an alert like all others: on charts, in channels, webhooks and silences, muted, and in the outcome of the run. In a
  verdict it comes after the rules of the server with the same severity.
- It counts in runs that go on from the next sample on, and nothing of what came before counts. If it is changed or removed,
  what it had found is resolved.
- A project has 100 alerts at most, and so have all projects together. One of a project replaces that of all projects with
  the same name. Those of `rules.toml` are changed there alone; the file is read when the server starts.

`GET, POST /api/v1/rules/alerts?project=`, `PUT, DELETE /api/v1/rules/alerts/{name}?project=`; `POST
/api/v1/rules/alerts/try` takes the alert and `run`, and judges the newest 100,000 samples of it. The right is that of
changing rules.

## Profiles when a rule fires

When an alert of a speed rule fires, the server can have the run profiled: five steps of one rank, as `perfagent profile
RUN` does. Of the ranks that the finding names, the first is profiled, else rank 0. This is off for every rule until
`profile = true` switches it on, for all projects or for one:

```toml
[projects.research.data_bound]
profile = true
```

`PUT /api/v1/rules/{rule}?project=NAME` with `{"profile": true}` does the same. The sections above say which rules can;
for the others, a profile of some steps does not show what they are about, and the server refuses the setting.

- An alert asks for one profile at most, also if it opens again, and after a restart of the server.
- A run is profiled for rules once in 10 minutes, and 10 times in all. Alerts beyond that ask for nothing, and are
  counted: `held_back` of `rule_profiles` in `GET /self`. What people ask for does not count.
- A run that has ended, and a rank that was silent for a minute, are asked for nothing. A script that runs a torch
  profiler of its own is left alone.
- While the profiler runs, steps take longer. What the training computes stays the same, bit by bit.

What the profile shows joins the alert as a cause: its message and the run's verdict end with where the time went, and
the evidence names the profile and the address of its trace. `perfagent profile RUN --list` lists the profiles of a run
with the alert and the rule for which each was taken.

## When something goes wrong in the server

If a rule raises an error at a step, the server skips this rule at this step, and the other rules go on. If a frame
cannot be judged at all, or an alert cannot be stored, the server skips the frame or the alert. Each skip is counted
(`passed_over` of `rules` in `GET /self`), and the server logs the cause once. No other frame, alert or run has to
wait. How far the rules are behind is in `lag_frames` and `lag_s`. If they are more than 100,000 frames behind, the
server asks agents to send again later.
"""


def handbook() -> str:
    """The document."""
    parts = [_HEAD.replace("{tally}", textwrap.fill(tally(), 119)).replace("{table}", _by_symptom())]
    question: Question | None = None
    for rule in all_rules():
        if rule.question is not question:
            question = rule.question
            parts.append(f"## {_QUESTIONS[question]}\n\n")
        parts.append(_section(rule))
    return "".join(parts).rstrip() + "\n" + _TAIL


def _by_symptom() -> str:
    """A table: what somebody sees, and the rule that tells of it."""
    rows = [f"| {rule.text().symptom} | {_link(rule)} |" for rule in all_rules()]
    return "\n".join(["| you see | the rule |", "| --- | --- |", *rows, ""])


def _link(rule: Rule) -> str:
    heading = re.sub(r"[^\w\- ]", "", f"{rule.id} {rule.text().name}").lower()
    return f"[`{rule.id}`](#{heading.replace(' ', '-')})"


def _section(rule: Rule) -> str:
    words = rule.text()
    lines = [f"### `{rule.id}`: {words.name}", "", f"**What it means:** {words.meaning}", ""]
    lines += [f"**When it fires** ({', '.join(rule.severities)}): {words.fires.format(**rule.thresholds())}", ""]
    lines += [f"**Measured:** {measured(rule)}", ""]
    if rule.level:
        window, unit = getattr(rule, rule.level), unit_of(rule.level)
        held = f"the alert opens when this has held for {window:g} {unit} more"
        lines += [f"**Held:** {held}. It is resolved when this was gone for as long, and for a minute at least.", ""]
    if rule.asks_for:
        lines += [f"**It asks every rank** for `{rule.asks_for}` when it fires.", ""]
    if rule.profile_helps:
        lines += ["**Profile:** taken when it fires, if the project [wants it](#profiles-when-a-rule-fires).", ""]
    others = [f"- *{cause}:* {remedy}" for cause, remedy in words.remedies.items() if cause]
    lines += [f"**What to do:** {words.remedies['']}", "", *others, *([""] if others else [])]
    lines += [f"**Inputs:** {', '.join(f'`{one}`' for one in inputs(rule))}.", ""]
    return "\n".join(lines) + "\n"


def tally() -> str:
    """How many rules were tested in which way. README.md says the same."""
    rules = all_rules()
    figures = _figures()
    rated = [rule for rule in rules if _is_rated(figures.get(rule.id, {}))]
    seen = [rule for rule in rules if rule.seen_on and rule not in rated]
    unseen = [rule for rule in rules if rule.needs_card and not rule.seen_on and rule not in rated]
    rest = [rule for rule in rules if rule not in (*rated, *seen, *unseen)]
    demo = sum("demo" in figures.get(rule.id, {}) for rule in rest)
    return (
        f"Of the {len(rules)} rules, {len(rated)} have figures on labeled runs or programs. {len(seen)} others named a fault "
        f"in a job on {' or '.join({rule.seen_on for rule in seen if rule.seen_on})}. {len(unseen)} need a GPU, and none "
        f"of these has been seen on one. {len(rest)} have no labeled data: they were tested on synthetic series, and "
        f"{demo} of them also named their fault in a training of the demo."
    )


def _is_rated(found: dict[str, Any]) -> bool:
    return "total" in found or bool(found.get("programs", {}).get("should"))


def _figures() -> dict[str, dict[str, Any]]:
    return json.loads(MEASURED.read_text("utf-8")) if MEASURED.exists() else {}


def measured(rule: Rule) -> str:
    """What scripts/detection, the sick programs and the demo showed of a rule, in a sentence."""
    found = _figures().get(rule.id, {})
    demo = f"{seen_in_demo(found['demo'])}; " if "demo" in found else ""
    if programs := found.get("programs"):
        demo = f"{_of_programs(programs)}; {demo}"
        if programs["should"] and "total" not in found:
            return f"{demo.removesuffix('; ')} ([detection.md](detection.md#sick-trainings))."
    if "total" in found:
        return f"{demo}{_shares(found)} ([detection.md](detection.md))."
    if rule.seen_on:
        seen = f"named in a job on {rule.seen_on} (docs/gpu.md)"
        return f"{demo}{seen}; else tested on made-up series, without a claim of precision."
    if rule.needs_card:
        return f"{demo}not yet seen on a card: tested on recorded and made-up series, without a claim of precision."
    return f"{demo}no labeled data: tested on synthetic series."


def _of_programs(found: dict[str, Any]) -> str:
    """named in 4 of 5 sick programs; no false alarm in 74 healthy ones"""
    false = some(found["healthy_false"], "false alarm") if found["healthy_false"] else "no false alarm"
    named = f"named in {found['named']} of {some(found['should'], 'sick program')}; " if found["should"] else ""
    return f"{named}{false} in {some(found['healthy'], 'healthy program')}"


def seen_in_demo(named: dict[str, Any]) -> str:
    """named in the demo (`data-stall`: after 24 steps, 6.7 s)"""
    after = f"after {some(named['steps'], 'step')}" if named["steps"] else "in the same step"
    return f"named in the demo (`{named['fault']}`: {after}, {named['seconds']:.3g} s)"


def _shares(found: dict[str, Any]) -> str:
    """Each with the numbers that it was made of."""
    caught, total, false = found["found"], found["total"], found["false_alerts"]
    raised = caught + false
    precision = f"precision {caught / raised:.3f} ({caught:,} of {some(raised, 'alert')}), " if raised else ""
    recall = f"recall {caught / total:.3f} ({caught:,} of {some(total, 'fault')}{_how_late(found)})"
    healthy, tested = found["healthy_steps"], found["tested_steps"]
    if tested == healthy:
        where = "no threshold was chosen on them"
    else:
        where = (
            f"on {tested:,} of them no threshold was chosen" if tested else "thresholds were chosen with a look at them"
        )
    return f"{precision}{recall}; {some(false, 'false alert')}; {some(healthy, 'healthy step')}: {where}"


def _how_late(found: dict[str, Any]) -> str:
    if found["most_steps"] is None:
        return ""
    if found["most_steps"] == 0:
        return ", in the step in which they began"
    return f", within {some(found['most_steps'], 'step')}; median {found['median_steps']}"


if __name__ == "__main__":
    sys.stdout.write(handbook())
