"""One verdict for a run: it is healthy, or the one thing that holds it back.

A decision tree over what the rules found. Sick comes before slow: a run that crashed, or trains on NaN, has no use for
advice on its data loader. Among slow ones, the cause comes before what follows from it: a loader that keeps the step
waiting is also why the GPU idles. A run that ended keeps the verdict of how it ended, or of what held it back at its
end or most of the time.
"""

from __future__ import annotations

import math

from perfagent.wire import LOSS, SEVERITIES, Finding, healthy
from perfagent_server.alerts.life import Machine
from perfagent_server.diagnosis.remedies import ELSEWHERE_REMEDY, REMEDIES, STANDING_REMEDY
from perfagent_server.rules.evaluator import USER_ALERT, Evaluator
from perfagent_server.rules.loss import LossSpike, NonfiniteLoss
from perfagent_server.rules.utilization import share_elsewhere, spell_s
from perfagent_server.rules.window import Window

__all__ = ["ORDER", "findings", "verdict"]

# The tree, written as the order in which its questions are asked.
ORDER: tuple[str, ...] = (
    # Is it dead, and of what?
    "oom_observed", "process_crash",
    # Does it compute with numbers?
    "nonfinite_loss", "nonfinite_gradient",
    # Does it move, and is it heard?
    "hang", "xid", "ecc", "lost_contact",
    # Does it learn?
    "loss_divergence", "grad_norm_explosion", "loss_scale_collapse", "loss_spike",
    # Will it go on?
    "oom_imminent", "disk_full", "gpu_memory_leak", "host_memory_leak", "checkpoint_stale",
    # Is it fast? The cause before what follows from it: one slow rank makes all wait in communication.
    "straggler", "stage_imbalance", "data_bound", "h2d_bound", "sync_bound", "comm_bound", "cpu_bottleneck", "host_bound",
    "throttling", "throughput_regression", "step_time_tail", "low_gpu_utilization",
)  # fmt: skip
_PLACE = {rule: place for place, rule in enumerate(ORDER)}
_FEW_STEPS = 10
"""So many steps no rule about speed or learning has seen enough of."""
_STANDS_S = 60.0
_STANDS_STEPS = 5.0
"""From so long on, and so many times the longest of the newest steps, the verdict says that no step ends any more."""
_MOST = 0.5
"""Of a step, where its time went: more than all the rest together."""
_SAID_BY_PEOPLE = len(ORDER)  # rules that are not in the tree come before the user's own alerts, and both after it


def findings(judge: Evaluator) -> list[Finding]:
    """What is so now, worst first; for a run that ended also what was so at its end, or most of the time it ran."""
    found = judge.findings()
    if judge.window.ended:
        known = {finding.rule for finding in found}
        found += [
            one for machine in judge.machines.values() if (one := _held(machine)) is not None and one.rule not in known
        ]
    return sorted(found, key=_rank)


def verdict(judge: Evaluator, *, lost: bool = False) -> Finding:
    """The first finding of the tree; info-level ones do not hold a run back. lost: nothing is heard of the run any
    more. One without an agent raises no alert by that, since most such programs just end; its verdict says so."""
    window = judge.window
    for finding in findings(judge):
        told = finding.rule == "process_crash" and window.state in ("preempted", "failed")
        if finding.severity != "info" or told:
            if finding.rule.startswith(USER_ALERT):
                continue
            return finding
    sick = _not_finite(window)
    if sick is not None:
        return sick
    if lost:
        return _fell_silent(window)
    elsewhere, standing = share_elsewhere(window) or 0.0, _standing_s(window)
    found = healthy(_figures(judge, elsewhere, standing))
    # without a step nothing was judged, and a page says so
    found.evidence = {"step": window.step} if window.step else {}
    if standing is not None:
        found.evidence["standing_s"] = standing
        found.fix = STANDING_REMEDY
    elif elsewhere >= _MOST:
        found.evidence["other_share_pct"] = 100 * elsewhere
        found.fix = ELSEWHERE_REMEDY
    return found


def _rank(finding: Finding) -> tuple[bool, int, int]:
    place = _PLACE.get(finding.rule, _SAID_BY_PEOPLE + (finding.rule == USER_ALERT))
    return finding.severity == "info", place, -SEVERITIES.index(finding.severity)


def _held(machine: Machine) -> Finding | None:
    """The finding of a rule that was firing when the run ended, or held in at least half of the steps it judged."""
    held = machine.open_at_end or (machine.judged and 2 * machine.hits >= machine.judged)
    return machine.finding if held else None


