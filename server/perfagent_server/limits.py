"""How much one sender may send: the server's settings, and what a key has of its own instead.

No honest job meets the defaults; they keep one script with a bug from taking the whole server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from perfagent.errors import ConfigError

__all__ = ["LIMITS", "Limits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one sender: a key, or a run that sends without one. requests_per_s, samples_per_s, bytes_per_s: on average over
    ten seconds; bytes as they are sent. runs_per_hour: runs that it may begin, a tenth of them at once. math.inf is no
    limit. Raises ConfigError for what is not above 0."""

    requests_per_s: float = 2_000.0
    samples_per_s: float = 500_000.0
    bytes_per_s: float = 64.0 * 2**20
    runs_per_hour: float = 20_000.0

    def __post_init__(self) -> None:
        for name in LIMITS:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0 (inf is no limit)")

    def but(self, own: Mapping[str, Any]) -> Limits:
        """These, with a key's own instead. Raises ConfigError for a name or value that is none."""
        for name, value in own.items():
            if name not in LIMITS:
                raise ConfigError(f"there is no limit {name[:80]!r}; allowed are {', '.join(LIMITS)}")
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ConfigError(f"{name} is {value!r:.80}; it must be a number above 0 (inf is no limit)")
        return replace(self, **{name: float(value) for name, value in own.items()})

    def halved(self) -> Limits:
        return Limits(**{name: getattr(self, name) / 2 for name in LIMITS})


LIMITS = tuple(field.name for field in fields(Limits))
