"""A small process next to the trainer that sees how it ends, even where nothing in the trainer can: kill -9, the OOM
killer.

Forked twice before `perfagent run` becomes the trainer (or when Python starts, in a launcher's worker), so that the script
sees no child of its own. It waits on a pidfd in a bare interpreter of 3 MB (wait.py), asks the kernel for the exit status
(PIDFD_GET_INFO, Linux 6.15 and later; before that /proc while it is a zombie), writes the end into the trainer's spool
under the next number, and sends what is left there. It holds no terminal and no pipe, and gives up 15 s after the trainer's
end: whoever comes next sends what is in the spool then.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from perfagent.agent_config import AgentConfig
from perfagent.process.exit_reason import Facts, of_exit_code
from perfagent.process.pids import owner_line, process_start
from perfagent.redaction import redacted, redacted_arguments, redacted_text
from perfagent.samplers import cgroup

if TYPE_CHECKING:
    from perfagent.delivery.spool import Spool
    from perfagent.identity import Identity
    from perfagent.process.launch_options import LaunchOptions
    from perfagent.wire import Event

__all__ = ["Ending", "ending_of", "truth", "watch", "watch_worker"]

PIDFD_GET_INFO = 0xC040FF0B  # _IOWR(0xFF, 11, struct pidfd_info of 64 bytes)
PIDFD_INFO_EXIT = 1 << 3
GRACE_S = 15.0
REAP_S = 5.0
SIGN_OF_LIFE_S = 10.0
FIRST_SEQ = 2**40
"""The watcher speaks as the source that the trainer becomes, which counts its own frames from 1."""
PIDFD = 3
_CRASHES = ("SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV")
"""A process gets them for what it did itself: a C++ exception that nobody caught, a wrong address."""


class Ending(NamedTuple):
    """How a process ended: exit code or signal; both None where the kernel did not say. oom: its control group killed
    it."""

    code: int | None = None
    signal: int | None = None
    oom: bool = False


def truth(ending: Ending) -> tuple[str, Facts] | None:
    """(state, reason) as docs/reference/wire.md names them; None where nobody knows, and the server's own "lost" is the
    honest answer."""
    if ending.signal is None:
        return None if ending.code is None else of_exit_code(ending.code)
    try:
        name = signal.Signals(ending.signal).name
    except ValueError:
        name = f"signal {ending.signal}"
    if ending.oom:
        return "oom", {"key": "killed_for_memory"}
    if name == "SIGTERM":
        return "preempted", {"key": "terminated"}
    crashed = name in _CRASHES
    return "failed" if crashed else "killed", {"key": "crashed" if crashed else "killed", "signal": name}


def watch(config: AgentConfig, identity: Identity, *, name: str | None = None, tags: tuple[str, ...] = ()) -> bool:
    """Forks the watcher of this process; False where the system has no pidfd or no process to spare."""
    pid = os.getpid()
    speaks = identity.world_size == 1
    place = {name: getattr(identity, name) for name in ("run", "source", "attempt", "rank", "world_size")}
    command = redacted_arguments(sys.orig_argv)
    words = _words(config, pid, speaks=speaks, name=name, tags=list(tags), command=command, **place)
    try:
        pidfd = os.pidfd_open(pid)
        first = os.fork()
    except (OSError, AttributeError):
        return False
    if first:
        os.close(pidfd)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(first, 0)
        return True
    # In the child, and in its child: nothing may return into the caller's code.
    try:
        os.setsid()
        if os.fork() == 0:
            _let_go(pidfd)
            os.execv(sys.executable, words)  # noqa: S606 - the interpreter that runs us
    finally:
        os._exit(0)


def watch_worker(pid: int, options: LaunchOptions) -> None:
    """Becomes the watcher of one of a launcher's workers, in a process that the worker has forked for that. Which rank
    of which run it is, is read from the worker's own source: without one, nothing is reported."""
    config = AgentConfig.from_env(project=options.project, record=options.record, run_id=options.run_id)
    words = _words(config, pid, speaks=False)
    _let_go(os.pidfd_open(pid))
    os.execv(sys.executable, words)  # noqa: S606 - the interpreter that runs us


def _words(config: AgentConfig, pid: int, *, speaks: bool, **job: Any) -> list[str]:
    """The command of the waiting half. speaks: it reports a process without a session, too."""
    record = str(config.record) if config.record is not None else None
    job |= {"pid": pid, "started": process_start(pid), "begun": time.time(), "oom_kills": _oom_kills(pid)}
    job |= {"project": config.project, "record": record, "speaks": speaks}
    waiter = str(Path(__file__).with_name("wait.py"))
    return [sys.executable, "-I", "-S", waiter, sys.executable, str(config.sources), owner_line(pid), json.dumps(job)]


