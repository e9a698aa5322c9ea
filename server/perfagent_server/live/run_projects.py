"""Which project a run belongs to, for pages that see some projects only. Used on the hub's thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from perfagent_server.live.subscription import Subscription

__all__ = ["RunProjects"]

_FRESH_S = 10.0  # another server may have deleted the run, and a new one of its id may be in another project
_MOST = 20_000


class RunProjects:
    """read: the projects of those runs that exist. A run that is gone keeps its last project, so that its pages can be
    told of its end."""

    def __init__(self, read: Callable[[Sequence[str]], Mapping[str, str]]) -> None:
        self._read = read
        self._known: dict[str, tuple[str, float]] = {}  # run -> (project, when it was read)

    def learn(self, runs: Iterable[str], now: float) -> None:
        """Reads the projects of the runs that are unknown, or were read long ago."""
        old = [run for run in runs if run not in self._known or now - self._known[run][1] > _FRESH_S]
        if not old:
            return
        if len(self._known) + len(old) > _MOST:
            self._known.clear()
        self._known |= {run: (project, now) for run, project in self._read(old).items()}

    def sees(self, subscription: Subscription, run: str) -> bool:
        """Whether the pages of a subscription may see a run; not while its project is unknown."""
        if subscription.projects is None:
            return True
        return run in self._known and self._known[run][0] in subscription.projects
