"""A run's configuration: a dict whose entries are attributes as well, as in other trackers (`run.config.lr`)."""

from __future__ import annotations

from typing import Any

from perfagent.arguments import as_dict

__all__ = ["RunConfig"]


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
