"""The server of this machine, as its data folder describes it: where it listens, and the token that makes a command its
administrator's. `perfagent up` writes both. For every command that speaks to a server; reads files only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from perfagent.addresses import DEFAULT_SERVER, is_loopback
from perfagent.errors import ConfigError, ServerUnreachable

__all__ = [
    "ADDRESS_FILE", "ADMIN_TOKEN_FILE", "LocalServer", "data_folder", "is_own_address", "server_address",
]  # fmt: skip

ADDRESS_FILE = "address"  # where the running server of this data folder listens
ADMIN_TOKEN_FILE = "admin-token"  # noqa: S105 - a file's name


def data_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Where the server keeps its data unless an option says otherwise: PERFAGENT_DATA, else
    $XDG_DATA_HOME/perfagent."""
    environ = os.environ if environ is None else environ
    if environ.get("PERFAGENT_DATA"):
        return Path(environ["PERFAGENT_DATA"]).expanduser()
    base = environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser() / "perfagent"


def is_own_address(server: str) -> bool:
    """Whether it is an address of this machine's, and not only begins like one."""
    address = urlsplit(server)
    if address.scheme != "http" or "@" in address.netloc:
        return False
    return is_loopback(address.hostname)


@dataclass(frozen=True, slots=True)
class LocalServer:
    data: Path = field(default_factory=data_folder)

    @property
    def address(self) -> str | None:
        """Where it listens; None while it does not run."""
        return self._read(ADDRESS_FILE)

    def token_for(self, server: str) -> str | None:
        """The admin token, where `server` is this machine's: it must not be sent to whatever address an option
        names."""
        return self._read(ADMIN_TOKEN_FILE) if is_own_address(server) or server == self._written() else None

    def is_at(self, server: str) -> bool:
        """Whether the server of this folder said that it listens there."""
        return server == self._written()

    def required_address(self) -> str:
        """Where it listens, for a command whose --data named this folder."""
        if not self.data.is_dir():
            raise ConfigError(
                f"--data is {str(self.data)!r}, and there is no such folder; give the one of `perfagent up --data`"
            )
        address = self.address
        if address is None:
            start = f"start it with `perfagent up --data {self.data}`"
            raise ServerUnreachable(f"no server runs on the data folder {self.data}; {start}")
        return address

    def _written(self) -> str | None:
        address = self.address
        return address and address.rstrip("/")

    def _read(self, name: str) -> str | None:
        try:
            return (self.data / name).read_text().strip() or None
        except (OSError, ValueError):  # ValueError: not text, so not written by us
            return None


def server_address(server: str | None, data: Path | None) -> str:
    """The server that a command means: --server, else that of --data, else PERFAGENT_SERVER, else the one that runs on
    the data folder of this user, else the default address."""
    if server:
        return server
    if data is not None:
        return LocalServer(data.expanduser()).required_address()
    return os.environ.get("PERFAGENT_SERVER") or LocalServer().address or DEFAULT_SERVER
