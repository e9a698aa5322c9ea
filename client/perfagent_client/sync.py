"""`perfagent sync [DIR ...]`: sends what was recorded offline and what dead processes left. Sending twice is
harmless."""

from __future__ import annotations

import argparse
import errno
import os
import shlex
import sys
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from perfagent.agent_config import AgentConfig
from perfagent.command_line.option_types import add_server_options
from perfagent.delivery.recording import recorded_folders
from perfagent.delivery.spool import Spool, SpoolBusyError, folders
from perfagent.delivery.transport import HttpTransport
from perfagent.delivery.upload import Upload, upload
from perfagent.delivery.user_messages import damage
from perfagent.endpoint.addresses import is_on_this_machine
from perfagent.endpoint.admin_proof import AdminProof
from perfagent.endpoint.local_server import credentials, found_server, server_address, stopped_server
from perfagent.errors import ConfigError
from perfagent.process.variables import warn_of_misspelt
from perfagent.wire.quantities import some

__all__ = ["command"]

_NAMED = 4
"""So many sources are named in a line; of more also their number."""
PATIENCE_S = 60.0
"""How long it is tried without an answer of the server's."""


def command(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Send recorded folders to the server; without DIR, what dead processes left in the spool. Idempotent."
    )
    parser.add_argument(
        "folders", nargs="*", metavar="DIR", help="folder of PERFAGENT_RECORD, attach(record=...) or run --record"
    )
    parser.add_argument("--yes", "--all", action="store_true", help="send also what is in the spool for another server")
    add_server_options(parser)
    parser.set_defaults(run=_sync)


def _sync(arguments: argparse.Namespace) -> int:
    wanted = server_address(arguments.server, arguments.data) if arguments.server or arguments.data else None
    config = AgentConfig.from_env(server=wanted)
    given = [Path(folder) for folder in arguments.folders]
    for folder in given:
        try:
            next(folder.iterdir(), None)
        except OSError as error:
            where = "PERFAGENT_RECORD, attach(record=...) or run --record"
            raise ConfigError(f"{folder}: {error.strerror or error}; give the folder of {where}") from error
    warn_of_misspelt(lambda sentence: _say(f"perfagent sync: {sentence}"))
    spool = config.state_dir / "spool"
    sources = {root: recorded_folders(root) if given else folders(root) for root in given or [spool]}
    closed = [folder for root in sources for folder in _closed(root)]
    for folder in closed:
        _say(f"{folder}: cannot be read (Permission denied); nothing of it was sent")
    empty = [folder for folder in given if not sources[folder] and folder not in closed]
    for folder in empty:  # the others are sent: a job that never began must not keep the rest of a glob back
        kinds = "no file *.ticks or *.frames"
        _say(f"perfagent sync: {folder} holds no recording: {kinds}, neither in it nor in a folder in it")
    proof = None if config.api_key else credentials(config.server, arguments.data)
    round_ = _Round(config, proof, recordings=bool(given), every=arguments.yes)
    try:
        for folder in chain.from_iterable(sources.values()):
            round_.send(folder)
        round_.sum_up()
    except KeyboardInterrupt:
        _say("perfagent sync: interrupted; what was sent stays sent, and the same command again sends the rest")
        return 130
    finally:
        round_.transport.close()
    if not any(sources.values()) and not closed and not empty:
        _say("nothing to send")
    return 1 if round_.failed or closed else 2 if empty else 0


def _closed(root: Path) -> list[Path]:
    """The root and the folders in it that this user may not look into."""
    inside = [entry for entry in root.iterdir() if entry.is_dir()] if os.access(root, os.R_OK | os.X_OK) else []
    return [folder for folder in (root, *inside) if folder.exists() and not os.access(folder, os.R_OK | os.X_OK)]


