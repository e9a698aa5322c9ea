"""The server of this user on this machine, as its data folder describes it: where it listens, and the secret that makes
a command its administrator's. `perfagent up` writes both. For the agent and every command; reads files only."""

from __future__ import annotations

import contextlib
import os
import platform
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from perfagent.endpoint.addresses import DEFAULT_SERVER
from perfagent.endpoint.admin_proof import AdminProof
from perfagent.errors import ConfigError, ServerUnreachable
from perfagent.process.pids import boot_id, owner_line

__all__ = [
    "ADDRESS_FILE", "ADMIN_TOKEN_FILE", "LocalServer", "announcement", "credentials", "data_folder", "found_server",
    "server_address", "stopped_server",
]  # fmt: skip

ADDRESS_FILE = "address"
"""Where the running server of this data folder listens, and below it which process that is."""
ADMIN_TOKEN_FILE = "admin-token"  # noqa: S105 - a file's name


def data_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Where the server keeps its data unless an option says otherwise: PERFAGENT_DATA, else
    $XDG_DATA_HOME/perfagent."""
    environ = os.environ if environ is None else environ
    if environ.get("PERFAGENT_DATA"):
        return Path(environ["PERFAGENT_DATA"]).expanduser()
    base = environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser() / "perfagent"


def announcement(address: str, pid: int | None = None) -> str:
    """The text of a server's address file. By the second line it is known whether that very process still lives
    here: while it does, nobody else can listen at its address. A file of another machine (a shared home folder), of
    another container or from before a crash is none of a server that runs here."""
    return f"{address.rstrip('/')}\n{owner_line(os.getpid() if pid is None else pid)} {_place()}"


def _place() -> str:
    """Where process ids and loopback addresses mean the same as here."""
    boot = boot_id()
    try:
        places = f"{os.stat('/proc/self/ns/pid').st_ino} {os.stat('/proc/self/ns/net').st_ino}"  # noqa: PTH116
    except OSError:
        return platform.node()
    return f"{boot} {places}" if boot else platform.node()


@dataclass(frozen=True, slots=True)
class LocalServer:
    data: Path = field(default_factory=data_folder)

    @property
    def address(self) -> str | None:
        """Where it listens; None while it does not run on this machine."""
        announced = self._announced
        return announced and announced.partition("\n")[0]

    @property
    def last_address(self) -> str | None:
        """Where it listened when it was killed, which left the file behind, or listens on another machine."""
        text = self._read(ADDRESS_FILE)
        return (text and self.address is None and text.partition("\n")[0]) or None

    def proof_for(self, server: str) -> AdminProof | None:
        """What makes a request an administrator's at the address of this folder's running server; None for every other
        address, whatever it looks like: a stranger may listen there, or a tunnel to a colleague's server begin."""
        token = os.environ.get("PERFAGENT_ADMIN_TOKEN") or self._read(ADMIN_TOKEN_FILE)

        def announced() -> str:  # "" while no server of this folder listens there: a proof with it is worth nothing
            text = self._announced or ""
            return text if server.rstrip("/") == text.partition("\n")[0] else ""

        return AdminProof(token, announced) if token and announced() else None

    def announce(self, address: str) -> None:
        """Writes, as the server that listens there, where it does. Whole or not at all: jobs read it at any time."""
        descriptor, name = tempfile.mkstemp(dir=self.data)  # 0600
        with os.fdopen(descriptor, "w") as file:
            file.write(announcement(address) + "\n")
        Path(name).replace(self.data / ADDRESS_FILE)

    def required_address(self) -> str:
        """Where it listens, for a command whose --data named this folder."""
        if not self.data.is_dir():
            raise ConfigError(
                f"--data is {str(self.data)!r}, and there is no such folder; give the one of `perfagent up --data`"
            )
        address = self.address
        if address is None:
            last = f" (the last one was at {self.last_address})" if self.last_address else ""
            start = f"start it with `perfagent up --data {self.data}`"
            raise ServerUnreachable(f"no server runs on the data folder {self.data}{last}; {start}")
        return address

    @property
    def _announced(self) -> str | None:
        """The text of the address file, if its process lives."""
        text = self._read(ADDRESS_FILE) or ""
        address, _, process = text.partition("\n")
        pid = process.partition(" ")[0]
        return text if pid.isdecimal() and text == announcement(address, int(pid)) else None

    def _read(self, name: str) -> str | None:
        try:
            return (self.data / name).read_text().strip() or None
        except (OSError, ValueError):  # ValueError: not text, so not written by us
            return None


def found_server() -> str | None:
    """The address of this user's server, if one runs on this machine."""
    with contextlib.suppress(RuntimeError):  # a user without a home
        return LocalServer().address
    return None


def stopped_server(server: str) -> str:
    """What to say where `server` does not answer, and nobody named it, since this user's own server was killed; else
    ""."""
    with contextlib.suppress(RuntimeError):
        last = LocalServer().last_address
        if last and server.rstrip("/") in (DEFAULT_SERVER, last):
            return (
                f"your server was last started at {last}, and its process does not run on this machine: start it again with "
                "`perfagent up`"
            )
    return ""


def server_address(server: str | None = None, data: Path | None = None) -> str:
    """The server that a job or a command means: --server, else that of --data, else PERFAGENT_SERVER, else the one that
    runs on the data folder of this user, else the default address."""
    if server:
        return server
    if data is not None:
        return LocalServer(data.expanduser()).required_address()
    return os.environ.get("PERFAGENT_SERVER", "").strip() or found_server() or DEFAULT_SERVER


def credentials(server: str, data: Path | None = None) -> str | AdminProof | None:
    """What an administrator's command shows to a server. What the user gave wins: PERFAGENT_ADMIN_TOKEN, then
    PERFAGENT_API_KEY. The secret of the data folder is for that folder's own server alone."""
    local = LocalServer() if data is None else LocalServer(data.expanduser())
    given = os.environ.get("PERFAGENT_ADMIN_TOKEN")
    if not given and (key := os.environ.get("PERFAGENT_API_KEY")):
        return key
    return local.proof_for(server) or given or None
