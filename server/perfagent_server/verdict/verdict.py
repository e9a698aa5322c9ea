"""One verdict for a run: it is healthy, or the one thing that holds it back.

A decision tree over what the rules found, in the order of their places. Sick comes before slow: a run that crashed, or
trains on NaN, has no use for advice on its data loader. Among slow ones, the cause comes before what follows from it: a
loader that keeps the step waiting is also why the GPU idles. A run that ended keeps the verdict of how it ended, or of
what held it back at its end or most of the time. Pure: a window and findings in, a finding out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from perfagent.wire import LOSS, SEVERITIES, Finding
from perfagent_server.rules.evidence import spell_s
from perfagent_server.rules.loss.nonfinite_loss import NonfiniteLoss
from perfagent_server.rules.rule import USER_ALERT, Rule
from perfagent_server.rules.speed.step_shares import share_elsewhere
from perfagent_server.rules.window import Window
from perfagent_server.verdict.healthy import MOST, Healthy

__all__ = ["verdict", "worst_first"]

STANDING_REMEDY = (
    "If it neither evaluates nor saves now: `perfagent stacks RUN` shows where every thread of every rank stands. Of several "
    "ranks the one whose stack differs is the one that the others wait for; one that waits for its loader has a worker hanging."
)
"""For a run that is heard and whose steps do not end any more."""
_FEW_STEPS = 10
"""So many steps no rule about speed or learning has seen enough of."""
_STANDS_S = 60.0
_STANDS_STEPS = 5.0
"""From so long on, and so many times the longest of the newest steps, the verdict says that no step ends any more."""
_JUMP_STEPS = 9
"""So many newest losses say where the loss is now."""


def worst_first(findings: Iterable[Finding], rules: Mapping[str, Rule]) -> list[Finding]:
    """In the order of the verdict's questions, what is only info last. Findings of rules that are not ours come after
    those of the rules, and the user's own alerts after both."""

    def rank(finding: Finding) -> tuple[object, ...]:
        rule = rules.get(finding.rule)
        place = (0, rule.place.question, rule.place.order) if rule else (1 + (finding.rule == USER_ALERT), 0, 0)
        return finding.severity == "info", place, -SEVERITIES.index(finding.severity)

    return sorted(findings, key=rank)


def verdict(window: Window, findings: Sequence[Finding], *, jump: Finding | None = None, lost: bool = False) -> Finding:
    """The first finding; info-level ones do not hold a run back. findings: worst first. jump: the loss's last jump,
    whose alert is over. lost: nothing is heard of the run any more. One without an agent raises no alert by that, since
    most such programs just end; its verdict says so."""
    for finding in findings:
        is_end = finding.rule == "process_crash" and window.state in ("preempted", "failed")
        if (finding.severity != "info" or is_end) and finding.rule != USER_ALERT:
            return finding
    sick = _not_finite(window)
    if sick is not None:
        return sick
    if lost:
        return _fell_silent(window)
    return _healthy(window, jump)


def _fell_silent(window: Window) -> Finding:
    after = f" after step {window.step:,}" if window.step else ""
    return Finding(
        rule="lost_contact",
        severity="info",
        title="This run went silent",
        message=f"This run went silent{after}, and did not say that it ended.",
        since_step=window.step or None,
        fix='A script that sends its own rows ends its run with `{"run": "NAME", "state": "finished"}`. If it should still be '
        "running, look at its process and at the network between it and this server.",
    )


def _not_finite(window: Window) -> Finding | None:
    """What to say when the loss is no number and no alert says so (somebody closed it): never that the run is healthy.
    Nothing of as few values in a row as the rule excuses, where a GradScaler may have skipped their steps."""
    series = window.loss_name
    track = window.series(series) if series is not None else None
    if track is None:
        return None
    values, steps = track.last(track.size), track.last_steps(track.size)
    row = next((count for count, value in enumerate(reversed(values)) if math.isfinite(value)), len(values))
    scaling = window.series("amp/scale") is not None or window.series("amp/skipped") is not None
    if row <= (NonfiniteLoss().excused_steps if scaling else 0):
        return None
    name = "The loss" if series == LOSS else series
    said = f"{name} {'was' if window.ended else 'is'} NaN or infinite since step {steps[-row]:,}"
    return NonfiniteLoss().found(
        "critical",
        said,
        f"{said}.",
        since_step=steps[-row],
        evidence={"step": steps[-row], "series": series, "value": values[-1]},
    )


def _standing_s(window: Window) -> float | None:
    """For how long no rank has reported a step, by our own clock, when that is unlike this run. It may evaluate, save
    or hang:
    the verdict must not be that nothing holds it back."""
    took = window.series("step_time_s")
    if took is None or window.ended:
        return None
    quiet = window.now - max(took.ranks.values())
    return quiet if quiet >= max(_STANDS_S, _STANDS_STEPS * max(took.last(took.size))) else None


def _healthy(window: Window, jump: Finding | None) -> Healthy:
    """With the figures of the loss, which make it believable. Those of speed it gets from who answers."""
    if not window.step:
        yet, came = ("", "came before the end") if window.ended else (" yet", "has come")
        return Healthy(opening=f"Nothing to judge{yet}: no loss, step time or gradient norm {came}")
    facts = [f"step {window.step:,}"]
    losses = _finite_losses(window)
    if losses:
        since = f" (from {window.first_loss:.4g})" if window.first_loss is not None and window.step > 1 else ""
        facts.append(f"{window.loss_name} {losses[-1]:.4g}{since}")
    standing = _standing_s(window)
    if standing is not None:
        opening = f"No step has ended for {spell_s(standing)}"
    elif window.ended:
        opening = "Nothing held this run back"
    elif window.step - window.start_step < _FEW_STEPS:
        opening = "Too early to tell, nothing wrong so far"
    else:
        opening = "Nothing holds this run back"
    return Healthy(
        opening=opening,
        facts=facts,
        closing=_new_level(window, jump),
        # without a step nothing was judged, and a page says so
        evidence={"step": window.step, **({} if standing is None else {"standing_s": standing})},
        fix="" if standing is None else STANDING_REMEDY,
        tense="was" if window.ended else "is",
        is_elsewhere=standing is None and (share_elsewhere(window) or 0.0) >= MOST,
    )


def _new_level(window: Window, jump: Finding | None) -> str:
    """What the healthy verdict adds when the loss never came back from a jump whose alert is over."""
    if jump is None:
        return ""
    expected, jumped = jump.evidence.get("expected"), jump.evidence.get("loss")
    newest = sorted(_finite_losses(window)[-_JUMP_STEPS:])
    if not (isinstance(expected, float) and isinstance(jumped, float) and newest):
        return ""
    if jump.evidence.get("series", LOSS) != window.loss_name or newest[len(newest) // 2] < 0.5 * (expected + jumped):
        return ""
    step = jump.since_step or 0
    return f" The loss did not come back from its jump to {jumped:.4g} in step {step:,}: {expected:.4g} was expected there."


def _finite_losses(window: Window) -> list[float]:
    """The values of the run's loss that are kept and are numbers: one that is none is no figure to believe a verdict
    by."""
    track = None if window.loss_name is None else window.series(window.loss_name)
    return [] if track is None else [value for value in track.last(track.size) if math.isfinite(value)]