class _Round:
    """One call of the command. proof: for a server that asks for one. failed: something was not sent or read."""

    def __init__(self, config: AgentConfig, proof: str | AdminProof | None, *, recordings: bool, every: bool) -> None:
        self.config, self.recordings, self.every = config, recordings, every
        self.transport = HttpTransport(config.server, config.api_key or proof, follows=not config.is_server_given)
        self.failed = False
        own = found_server()
        self._own = own if own != config.server and is_on_this_machine(config.server) else None
        """Where this user's server listens, when another address of this machine was named."""
        self._away = False
        self._hopeless = False
        """Whether every further source would get the same answer: it is not asked for again."""
        self._unasked: list[Path] = []
        self._foreign: dict[str, list[Path]] = {}
        """Server -> folders of the spool that were recorded for it."""

    def send(self, folder: Path) -> None:
        """All of one source, and a line about it."""
        if self._hopeless:
            self._unasked.append(folder)
            return
        ours = folder.resolve().parent == (self.config.state_dir / "spool").resolve()
        spool = self._opened(folder, ours=ours)
        if spool is None:
            return
        if not spool.header.run and spool.waiting:
            # a rank that died before it learned the run's id from rank 0: its samples get a run of their own rather
            # than none
            attempt = max(1, int(spool.header.started * 1000))
            own = f"rank-{spool.header.source[:12]}"
            spool.identify(run=own, attempt=attempt, name=spool.header.name, project=spool.header.project)
        try:
            result = self._upload(spool)
        except KeyboardInterrupt:
            spool.abandon()
            raise
        self._away = result.away or (self._away and not result.frames)
        self._hopeless = result.hopeless
        lost = damage(spool)
        _say(_told(spool, result, self.transport.server) + lost)
        self.failed = self.failed or bool(lost) or not result.complete
        if result.complete and ours and not result.refused:
            spool.remove()
        else:
            spool.close()

    def _opened(self, folder: Path, *, ours: bool) -> Spool | None:
        """None, and said, where it cannot be had, or was recorded for another server."""
        try:
            spool = Spool.open(folder, recording=not ours)
        except SpoolBusyError:
            _say(f"{folder.name}: still being written by a running process, or sent by another one: skipped")
            # what is in a spool its own process delivers, but whoever names a folder may delete it afterwards
            self.failed = self.failed or self.recordings
            return None
        except OSError as error:
            note = "; what was sent is noted there: copy it to where you may write, and sync the copy"
            _say(f"{folder}: {error}{note if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM) else ''}")
            self.failed = True
            return None
        server = spool.header.server
        if server in (None, self.config.server) or self.recordings or self.every:
            return spool
        self._foreign.setdefault(str(server), []).append(folder)
        spool.close()
        return None

    def _upload(self, spool: Spool) -> Upload:
        stopped = stopped_server(self.config.server)
        once = self._away or self._own is not None or bool(stopped)
        until = time.monotonic() + PATIENCE_S
        result = upload(spool, self.transport, until=until, patience_s=PATIENCE_S, once=once, waits=self._waits)
        if result.away and self._own is not None:
            result.cure = f"your server listens at {self._own}: perfagent sync --server {self._own}"
        elif result.away:
            result.cure = stopped or result.cure
        return result

    def sum_up(self) -> None:
        """What holds for several sources, once."""
        if self._unasked:
            _say(f"not sent either: {_first(self._unasked)}")
        for server, left in self._foreign.items():
            self.failed = True
            here, there = (f"perfagent sync --server {shlex.quote(one)}" for one in (self.config.server, server))
            _say(f"{some(len(left), 'recording')} made for {server}: not sent")
            _say(f"To send to {server}: {there}. To {self.config.server}: {here} --yes. To drop: rm -r {_first(left)}")

    def _waits(self, reason: str) -> None:
        """A minute of silence looks like a command that hangs."""
        _say(f"server {self.config.server}: {reason}; trying again for {PATIENCE_S:.0f} s")


def _first(folders: Sequence[Path]) -> str:
    """As many as fit into a line."""
    named = " ".join(shlex.quote(str(folder)) for folder in folders[:_NAMED])
    return named + (f" ... ({len(folders)})" if len(folders) > _NAMED else "")


def _who(spool: Spool) -> str:
    return f"{spool.header.run} rank {spool.header.rank}" if spool.header.run else str(spool.folder)


def _told(spool: Spool, result: Upload, server: str) -> str:
    nothing_new = result.complete and result.duplicate and not result.samples
    text = f"{_who(spool)}: {'nothing new for this server: ' if nothing_new else ''}{some(result.frames, 'frame')}"
    text += f", {some(result.samples, 'sample')} stored, {result.duplicate:,} there already"
    if result.refused:
        text += f", {result.refused} refused (kept in {spool.folder / 'quarantine'})"
    elif (spool.folder / "quarantine").exists():
        text += f"; what the server had refused before is kept in {spool.folder / 'quarantine'}"
    if not result.complete:
        text += f"; not complete: server {server}: {result.reason}; {result.cure}"
    cut = spool.counters["torn_bytes"]  # what a kill leaves, and no fault: a record that was just being written
    return text + (f"; the last record was written in part only and is left out ({cut} bytes)" if cut else "")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
