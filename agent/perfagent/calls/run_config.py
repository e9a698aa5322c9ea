"""A run's configuration and tags, which can do what those of other trackers can (`run.config.lr`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from perfagent.calls.arguments import as_dict

__all__ = ["RunConfig", "Tags"]


class RunConfig(dict[str, Any]):
    """What the user passed as configuration. `config["lr"]` and `config.lr` are the same entry; both may be read and
    set."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            there = ", ".join(map(str, self)) or "no entries"
            raise AttributeError(f"the run's configuration has no {name!r}; it has {there:.500}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def update(self, *given: Any, allow_val_change: Any = None, **more: Any) -> None:  # noqa: ARG002 - of wandb; always allowed
        """As of a dict; a dataclass or a namespace is taken as well. allow_val_change: accepted for the sake of scripts
        that pass it to another tracker, and always true."""
        for source in given:
            super().update(
                source if isinstance(source, (dict, list, tuple)) or hasattr(source, "keys") else as_dict(source)
            )
        super().update(more)

    def setdefaults(self, entries: Any) -> None:
        """Adds the entries that are not there yet, as in W&B."""
        self.update({name: value for name, value in as_dict(entries).items() if name not in self})

    def as_dict(self) -> dict[str, Any]:
        return dict(self)


class Tags(list[str]):
    """A copy of a run's tags. A tuple may be added: in W&B they are one."""

    def __add__(self, more: Iterable[str]) -> Tags:  # type: ignore[override]
        return Tags([*self, *more])

    def __radd__(self, before: Iterable[str]) -> Tags:
        return Tags([*before, *self])
