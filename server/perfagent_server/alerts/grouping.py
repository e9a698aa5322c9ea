"""Groups findings of the same cause into a single alert, and decides which of them leads.

A NaN in the loss makes the gradients NaN in the same step, on every rank; a process that ran out of memory also
crashed. The leading rule's alert takes the follower in. When the follower was seen first (another rank's frame was
faster), its alert changes its lead and keeps its id: the row says so, and no channel is notified twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from perfagent_server.alerts.life import Change, Machine

__all__ = ["FAMILIES", "Family", "group"]


@dataclass(frozen=True, slots=True)
class Family:
    """lead and follower: rule ids. same_step: a follower whose trouble began in another step than the lead's, and whose
    alert fired first, has its own cause."""

    lead: str
    follower: str
    same_step: bool


FAMILIES: tuple[Family, ...] = (
    Family("nonfinite_loss", "nonfinite_gradient", same_step=True),
    Family("oom_observed", "process_crash", same_step=False),
)


def group(change: Change, rule: str, machines: Mapping[str, Machine]) -> Change:
    """The change to carry out instead of a firing, when another alert of the same cause is open already. An alert that
    opens again is a firing like any other: its follower, or its lead, may have fired in the meantime."""
    if change.kind not in ("fire", "reopen"):
        return change
    for family in FAMILIES:
        lead, follower = machines.get(family.lead), machines.get(family.follower)
        if lead is None or follower is None or lead.state != "firing" or follower.state != "firing":
            continue
        if lead.finding is None or follower.finding is None or follower.absorbed:
            continue
        if rule == family.lead:
            if family.same_step and follower.finding.since_step != lead.finding.since_step:
                continue
            lead.alert, lead.opening = follower.alert, follower.opening
        elif rule != family.follower:
            continue
        follower.alert, follower.absorbed = lead.alert, True
        lead.finding.ranks = sorted({*lead.finding.ranks, *follower.finding.ranks})
        lead.finding.evidence = {**lead.finding.evidence, "also": [follower.finding.message]}
        return Change("update", lead.alert, lead.finding, change.step, change.time, opening=lead.opening)
    return change
