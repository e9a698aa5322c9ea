"""The sender's thread polls a run: its identity, logs that wait for a step, the cost of the agent, probes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from perfagent.hooks.selection.models import has_optimizer

if TYPE_CHECKING:
    from perfagent.causes.investigator import Investigator
    from perfagent.delivery.handoff import Handoff, Source
    from perfagent.hooks.trained import Trained
    from perfagent.probes.scheduler import ScheduledProbes
    from perfagent.samplers.sampler import Sampler
    from perfagent.step.governor import Governor
    from perfagent.step.state import StepState

__all__ = ["Polling"]

_OVERHEAD = ("agent/overhead_pct",)
_EVERY_S = 0.5
"""One pace for all, so that most ticks poll nothing."""
_SEARCH_S = 60.0
"""Between two searches for auxiliary models; the first one is made where the hooks are put in place."""


class Polling:
    """sampler: stops where this process turns out to be a launcher's, whose ranks are sampled."""

    def __init__(
        self, progress: StepState, handoff: Handoff, governor: Governor, trained: Trained, investigator: Investigator
    ) -> None:
        self._progress, self._handoff, self._governor = progress, handoff, governor
        self._trained, self._investigator = trained, investigator
        self._probes: ScheduledProbes | None = None
        self._probing: Source | None = None
        self._search_due = time.monotonic() + _SEARCH_S
        self.sampler: Sampler | None = None

    def install(self) -> None:
        self._handoff.add_source(self.poll, every_s=_EVERY_S)
        self._handoff.imports.append("perfagent.probes.scheduler")
        self._probing = self._handoff.add_source(self.probe, every_s=_EVERY_S)
        self._handoff.add_source(self._investigator.poll, every_s=_EVERY_S)

    def poll(self) -> None:
        p, identity = self._progress, self._handoff.identity
        if identity.joining is not None or not identity.known:
            identity.poll()
        group = identity.group
        if group is not None and p.last is None and self.sampler is not None and group.exists():
            self.sampler.stop()
        if p.early and p.early[0].waits_too_long():
            self.settle_waiting()
        self._search_again()
        own_ns = p.spent_ns(self._handoff.logged)
        gradients_ns = p.costs.pass_ns + p.costs.report_ns + p.costs.device_ns
        share = self._governor.report(own_ns, gradients_ns, self._handoff.cpu_s, p.completed)
        if share is not None:
            p.come_back()
            self._handoff.rows.append((p.logged_at(), time.time(), time.monotonic(), _OVERHEAD, (share,)))

    def _search_again(self) -> None:
        """Now and then repeats the search for auxiliary models, and for a lost model."""
        finder, at = self._trained.finder, time.monotonic()
        if self._progress.selection.has_lost_model():
            self._investigator.add(self._progress.selection)
        if finder is not None and at >= self._search_due:
            self._search_due = at + _SEARCH_S
            self._investigator.add(finder)

    def settle_waiting(self) -> None:
        """Gives logs that waited for a first step the one that is theirs without it."""
        p = self._progress
        if p.awaits_optimizer():
            p.settle_unstepped(by_log=not has_optimizer())
        else:
            p.settle_early(None)

    def probe(self) -> None:
        """Rare measurements of a step, from the first step on."""
        if self._probes is None:
            if self._progress.last is None:
                return
            from perfagent.probes.scheduler import ScheduledProbes

            self._probes = ScheduledProbes(self._investigator, self._handoff, self._trained.model, self._trained.device)
        idle_until = self._probes.poll()
        if self._probing is not None:
            self._probing.due = max(self._probing.due, idle_until)

    def close(self) -> None:
        if self._probes is not None:
            self._probes.close()
