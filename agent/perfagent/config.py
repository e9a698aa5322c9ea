"""What the agent was told: one typed value, made once per run from arguments and environment, and passed in.

`AgentConfig.from_env()` is the only function of the agent that reads settings from `os.environ` (what a launcher tells
about ranks is read in identity.py). An argument wins over the environment, the environment over the default.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from perfagent.errors import ConfigError
from perfagent.naming import identity_problem

__all__ = ["DEFAULT_SERVER", "AgentConfig"]

DEFAULT_SERVER = "http://127.0.0.1:8420"


def _default_state_dir() -> Path:
    return Path("~/.local/state/perfagent").expanduser()


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """Settings of the agent in one process."""

    server: str = DEFAULT_SERVER
    """Base address of the server, without a trailing slash. PERFAGENT_SERVER."""
    api_key: str | None = field(default=None, repr=False)
    """Key with the ingest scope; None where the server asks for none (loopback). PERFAGENT_API_KEY."""
    project: str = "default"
    """Project that the run belongs to. PERFAGENT_PROJECT."""
    run_id: str | None = None
    """The run's id, when the user names it: the same id again is a new attempt of that run. PERFAGENT_RUN_ID."""
    record: Path | None = None
    """Folder to record into instead of sending: offline use, uploaded later by `perfagent sync`. PERFAGENT_RECORD."""
    disabled: bool = False
    """Everything is a silent no-op. PERFAGENT_DISABLED=1."""
    state_dir: Path = field(default_factory=_default_state_dir)
    """Root of the spool (folders 0700, files 0600). $XDG_STATE_HOME/perfagent."""
    overhead_budget_pct: float = 0.5
    """Share of the step time that the agent may take; the governor stretches sampling periods to stay below it."""
    flush_s: float = 1.0
    """How often the sender sends in steady state, seconds."""
    spool_tick_s: float = 0.15
    """How often the sender writes what it has to the spool, seconds. With the time that takes, SIGKILL loses at most 200 ms."""
    sample_s: float = 1.0
    """How often samples of host and device are reported, seconds."""
    max_spool_bytes: int = 512 * 2**20
    """Hard cap of the spool on disk, bytes."""
    max_memory_bytes: int = 8 * 2**20
    """What is kept in memory when the spool cannot be written, bytes."""

    def __post_init__(self) -> None:
        address = urlsplit(self.server)
        if address.username is not None or address.password is not None:
            raise ConfigError("server must not hold a user or password: the key goes into PERFAGENT_API_KEY")
        if address.scheme not in ("http", "https") or not address.hostname:
            raise ConfigError(f"server must be an http:// or https:// address such as {DEFAULT_SERVER}, not {self.server!r}")
        object.__setattr__(self, "server", self.server.rstrip("/"))
        for name, kind in (("project", "project"), ("run_id", "run")):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, str):
                raise ConfigError(f"{name} must be text, not {value!r:.80}")
            problem = identity_problem(kind, value)
            if problem is not None and not self.disabled:
                raise ConfigError(f"{name} cannot be used: {problem}")
        for name in ("overhead_budget_pct", "flush_s", "spool_tick_s", "sample_s", "max_spool_bytes", "max_memory_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ConfigError(f"{name} must be a number above 0, not {value!r:.80}")

    @property
    def sources(self) -> Path:
        """Where each source, a process of a run, has its folder: the spool, or the folder to record into."""
        return self.record if self.record is not None else self.state_dir / "spool"

    @classmethod
    def from_env(cls, **overrides: Any) -> AgentConfig:
        """Settings from the environment; an override that is not None wins. Raises ConfigError for what cannot be used."""
        unknown = set(overrides) - {item.name for item in fields(cls)}
        if unknown:
            raise ConfigError(f"unknown setting {sorted(unknown)}; known are {sorted(item.name for item in fields(cls))}")
        values: dict[str, Any] = {}
        for name, variable in _VARIABLES.items():
            text = os.environ.get(variable)
            if text:
                values[name] = text
        values["disabled"] = _truth("PERFAGENT_DISABLED", os.environ.get("PERFAGENT_DISABLED", ""))
        state_home = os.environ.get("XDG_STATE_HOME")
        if state_home:
            values["state_dir"] = Path(state_home).expanduser() / "perfagent"
        values.update((name, value) for name, value in overrides.items() if value is not None)
        for name in ("record", "state_dir"):
            if name in values:
                values[name] = _folder(name, values[name])
        if not isinstance(values.get("server", ""), str):
            raise ConfigError(f"server must be an address such as {DEFAULT_SERVER}, not {values['server']!r:.80}")
        return cls(**values)


_VARIABLES = {
    "server": "PERFAGENT_SERVER",
    "api_key": "PERFAGENT_API_KEY",
    "project": "PERFAGENT_PROJECT",
    "run_id": "PERFAGENT_RUN_ID",
    "record": "PERFAGENT_RECORD",
}


def _truth(variable: str, text: str) -> bool:
    if text.strip().lower() in ("", "0", "false", "no", "off"):
        return False
    if text.strip().lower() in ("1", "true", "yes", "on"):
        return True
    raise ConfigError(f"{variable} must be 1 or 0, not {text!r:.80}")


def _folder(name: str, value: Any) -> Path:
    if not isinstance(value, (str, os.PathLike)):
        raise ConfigError(f"{name} must be a folder, not {value!r:.80}")
    return Path(value).expanduser().absolute()