def _let_go(pidfd: int) -> None:
    """No terminal, no pipe, no folder of the caller stays open because of us; 3 is the pidfd."""
    # it has a low number where the caller had closed his own streams
    high = fcntl.fcntl(pidfd, fcntl.F_DUPFD_CLOEXEC, 10)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.dup2(high, 3)
    os.closerange(4, 65536)
    os.chdir("/")
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # meant for the training; exec keeps ignored signals ignored


def _oom_kills(pid: int | str) -> int | None:
    group = cgroup.find(pid)
    return group.oom_kills() if group is not None else None


class _Watch:
    """job: what `_words` hands over. ended: when the trainer ended, by both clocks, where wait.py has seen it."""

    def __init__(self, job: dict[str, Any], ended: tuple[float, float] | None) -> None:
        self._job = job
        self._ended = ended
        self._config = AgentConfig.from_env(project=job["project"], record=job["record"])
        self._pid: int = job["pid"]
        self._owner = f"{job['pid']} {job['started']}"
        self._own: Spool | None = None
        self._children: set[int] = set()

    def run(self) -> None:
        poll = select.poll()
        poll.register(PIDFD, select.POLLIN)
        wait_s = 0.0
        while not poll.poll(1000 * wait_s):
            # A script without torch and without perfagent has no session: it is a run all the same, and this is its
            # sign of life.
            wait_s = SIGN_OF_LIFE_S if self._speaks_for_trainer() else 300.0
        self._ended = self._ended or _now()
        ending = ending_of(self._pid, PIDFD)
        if ending.signal == signal.SIGKILL and self._job["oom_kills"] is not None:
            kills = _oom_kills("self")  # our control group is the trainer's
            ending = ending._replace(oom=(kills or 0) > self._job["oom_kills"])
        self._report(ending)

    # ---- a trainer without a session

    def _speaks_for_trainer(self) -> bool:
        if not self._job["speaks"] or any(self._trainers_folders(self._config.sources)):
            self._be_silent()
            return False
        self._children |= _pythons_below(self._pid)
        if self._config.record is None:
            self._say("running")
            self._deliver(self._own_spool(), time.monotonic() + 2.0)
        return True

    def _be_silent(self) -> None:
        """The trainer speaks for itself, after all."""
        if self._own is not None:
            self._own.remove()
        self._own = None

    def _say(self, state: str, reason: Facts | None = None, *, final: bool = False) -> None:
        spool = self._own_spool()
        data = {"state": state, "watcher": True, **({"reason": reason} if reason else {})}
        if spool.state.acked == 0 and not spool.waiting:
            names = ("name", "tags", "world_size", "pid", "command")
            data |= {name: self._job[name] for name in names if self._job[name]}
            data |= {"host": os.uname().nodename, "started": self._job["begun"]}
        elif not final:
            data = {}
        events = [self._event("state", redacted(data))] if data else []
        if final and self._children:
            # the script made no step, but other processes may have: those are not recorded
            events.insert(0, self._event("alert", {"level": "info", "unrecorded": len(self._children)}))
        if events or not spool.waiting:
            self._note(spool, events)

    def _own_spool(self) -> Spool:
        from perfagent.delivery.spool import Header, Spool

        if self._own is None:
            recording = self._config.record is not None
            header = Header(
                **{name: self._job[name] for name in ("source", "run", "attempt", "rank")},
                project=self._config.project, server=None if recording else self._config.server,
                is_found=not self._config.is_server_given, name=self._job["name"] and redacted_text(self._job["name"]),
                pid=os.getpid(), pid_start=process_start(os.getpid()), started=self._job["begun"], next_seq=FIRST_SEQ,
            )  # fmt: skip
            self._own = Spool(self._config.sources / f"{header.source}-watcher", header, recording=recording)
            self._own.create()
        return self._own

    # ---- the end

    def _report(self, ending: Ending) -> None:
        known, until = truth(ending), time.monotonic() + GRACE_S
        spools = [self._take_over(folder) for folder in self._sources()]
        newest = spools[0] if spools else None
        if newest is not None:
            self._be_silent()
            closed = newest.header.closed
            # the process left no word of its own, or took its end for a good one
            if known is not None and (closed == "" or (closed == "finished" and known[0] != "finished")):
                data = {"state": known[0], "watcher": True, "exit_code": ending.code, "signal": ending.signal}
                data |= {"reason": known[1]} if known[1] else {}
                self._note(newest, [self._event("state", data)])
        elif self._job["speaks"] and known is not None:
            self._say(*known, final=True)
            newest = self._own_spool()
            spools = [newest, *spools]
        for spool in filter(None, spools):  # of runs that ended before the process did: only what is left to send
            if spool.recording:
                spool.hold(now=time.monotonic(), force=True)
            elif self._deliver(spool, until):
                spool.remove()
                continue
            spool.close(final=known[0] if known and spool is newest else "")

    @staticmethod
    def _note(spool: Spool, events: list[Event]) -> None:
        spool.append((), events, now=time.monotonic())

    def _event(self, kind: str, data: dict[str, Any]) -> Event:
        from perfagent.wire import Event

        at, monotonic = self._ended or _now()
        return Event(kind=kind, time=at, monotonic=monotonic, data=data)

    def _take_over(self, folder: Path) -> Spool | None:
        """The spool of a source, once its lock is free; None when somebody else has it, or it is gone."""
        from perfagent.delivery.spool import Spool, SpoolBusyError

        until = time.monotonic() + 5.0
        while True:
            try:
                return Spool.open(folder, recording=folder.parent != self._config.state_dir / "spool")
            except SpoolBusyError:
                if time.monotonic() > until:  # a later run of somebody else is sending it already
                    return None
                time.sleep(0.05)
            except OSError:
                return None

    def _sources(self) -> list[Path]:
        """Folders of all runs that the trainer had, wherever it put them, the last one first."""
        from perfagent.delivery.spool import owner

        roots, found = [self._config.sources], dict[Path, float]()
        for root in roots:  # it grows meanwhile
            for folder in self._trainers_folders(root):
                header = owner(folder)
                found[folder] = header.started if header is not None else 0.0
                if header is not None and header.followed is not None and Path(header.followed) not in roots:
                    roots.append(Path(header.followed))
        return sorted(found, key=lambda folder: found[folder], reverse=True)

    def _trainers_folders(self, root: Path) -> Iterator[Path]:
        with contextlib.suppress(OSError):
            for folder in root.iterdir():
                with contextlib.suppress(OSError):
                    if (folder / "lock").read_text(encoding="ascii") == self._owner:
                        yield folder

    def _deliver(self, spool: Spool, until: float) -> bool:
        """Sends all frames of a spool within the time; False when some are left."""
        from perfagent.delivery.transport import HttpTransport
        from perfagent.delivery.upload import upload

        # a script may have sent its run elsewhere than the options say
        server, follows = spool.header.server or self._config.server, spool.header.is_found
        with contextlib.closing(HttpTransport(server, self._config.api_key, follows=follows)) as transport:
            return upload(spool, transport, until=until).complete


