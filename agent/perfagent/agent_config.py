"""The agent's settings: one typed value, made once per run from arguments and environment, and passed in.

`AgentConfig.from_env()` is the only function of the agent that reads settings from `os.environ` (ranks come from a
launcher's variables, which are read in identity). An argument wins over the environment, the environment over the
default.
"""

from __future__ import annotations

import importlib.util
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from perfagent.endpoint.addresses import DEFAULT_SERVER
from perfagent.endpoint.local_server import server_address
from perfagent.errors import ConfigError, ResourceError
from perfagent.wire.limits import identity_problem

__all__ = ["AgentConfig"]


def _default_state_dir() -> Path:
    try:
        return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "perfagent"
    except RuntimeError:
        return _homeless_state_dir()


def _homeless_state_dir() -> Path:
    """For a user without a home folder: a container that runs under a number which has no entry in its passwd file."""
    import tempfile

    own = f"perfagent-{os.getuid()}"
    try:
        folder = Path(tempfile.gettempdir()) / own
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:  # no temporary folder either: the spool is kept in memory, and a warning says so
        return Path("/tmp") / own  # noqa: S108
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ResourceError(
            f"{folder} is not a folder of yours alone: remove it, or set XDG_STATE_HOME (or HOME) to one that is"
        )
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """Settings of the agent in one process. scripts/references writes the docstrings into docs/reference/settings.md."""

    server: str = DEFAULT_SERVER
    """the server's address, with a path if the server is behind one; without query, user or password (default: your server on
    this machine)"""
    is_server_given: bool = True
    """false if nobody named a server: it is the one of this user that runs on this machine, on any port"""
    api_key: str | None = field(default=None, repr=False)
    """a key with the scope ingest; a server on this machine needs none"""
    project: str = "default"
    """the project of the run"""
    run_id: str | None = None
    """the run's id (default: random); the same id again starts a new attempt of the run"""
    record: Path | None = None
    """a folder to write into instead of sending; `perfagent sync FOLDER` uploads it"""
    tensorboard: Path | None = None
    """a folder that also gets TensorBoard event files
    (docs/guides/from-tensorboard.md#write-tensorboards-files-from-perfagent)"""
    capture_logs: bool = True
    """`0`: does not record what the script logs through other loggers (Trainer, Lightning, Accelerate, TensorBoard, W&B, MLflow,
    trackio)"""
    disabled: bool = False
    """`1`: records, sends and prints nothing; as an argument, for one run"""
    tune_malloc: bool = True
    """`0`: does not set the C library's allocator (docs/reference/settings.md#what-the-agent-sets-in-the-process)"""
    state_dir: Path = field(default_factory=_default_state_dir)
    """the folder of the spool: `$XDG_STATE_HOME/perfagent` (default: `~/.local/state/perfagent`); for a user without a home,
    `perfagent-UID` in the temporary folder"""
    overhead_budget_pct: float = 0.5
    """above this share of the step time, the agent measures gradients less often; the rest of its work stays
    (docs/evidence/benchmarks.md#what-monitoring-costs-the-training-process)"""
    flush_s: float = 1.0
    """how often the agent sends; every 3 s while no page shows the run. NaN, alerts and the end of the run are sent at once"""
    spool_tick_s: float = 0.15
    """how often the agent writes to the spool: SIGKILL loses at most 200 ms of samples"""
    sample_s: float = 1.0
    """how often the agent measures host and device"""
    max_spool_bytes: int = 512 * 2**20
    """the largest size of the spool on disk"""
    max_memory_bytes: int = 8 * 2**20
    """what the agent keeps in memory if it cannot write the spool; above it, it drops the oldest samples first, events last"""

    def __post_init__(self) -> None:
        _check_server(self.server)
        _check_key(self.api_key)
        object.__setattr__(self, "server", self.server.rstrip("/"))
        for name, kind, value in (("project", "project", self.project), ("run_id", "run", self.run_id)):
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"{name} must be text, not {value!r:.80}")
            problem = None if value is None or self.disabled else identity_problem(kind, value)
            if problem is not None:
                raise ConfigError(f"{name} cannot be used: {problem}")
        if self.tensorboard is not None and not self.disabled and importlib.util.find_spec("tensorboard") is None:
            raise ConfigError("tensorboard= needs the package that writes TensorBoard's files: pip install tensorboard")
        for name in ("tune_malloc", "capture_logs"):
            if not isinstance(given := getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, not {given!r:.80}")
        for name in _NUMBERS:
            given = getattr(self, name)
            if isinstance(given, bool) or not isinstance(given, (int, float)) or not given > 0:
                raise ConfigError(f"{name} must be a number above 0, not {given!r:.80}")

    @property
    def sources(self) -> Path:
        """Where each source, a process of a run, has its folder: the spool, or the folder to record into."""
        return self.record if self.record is not None else self.state_dir / "spool"

    @classmethod
    def from_env(cls, **overrides: Any) -> AgentConfig:
        """Settings from the environment; an override that is not None wins. Raises ConfigError for what cannot be
        used."""
        values: dict[str, Any] = {}
        for name, variable in _VARIABLES.items():
            text = os.environ.get(variable, "")
            if text.strip() if name in _STRIPPED else text:
                values[name] = text
        for name, variable in _SWITCHES.items():
            if (text := os.environ.get(variable, "")).strip():
                values[name] = _truth(variable, text)
        values.update((name, value) for name, value in overrides.items() if value is not None)
        if "state_dir" not in values:
            values["state_dir"] = _default_state_dir()
        if values.get("server") is None:
            values |= {"server": server_address(), "is_server_given": False}
        # a secret from a file ends with a line break
        values.update((name, values[name].strip()) for name in _STRIPPED if isinstance(values.get(name), str))
        for name in ("record", "state_dir", "tensorboard"):
            if name in values:
                values[name] = _folder(name, values[name])
        if not isinstance(values.get("server", ""), str):
            raise ConfigError(f"server must be an address such as {DEFAULT_SERVER}, not {values['server']!r:.80}")
        try:
            return cls(**values)
        except ConfigError:  # say where the setting comes from: whoever reads it may not have set it
            for name, variable in _VARIABLES.items():
                if name in values and overrides.get(name) is None:
                    try:
                        cls(**{name: values[name], "disabled": values.get("disabled", False)})
                    except ConfigError as error:
                        raise ConfigError(f"{variable}: {error}") from None
            raise


_VARIABLES = {
    "server": "PERFAGENT_SERVER",
    "api_key": "PERFAGENT_API_KEY",
    "project": "PERFAGENT_PROJECT",
    "run_id": "PERFAGENT_RUN_ID",
    "record": "PERFAGENT_RECORD",
    "tensorboard": "PERFAGENT_TENSORBOARD",
}

_SWITCHES = {
    "disabled": "PERFAGENT_DISABLED", "tune_malloc": "PERFAGENT_MALLOC", "capture_logs": "PERFAGENT_CAPTURE_LOGS",
}  # fmt: skip
_STRIPPED = ("server", "api_key")
_NUMBERS = ("overhead_budget_pct", "flush_s", "spool_tick_s", "sample_s", "max_spool_bytes", "max_memory_bytes")


def _check_server(server: str) -> None:
    """Raises ConfigError for what is no address of a server."""
    like = f"an address such as {DEFAULT_SERVER} or https://monitor.example/perfagent"
    given = repr(server[:200]) if "@" not in server else "one with a user or password"
    try:
        address = urlsplit(server)
        if address.port == 0:
            raise ValueError
    except ValueError:  # its own message may hold a piece of a password
        raise ConfigError(f"server must be {like}, with a port of 1 to 65535, not {given}") from None
    if address.username is not None or address.password is not None:
        raise ConfigError("server must not hold a user or password: the key goes into PERFAGENT_API_KEY")
    if address.scheme not in ("http", "https") or not address.hostname:
        raise ConfigError(f"server must be an http:// or https:// address such as {DEFAULT_SERVER}, not {given}")
    if "?" in server or "#" in server:
        raise ConfigError(
            f"server must be {like}, without a query (?) or fragment (#), not {given}: take what is behind away"
        )
    if not server.isprintable() or " " in server or not address.path.isascii():
        raise ConfigError(f"server must be {like}, without spaces, and with a path of ASCII characters, not {given}")


def _check_key(key: str | None) -> None:
    """Raises ConfigError for what no header can carry. The key itself is never shown."""
    if key is not None and not isinstance(key, str):
        raise ConfigError(f"api_key must be text, not {type(key).__name__}")
    if key is not None and (not key.isascii() or not key.isprintable() or " " in key):
        wrong = next(at for at, letter in enumerate(key, 1) if not "!" <= letter <= "~")
        raise ConfigError(
            f"api_key must be printable ASCII without spaces; character {wrong} of {len(key)} is not: copy the key again into "
            "PERFAGENT_API_KEY (`perfagent keys create ingest` makes one)"
        )


def _truth(variable: str, text: str) -> bool:
    word = text.strip().lower()
    if word in ("0", "false", "no", "off", "1", "true", "yes", "on"):
        return word in ("1", "true", "yes", "on")
    raise ConfigError(f"{variable} must be 1 or 0, not {text!r:.80}")


def _folder(name: str, value: Any) -> Path:
    if not isinstance(value, (str, os.PathLike)):
        raise ConfigError(f"{name} must be a folder, not {value!r:.80}")
    try:
        folder = Path(value).expanduser().absolute()
        in_the_way = next((one for one in (folder, *folder.parents) if one.exists()), folder)
        if not in_the_way.is_dir():
            raise ConfigError(f"{name} must be a folder, and {str(in_the_way)!r} is a file")
        return folder
    except (RuntimeError, OSError) as error:  # "~" of somebody who has no home; a working folder that was deleted
        why = f"{str(value)!r:.80} cannot ({error}): give a whole path"
        raise ConfigError(f"{name} must be a folder that can be found; {why}") from None
