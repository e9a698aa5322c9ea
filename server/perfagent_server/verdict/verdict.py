"""One verdict for a run: it is healthy, or the one thing that holds it back.

A decision tree over what the rules found: what spoils the result comes before what wastes time, however much of it, as a
run that diverges has no use for advice on its data loader; of both, the most severe first, then in the order of the
rules. Among slow ones, the cause comes before what follows from it: a loader that keeps the step waiting is also why the
GPU idles.
Where no rule found anything, the wall time is asked: a run that spends a third of it beside training is not called
healthy. A run that ended keeps the verdict of how it ended, or of what held it back at its end or most of the time,
and says what else happened in it. Pure: a window and findings in, a finding out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from perfagent.wire import LOSS, SEVERITIES, Finding
from perfagent_server.rules.life.lost_contact import LostContact
from perfagent_server.rules.life.process_crash import THREAD_DIED
from perfagent_server.rules.loss.loss_divergence import LossDivergence
from perfagent_server.rules.loss.loss_spike import LossSpike
from perfagent_server.rules.loss.nonfinite_loss import NonfiniteLoss
from perfagent_server.rules.rule import USER_ALERT, Question, Rule
from perfagent_server.rules.speed.bounds import Bound, what_bounds
from perfagent_server.rules.texts import Language, sentence
from perfagent_server.rules.texts.spoken import spoken
from perfagent_server.rules.window import Window
from perfagent_server.verdict.healthy import Healthy
from perfagent_server.verdict.time_shares import SHARE_RULES, TimeShares, held_back_by, is_good_share, time_shares

__all__ = ["Happened", "verdict", "worst_first"]

_FEW_STEPS = 10
"""So many steps no rule about speed or learning has seen enough of."""
_JUMP_STEPS = 9
"""So many newest losses say where the loss is now."""
_CAUSES = ("straggler", "stage_imbalance")
_NEVER_CLEARED = ("wrong_optimizer", "never cleared")
_SPOILT = (Question.ARE_ITS_NUMBERS_FINITE, Question.DOES_IT_LEARN)
_STILL = ("frozen_training", "unchanged_tensor")
_PAUSES = {"eval_bound": "evaluations", "checkpoint_bound": "saves"}
_SAYS_THE_BOUND = "compute_bound"
_GOOD_PART_PCT = 100 / 3  # of the time of a step, that a remark promises
_MOST_WAITS_PCT = 70.0  # of the time in which some task waits for a core, as a remark says
_ENDS = ("oom_observed", "process_crash", "lost_contact")
"""They say themselves how the run ended."""
_MOST_SAID = 3  # remarks, and what else happened, in one verdict


@dataclass(frozen=True, slots=True)
class Happened:
    """An alert of this attempt that is over. until_step: when it was resolved."""

    finding: Finding
    until_step: int | None


def worst_first(findings: Iterable[Finding], rules: Mapping[str, Rule]) -> list[Finding]:
    """What spoils the result, then what wastes time; of both the most severe first, and of one severity in the order of the
    rules. What is only info comes last. Findings of rules that are not ours come after those of the rules, and the user's
    own alerts after both. Gradients that are never cleared come before what they do to the loss and to gradients."""

    places = {rule: place for place, rule in enumerate(rules)}

    def rank(finding: Finding) -> tuple[object, ...]:
        rule = rules.get(finding.rule)
        whose = 0 if rule is not None else 1 + (finding.rule == USER_ALERT)
        wastes = rule is not None and rule.question is Question.IS_IT_FAST
        severity = SEVERITIES.index(finding.severity)
        return finding.severity == "info", whose, wastes, -severity, places.get(finding.rule, 0)

    ordered = sorted(findings, key=rank)
    root = next((place for place, one in enumerate(ordered) if (one.rule, one.cause) == _NEVER_CLEARED), None)
    if root is not None:
        asks = [rule.question if (rule := rules.get(one.rule)) is not None else None for one in ordered[:root]]
        first = next((place for place, question in enumerate(asks) if question in _SPOILT), root)
        ordered.insert(first, ordered.pop(root))
    return ordered


def verdict(
    window: Window,
    findings: Sequence[Finding],
    *,
    happened: Sequence[Happened] = (),
    jump: Finding | None = None,
    lost: bool = False,
    language: Language = "en",
) -> Finding:
    """The first finding, else what the script says of itself; what is only info does not hold a run back, unless it is a
    share of its time.

    findings: worst first. happened: alerts that are over; jump: the loss's last jump, whose alert is over. lost: nothing
    is heard of the run any more. One without an agent raises no alert by that, since most such programs just end; its
    verdict says so. language: of what is said beside the finding, which stays in English.
    """
    shares, users = time_shares(window), [one for one in findings if _is_users_alarm(one)]
    found = _first(window, findings) or _not_finite(window)
    if found is None and lost:
        found = _fell_silent(window, users)
    if found is None:
        found = _lost_again(window) or next(iter(users), None)
        found = found or _stands_still(findings) or next(filter(_is_share, findings), None)
        found = found or held_back_by(window, shares)
    elif found.rule == LossSpike.id or _is_about_time(window, found):
        grown = _lost_again(window)  # a jump that became much more than a jump, or a loss that no alert tells of
        found = found if grown is None else replace(grown, severity=found.severity)
    if found is None:
        return _healthy(window, findings, shares, happened, jump, language)
    known = {(one.finding.rule, one.finding.since_step) for one in happened}
    open_at_end = [
        Happened(one, None) for one in findings if _is_trouble(one) and (one.rule, one.since_step) not in known
    ]
    said = [*_how_it_ended(window, found, language), *_said_of(window, found, [*happened, *open_at_end], language)]
    if (still := _stands_still(findings)) and still.rule != found.rule and still.title:
        said.append(_title(still, language))
    evidence = {**found.evidence, **_wall_time(shares), **_proof(window, found, language)}
    return replace(found, message=" ".join([found.message, *said]), evidence=evidence)


def _how_it_ended(window: Window, found: Finding, language: Language) -> list[str]:
    if not window.ended or (found.rule in _ENDS and found.cause != THREAD_DIED):
        return []
    return [sentence("run_end", language, how=window.state, step=window.step)]


def _title(finding: Finding, language: Language) -> str:
    """As a sentence."""
    return sentence("full_stop", language, title=spoken(finding, language).title.rstrip(".") or finding.rule)


def _is_trouble(finding: Finding) -> bool:
    return finding.severity != "info" and finding.rule != USER_ALERT


def _is_users_alarm(finding: Finding) -> bool:
    """What a script says of itself holds a run back where no rule says more: lists call the run by it."""
    return finding.severity != "info" and finding.rule == USER_ALERT


def _stands_still(findings: Sequence[Finding]) -> Finding | None:
    """A remark that the model does not move: it comes before any remark on time."""
    return next((one for one in findings if one.severity == "info" and one.rule in _STILL), None)


def _is_share(finding: Finding) -> bool:
    """Whether a remark says that a good part of the time is no training, or that the run waits for the cores most of it:
    then the run is not called healthy."""
    gain_pct, waits_pct = finding.gain_pct or 0.0, finding.evidence.get("pressure_pct", 0.0)
    return is_good_share(finding) or (
        finding.severity == "info" and (gain_pct >= _GOOD_PART_PCT or waits_pct >= _MOST_WAITS_PCT)
    )


def _first(window: Window, findings: Sequence[Finding]) -> Finding | None:
    for finding in findings:
        is_end = finding.rule == "process_crash" and window.state in ("preempted", "failed")
        if (finding.severity != "info" or is_end) and finding.rule != USER_ALERT:
            return _largest_share(window, finding, findings)
    return None


def _largest_share(window: Window, first: Finding, findings: Sequence[Finding]) -> Finding:
    """Of what takes time, the finding that takes more than twice as much of it as the first one. A rank that all others
    wait for stays the cause of their waiting."""

    def share(finding: Finding) -> float:
        said = finding.evidence.get("share_pct", finding.gain_pct)
        return float(said) if isinstance(said, (int, float)) else 0.0

    if not _is_about_time(window, first) or first.rule in _CAUSES or not share(first):
        return first
    slow = [
        one for one in findings if _is_about_time(window, one) and (one.severity != "info" or one.rule in SHARE_RULES)
    ]
    largest = max(slow, key=share)
    return largest if share(largest) > 2 * share(first) else first


def _is_about_time(window: Window, finding: Finding) -> bool:
    rule = window.plan.rules.get(finding.rule)
    return rule is not None and rule.question == Question.IS_IT_FAST


def _wall_time(shares: TimeShares | None) -> dict[str, object]:
    return {} if shares is None else shares.evidence()


def _proof(window: Window, found: Finding, language: Language) -> dict[str, object]:
    """What would show that the fix worked, and what the gain takes for granted."""
    rule = window.plan.rules.get(found.rule)
    if found.rule in _PAUSES:
        return {"proof": sentence(f"proof_{_PAUSES[found.rule]}", language)}
    if found.gain_pct is not None:
        return {"assumes": sentence("assumes", language), "proof": sentence("proof_faster", language)}
    if rule is None:
        return {}
    if rule.question == Question.IS_IT_FAST:
        return {"proof": sentence("proof_shown", language)}
    if rule.question in (Question.DOES_IT_LEARN, Question.WILL_IT_GO_ON):
        return {"proof": sentence("proof_learns", language)}
    is_past = not found.since_step or window.step > found.since_step
    return {} if is_past else {"proof": sentence("proof_past", language, step=found.since_step)}


def _said_of(window: Window, found: Finding | None, happened: Sequence[Happened], language: Language) -> list[str]:
    """What else happened in a run that has ended, the newest last."""
    others = [one for one in happened if found is None or one.finding.rule != found.rule]
    others.sort(key=lambda one: one.finding.since_step or 0)
    if not window.ended or not others:
        return []
    said = []
    for one in others[-_MOST_SAID:]:
        began, until, told = one.finding.since_step, one.until_step, spoken(one.finding, language)
        title = (told.title or told.message).rstrip(".") or told.rule
        until = until if until is not None and until > (began or 0) else None
        said.append(sentence("happened", language, title=title, rule=told.rule, began=began, until=until))
    return [sentence("also_happened", language, happened=said, more=len(others) - len(said) or None)]


def _fell_silent(window: Window, users: Sequence[Finding]) -> Finding:
    """users: the script's own alerts that are open, worst first. A list calls the run by the worst of them."""
    rule = window.plan.rules.get(
        LostContact.id, LostContact()
    )  # if it is switched off, the run fell silent all the same
    return rule.found(
        "info",
        cause="no agent",
        since_step=window.step or None,
        evidence={
            "step": window.step or None,
            "open_alerts": [{"kind": "alert", "severity": one.severity, "title": one.title} for one in users],
        },
    )