def _fell_silent(window: Window) -> Finding:
    after = f" after step {window.step:,}" if window.step else ""
    return Finding(
        rule="lost_contact",
        severity="info",
        message=f"This run went silent{after}, and did not say that it ended.",
        since_step=window.step or None,
        fix='A script that sends its own rows ends its run with `{"run": "NAME", "state": "finished"}`. If it should still be '
        "running, look at its process and at the network between it and this server.",
    )


def _not_finite(window: Window) -> Finding | None:
    """What to say when the loss is no number and no alert says so (somebody closed it): never that the run is healthy.
    Nothing of as few values in a row as the rule excuses, where a GradScaler may have skipped their steps."""
    series = window.loss_name
    track = window.track(series) if series is not None else None
    if track is None:
        return None
    values, steps = track.last(track.size), track.last_steps(track.size)
    row = next((count for count, value in enumerate(reversed(values)) if math.isfinite(value)), len(values))
    scaling = window.track("amp/scale") is not None or window.track("amp/skipped") is not None
    if row <= (NonfiniteLoss().excused_steps if scaling else 0):
        return None
    name = "The loss" if series == LOSS else series
    return Finding(
        rule=NonfiniteLoss.id,
        severity="critical",
        message=f"{name} {'was' if window.ended else 'is'} NaN or infinite since step {steps[-row]:,}.",
        since_step=steps[-row],
        evidence={"step": steps[-row], "series": series, "value": values[-1]},
        fix=REMEDIES[NonfiniteLoss.id],
    )


def _standing_s(window: Window) -> float | None:
    """For how long no rank has reported a step, by our own clock, when that is unlike this run. It may evaluate, save
    or hang:
    the verdict must not be that nothing holds it back."""
    took = window.track("step_time_s")
    if took is None or window.ended:
        return None
    quiet = window.now - max(took.ranks.values())
    return quiet if quiet >= max(_STANDS_S, _STANDS_STEPS * max(took.last(took.size))) else None


def _figures(judge: Evaluator, elsewhere: float, standing: float | None) -> str:
    """The healthy verdict's sentence, with the figures that make it believable. elsewhere: `share_elsewhere`; standing:
    `_standing_s`."""
    window = judge.window
    if not window.step:
        yet, came = ("", "came before the end") if window.ended else (" yet", "has come")
        return f"Nothing to judge{yet}: no loss, step time or gradient norm {came}."
    parts = [f"step {window.step:,}"]
    name = window.loss_name
    losses = _finite_losses(window)
    if losses:
        loss = losses[-1]
        since = f" (from {window.first_loss:.4g})" if window.first_loss is not None and window.step > 1 else ""
        parts.append(f"{name} {loss:.4g}{since}")
    took = window.track("step_time_s")
    if took is not None:
        parts.append(f"{spell_s(sorted(took.last(32))[len(took.last(32)) // 2])} a step")
    if standing is not None:
        said = f"No step has ended for {spell_s(standing)}"
    elif elsewhere >= _MOST:
        tense = "was" if window.ended else "is"
        said = f"Most of the step ({100 * elsewhere:.0f} %) {tense} outside of data, forward, backward and optimizer"
    elif window.ended:
        said = "Nothing held this run back"
    elif window.step - window.start_step < _FEW_STEPS:
        said = "Too early to tell, nothing wrong so far"
    else:
        said = "Nothing holds this run back"
    return f"{said}: {', '.join(parts)}.{_new_level(judge)}"


def _new_level(judge: Evaluator) -> str:
    """What the healthy verdict adds when the loss never came back from a jump whose alert is over."""
    machine = judge.machines.get(LossSpike.id)
    if machine is None or machine.finding is None or machine.state == "firing":
        return ""
    evidence = machine.finding.evidence
    expected, jumped = evidence.get("expected"), evidence.get("loss")
    newest = sorted(_finite_losses(judge.window)[-LossSpike().short :])
    if not (isinstance(expected, float) and isinstance(jumped, float) and newest):
        return ""
    if evidence.get("series", LOSS) != judge.window.loss_name or newest[len(newest) // 2] < 0.5 * (expected + jumped):
        return ""
    step = machine.finding.since_step or 0
    return f" The loss did not come back from its jump to {jumped:.4g} in step {step:,}: {expected:.4g} was expected there."


def _finite_losses(window: Window) -> list[float]:
    """The values of the run's loss that are kept and are numbers: one that is none is no figure to believe a verdict
    by."""
    track = None if window.loss_name is None else window.track(window.loss_name)
    return [] if track is None else [value for value in track.last(track.size) if math.isfinite(value)]
