"""What a page asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from perfagent.wire import FAMILIES

__all__ = ["Subscription"]

_MAX_SUBSCRIBED = 4096
_MOST_NAMED = 256  # runs of a page that sees some projects only; with more it watches all of these projects
_FORM = (
    'send {"subscribe": {"runs": [...], "names": [...], "bands": true|false}} '
    'or {"subscribe": {"fleet": true, "names": [...]}}'
)


@dataclass(frozen=True, slots=True)
class Subscription:
    """What a page wants. runs, names: empty is all; a name that ends in "*" is a prefix. bands: over ranks instead of
    samples. fleet: the last values of all runs, of exactly these names. projects: those that its viewer may see, whatever
    it wants; None: all."""

    runs: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    bands: bool = False
    fleet: bool = False
    projects: frozenset[str] | None = None

    @classmethod
    def from_message(cls, message: object, projects: frozenset[str] | None = None) -> Subscription:
        """From {"subscribe": {...}}. Raises ValueError with a sentence."""
        wanted = message.get("subscribe") if isinstance(message, dict) else None
        if not isinstance(wanted, dict):
            raise ValueError(_FORM)
        names = _texts(wanted, "names")
        if wanted.get("fleet") is True:
            if wanted.get("runs") or wanted.get("bands"):
                raise ValueError('"fleet" is for all runs, without bands; leave "runs" and "bands" out')
            if any(name.endswith("*") for name in names):
                raise ValueError('"names" of a fleet must be whole names, without "*"')
            return cls(names=names, fleet=True, projects=projects)
        runs = _or_all(_texts(wanted, "runs"))
        return cls(runs, _or_all(names), wanted.get("bands") is True, projects=projects)

    def watched(self) -> frozenset[str]:
        """What its pages show as it comes: a run's id, "*" for all, "/PROJECT" for all of a project, or "RUN/PROJECT" for a
        run if it is in that project (no id has a slash). A fleet shows nothing so."""
        if self.fleet:
            return frozenset()
        if self.projects is None:
            return self.runs or frozenset("*")
        runs = self.runs if 0 < len(self.runs) <= _MOST_NAMED else ("",)
        return frozenset(f"{run}/{project}" for run in runs for project in self.projects)

    def wants_run(self, run: str) -> bool:
        return not self.runs or run in self.runs

    def wants_name(self, name: str) -> bool:
        """All names are all but those of layers, which are many: a page asks for them by name or prefix."""
        if name in self.names:
            return True
        if not self.names:
            return name.partition("/")[0] + "/" not in FAMILIES
        return any(name.startswith(prefix[:-1]) for prefix in self.names if prefix.endswith("*"))


def _texts(wanted: dict[str, Any], key: str) -> frozenset[str]:
    texts = wanted.get(key, [])
    if texts == "*":
        texts = ["*"]
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f'"{key}" must be a list of texts; an empty list, or "*", is all of them')
    if len(texts) > _MAX_SUBSCRIBED:
        raise ValueError(
            f'"{key}" has {len(texts)} entries; at most {_MAX_SUBSCRIBED} are allowed, and an empty list is all of them'
        )
    return frozenset(texts)


def _or_all(texts: frozenset[str]) -> frozenset[str]:
    return frozenset() if "*" in texts else texts
