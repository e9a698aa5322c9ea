"""Groups findings of the same cause into a single alert, and decides which of them leads.

A NaN in the loss makes the gradients NaN in the same step, on every rank; a process that ran out of memory also
crashed. The leading rule's alert takes the follower in. When the follower was seen first (another rank's frame was
faster), its alert changes its lead and keeps its id: the row says so, and no channel is notified twice.
"""

from __future__ import annotations

from collections.abc import Mapping

from perfagent_server.alerts.state_machine import Change, Machine
from perfagent_server.rules.rule import Rule

__all__ = ["group"]


def group(change: Change, key: str, machines: Mapping[str, Machine], rules: Mapping[str, Rule]) -> Change:
    """The change to carry out instead of a firing, when another alert of the same cause is open already. An alert that
    opens again is a firing like any other: its follower, or its lead, may have fired in the meantime. key: of the
    machine that changed."""
    if change.kind not in ("fire", "reopen"):
        return change
    for rule in rules.values():
        for lead in rule.joins:
            if key in (lead, rule.id):
                joined = _join(change, key, machines.get(lead), machines.get(rule.id), same_step=rule.same_step)
                if joined is not None:
                    return joined
    return change


def _join(
    change: Change, key: str, lead: Machine | None, follower: Machine | None, *, same_step: bool
) -> Change | None:
    """The update of the leading alert that takes the follower's in; None if the two are not open together, or began in
    different steps although they must not."""
    if lead is None or follower is None or lead.state != "firing" or follower.state != "firing":
        return None
    if lead.finding is None or follower.finding is None or follower.absorbed:
        return None
    if key == lead.rule:
        # a follower that fired first, and whose trouble began in another step, has its own cause
        if same_step and follower.finding.since_step != lead.finding.since_step:
            return None
        lead.alert, lead.opening = follower.alert, follower.opening
    follower.alert, follower.absorbed = lead.alert, True
    lead.finding.ranks = sorted({*lead.finding.ranks, *follower.finding.ranks})
    lead.finding.evidence = {**lead.finding.evidence, "also": [follower.finding.message]}
    return Change("update", lead.alert, lead.finding, change.step, change.time, opening=lead.opening)