def _not_finite(window: Window) -> Finding | None:
    """What to say when the loss is not finite and no alert says so (somebody closed it): never that the run is healthy.
    Nothing of as few values in a row as the rule excuses, where a GradScaler may have skipped their steps."""
    series = window.loss_name
    track = window.series(series) if series is not None else None
    if track is None:
        return None
    values, steps = track.last(track.size), track.last_steps(track.size)
    row = next((count for count, value in enumerate(reversed(values)) if math.isfinite(value)), len(values))
    scaling = window.series("amp/scale") is not None or window.series("amp/skipped") is not None
    rule = window.plan.rules.get(NonfiniteLoss.id)
    if not isinstance(rule, NonfiniteLoss):  # it is switched off, and no page says that the run is healthy
        rule = NonfiniteLoss()
    if row <= (rule.excused_steps if scaling else 0):
        return None
    step = steps[-row]
    evidence = {"step": step, "series": series, "value": values[-1]}
    return rule.found("critical", cause="no alert", since_step=step, evidence=evidence)


def _lost_again(window: Window) -> Finding | None:
    rule = window.plan.rules.get(LossDivergence.id)
    return rule.lost_again(window) if isinstance(rule, LossDivergence) else None


def _healthy(
    window: Window,
    findings: Sequence[Finding],
    shares: TimeShares | None,
    happened: Sequence[Happened],
    jump: Finding | None,
    language: Language,
) -> Healthy:
    """With the figures of the loss, which make it believable. Those of speed it gets from who answers."""
    if not window.step:
        return Healthy(language=language, opening="nothing_to_judge_at_end" if window.ended else "nothing_to_judge")
    facts = [sentence("step", language, step=window.step)]
    losses = _finite_losses(window)
    if losses:
        first = window.first_loss if window.step > 1 else None
        facts.append(sentence("loss", language, series=window.loss_name, loss=losses[-1], first=first))
    few = window.step - window.start_step < _FEW_STEPS
    bound = what_bounds(window)
    bounds = None if bound is None else bound.said(language)
    remarks = [
        one
        for one in findings
        if one.severity == "info" and one.title and one.rule not in (USER_ALERT, _SAYS_THE_BOUND)
    ][:_MOST_SAID]
    slows = next((one for one in remarks if _is_about_time(window, one)), None)
    much = "nothing" if slows is None else "little"
    opening = "too_few_steps" if few else f"{much}_{'held' if window.ended else 'holds'}_back"
    return Healthy(
        language=language,
        opening=opening,
        facts=facts,
        remarks=[
            *([] if bounds is None else [bounds.message]),
            *_new_level(window, jump, language),
            *(_title(one, language) for one in remarks),
            *_said_of(window, None, happened, language),
        ],
        # without a step, or with few, nothing was judged, and whoever shows it says so
        evidence={
            "step": window.step,
            **({"judged": False} if few else {}),
            **_wall_time(shares),
            **({} if bound is None else _bound(bound)),
        },
        fix=spoken(slows, language).fix if slows is not None else "" if bounds is None else bounds.fix,
    )