def _now() -> tuple[float, float]:
    return time.time(), time.monotonic()


def _pythons_below(pid: int) -> set[int]:
    """The Python processes that a process has started and that run now."""
    found = set()
    with contextlib.suppress(OSError):  # the process has ended, or the kernel does not tell
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text(encoding="ascii").split():
                with contextlib.suppress(OSError):  # it has ended
                    if Path(f"/proc/{child}/exe").readlink().name.startswith("python"):
                        found.add(int(child))
    return found


def ending_of(pid: int, pidfd: int, *, clock: Callable[[], float] = time.monotonic) -> Ending:
    """How the process behind a pidfd ended; to be called when the pidfd has become readable."""
    until = clock() + REAP_S
    while True:  # the pidfd answers once the parent has fetched the status: wait for that for a moment
        waits = clock() < until and Path(f"/proc/{pid}").exists()
        for status in (_zombie_status(pid), _pidfd_status(pidfd)):
            if status is not None:
                killed = os.WIFSIGNALED(status)
                return Ending(signal=os.WTERMSIG(status)) if killed else Ending(code=os.WEXITSTATUS(status))
        if not waits:
            return Ending()
        time.sleep(0.02)


def _pidfd_status(pidfd: int) -> int | None:
    buffer = bytearray(struct.pack("<Q", PIDFD_INFO_EXIT).ljust(64, b"\0"))
    try:
        fcntl.ioctl(pidfd, PIDFD_GET_INFO, buffer)
    except OSError:  # before Linux 6.13, or the process is not reaped yet
        return None
    mask, code = struct.unpack("<Q52xi", buffer)
    return int(code) if mask & PIDFD_INFO_EXIT else None


def _zombie_status(pid: int) -> int | None:
    """exit_code of /proc/PID/stat while it is a zombie (only its own user may read it; 0 may mean "not for you")."""
    try:
        words = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return int(words[49]) if words[0] == b"Z" and int(words[49]) else None
    except (OSError, ValueError, IndexError):
        return None


if __name__ == "__main__":
    at, monotonic = map(float, sys.argv[2].split()) if sys.argv[2] else (0.0, 0.0)
    _Watch(json.loads(sys.argv[1]), (at, monotonic) if sys.argv[2] else None).run()