def _bound(bound: Bound) -> dict[str, object]:
    return {
        "bound_by": bound.kind,
        "shares_pct": {kind: round(share, 1) for kind, share in bound.shares_pct.items()},
        "step_p50_s": bound.step_p50_s,
        "step_p90_s": bound.step_p90_s,
    }


def _new_level(window: Window, jump: Finding | None, language: Language) -> list[str]:
    """What the healthy verdict adds when the loss never came back from a jump whose alert is over."""
    if jump is None:
        return []
    expected, jumped = jump.evidence.get("expected"), jump.evidence.get("loss")
    newest = sorted(_finite_losses(window)[-_JUMP_STEPS:])
    if not (isinstance(expected, float) and isinstance(jumped, float) and newest):
        return []
    if jump.evidence.get("series", LOSS) != window.loss_name or newest[len(newest) // 2] < 0.5 * (expected + jumped):
        return []
    return [sentence("loss_jumped", language, loss=jumped, step=jump.since_step or 0, expected=expected)]


def _finite_losses(window: Window) -> list[float]:
    """The values of the run's loss that are kept and are numbers: one that is none is no figure to believe a verdict
    by."""
    track = None if window.loss_name is None else window.series(window.loss_name)
    return [] if track is None else [value for value in track.last(track.size) if math.isfinite(value)]
