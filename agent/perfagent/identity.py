"""Who this process is: run, attempt, rank; and how all ranks of a job come to agree on it without waiting for each other.

Ranks come from the launcher's environment (torchrun, deepspeed, SLURM, MPI) or from an initialised torch.distributed. The run's
id is the one the user or a real job scheduler names (slurm.py); else rank 0 draws one and publishes it with its start time, in a
file beside the spool (ranks of the same node) and in the job's TCPStore (other nodes). The other ranks look from their sender
threads, a `check()` that never waits, and spool until they know. No collective is ever issued.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfagent import slurm
from perfagent.joining import ALONE_AFTER_S, Joining, in_group, may_join
from perfagent.launch.options import parents_run
from perfagent.naming import identity_problem

if TYPE_CHECKING:
    from perfagent.config import AgentConfig

__all__ = ["Identity", "Meeting", "owner_line", "process_start"]

_meetings = itertools.count()
_runs = itertools.count()

STORE_KEY = "perfagent/run"
_MOST_FAILURES = 10
_WEEK_S = 7 * 86400.0


@dataclass(slots=True, kw_only=True)
class Identity:
    """Who this process is.

    run: None until it is known (ranks above 0 of a job without a named run). source: unique id of this process in this attempt.
    attempt: rank 0's start in Unix milliseconds (or the SLURM job's), shared by all ranks. local_rank: 0 where the launcher says
    nothing; node_rank: None there.
    """

    project: str
    run: str | None = None
    name: str | None = None
    source: str = field(default_factory=lambda: uuid.uuid4().hex)
    attempt: int = 0
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    node_rank: int | None = 0
    start_step: int | None = None
    job_key: str | None = None
    """A name that the ranks of this job on this node share (None where the environment has none)."""
    meeting: Meeting | None = field(default=None, repr=False)
    joining: Joining | None = field(default=None, repr=False)
    """While it is open whether this process is a rank of a job: place, run and attempt are those that it has if it is none, and
    nothing is sent. (Killed meanwhile, it was none: what it has measured is told as theirs.)"""
    begun: Callable[[], bool] = field(default=lambda: False, repr=False)
    """Whether the first step of this run is over, or the run."""
    ended: Callable[[], bool] = field(default=lambda: False, repr=False)
    placed: Callable[[], None] = field(default=lambda: None, repr=False)
    """Called by poll() where this process turns out to be another rank than was said first."""

    @property
    def known(self) -> bool:
        return self.run is not None and self.attempt > 0

    @property
    def settled(self) -> bool:
        """Whether there is nothing left to poll for: the run is known here, and rank 0 has told the other nodes."""
        if self.joining is not None:
            return False
        return self.known and (self.meeting is None or self.rank != 0 or not self.meeting.publishing)

    def poll(self) -> bool:
        """On the sender thread: publishes (rank 0) or looks for (others) the run's id. True once it is known."""
        if self.joining is not None:
            if not self.joining.over(begun=self.begun()):
                return False
            self._settle(self.joining)
        if self.meeting is not None:
            self.meeting.poll(self)
        return self.known

    @classmethod
    def from_environment(
        cls,
        config: AgentConfig,
        *,
        name: str | None = None,
        start_step: int | None = None,
        meet: bool = True,
        ordinal: int | None = None,
        environ: Mapping[str, str] | None = None,
        now: Callable[[], float] = time.time,
        machine: Callable[[], str] | None = None,
    ) -> Identity:
        """meet: look for the other ranks of a job; a command that will become the trainer only wants to know its place.
        ordinal: which run of this process it is; counted when not given, so that a second one is not taken for the first.
        machine: names the node; a test has several on one."""
        env = os.environ if environ is None else environ
        mine = cls(project=config.project, run=config.run_id, name=name, start_step=start_step)
        mine.rank, mine.local_rank, mine.world_size, mine.node_rank = _place(env)
        started = max(1, int(now() * 1000))
        folder = config.state_dir / "jobs"
        if mine.run is None:
            before = ordinal if ordinal is not None else next(_runs) if meet else 0
            mine.run, mine.attempt = _named_by_launcher(env, mine, folder, before)
        key = mine.job_key = _job_key(env, (machine or _machine)())
        if mine.world_size <= 1 or (key is None and mine.rank == 0 and "torch.distributed" not in sys.modules):
            mine.attempt = mine.attempt or started
            mine.run = mine.run or draw_id()
        if meet and mine.world_size <= 1 and may_join():
            mine.joining = Joining(folder, config.run_id, mine.attempt)
        if meet and mine.world_size > 1 and not (mine.known and mine.attempt != started):
            again = next(_meetings) if ordinal is None else ordinal
            mine.meeting = Meeting(folder, key, env, started, again)
            mine.meeting.poll(mine)
        return mine

    def _settle(self, joining: Joining) -> None:
        """It is a rank of the group that it has joined, or alone."""
        self.joining = None
        if in_group():
            self.rank, self.local_rank, self.world_size, self.node_rank = _place(os.environ)
        if self.world_size > 1:
            self.run, self.attempt = joining.named or parents_run() or (self.run if self.rank == 0 else None), 0
            self.job_key = _job_key(os.environ, _machine())
            self.meeting = Meeting(joining.folder, self.job_key, os.environ, joining.started, next(_meetings))
        self.placed()

    def stand_alone(self, started: int) -> None:
        """The environment told of a job that there is not: variables that were left in a shell."""
        self.rank, self.local_rank, self.world_size, self.node_rank = 0, 0, 1, 0
        self.run, self.attempt, self.meeting = self.run or draw_id(), started, None
        self.placed()


def draw_id() -> str:
    """A random run id: short enough for an address bar, 60 bits."""
    # Of 32 characters each byte is as good as another. (`secrets` may be the script's own: a file of keys beside it.)
    return "".join("0123456789abcdefghjkmnpqrstvwxyz"[byte % 32] for byte in os.urandom(12))


_LAUNCHERS = (
    # torchrun, deepspeed, scripts of one's own
    (("RANK",), ("LOCAL_RANK",), ("WORLD_SIZE",), ("GROUP_RANK", "NODE_RANK", "CROSS_RANK", "SLURM_NODEID")),
    (("OMPI_COMM_WORLD_RANK",), ("OMPI_COMM_WORLD_LOCAL_RANK",), ("OMPI_COMM_WORLD_SIZE",), ()),
    (("MV2_COMM_WORLD_RANK",), ("MV2_COMM_WORLD_LOCAL_RANK",), ("MV2_COMM_WORLD_SIZE",), ()),
    (("PMI_RANK",), ("MPI_LOCALRANKID",), ("PMI_SIZE",), ()),
    (("SLURM_PROCID",), ("SLURM_LOCALID",), slurm.STEP_TASKS, ("SLURM_NODEID",)),
)
"""Where each launcher tells rank, local rank, world size and node; in every list the first that holds a number counts. (MPI does
not tell the node: OMPI_COMM_WORLD_NODE_RANK is the rank on the node, and how ranks are dealt to nodes is an option of mpirun.)"""


def _place(env: Mapping[str, str]) -> tuple[int, int, int, int | None]:
    """(rank, local_rank, world_size, node_rank), from the first launcher that tells a world size."""
    for names in _LAUNCHERS:
        rank, local, size, node = (_first(env, choice) for choice in names)
        if rank is None or size is None or not 0 <= rank < size:
            continue
        if names[0] == ("SLURM_PROCID",) and (not slurm.under_srun(env) or (size == 1 and in_group())):
            continue  # one task may start several processes, by mp.spawn
        return rank, local or 0, size, 0 if size == 1 else node
    if in_group():
        distributed = sys.modules["torch.distributed"]
        size = distributed.get_world_size()
        return distributed.get_rank(), _int(env.get("LOCAL_RANK")) or 0, size, _int(env.get("GROUP_RANK"))
    return 0, 0, 1, 0


def _first(env: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    return next((found for name in names if (found := _int(env.get(name))) is not None), None)


def _named_by_launcher(env: Mapping[str, str], mine: Identity, folder: Path, before: int) -> tuple[str | None, int]:
    """(run, attempt) where a launcher has a real id for this training; an attempt of 0 is rank 0's to draw.

    A requeued SLURM job keeps its id: a new attempt of the same run. before: how many runs this process has had.
    """
    if env.get("SLURM_JOB_ID") and slurm.under_srun(env) and slurm.whole_step(env, mine.rank, mine.world_size):
        elastic = "TORCHELASTIC_RESTART_COUNT" in env
        # the workers that torchrun starts again belong to the training that their agent began
        starter = _elastic_agent() if elastic else os.getpid()
        local = "0" if elastic else env.get("LOCAL_RANK", str(mine.rank))
        owner = f"{starter}-{process_start(starter)}-{before}"
        run = slurm.run_id(env, slurm.count_training(folder, env, owner=owner, local_rank=local))
        if mine.rank == 0:
            _sweep(folder)
        shared = mine.world_size > 1 and not elastic and slurm.ranks_are_tasks(env, mine.rank, mine.world_size)
        return run, slurm.job_started_ms(env) if shared else 0
    rendezvous = env.get("TORCHELASTIC_RUN_ID", "")
    # torchrun's own ids: "none" by default, a random uuid with --standalone; a bare number (100 in PyTorch's documentation,
    # $RANDOM in many scripts) names many jobs: only a name that somebody chose is an id
    if rendezvous and rendezvous != "none" and not rendezvous.isdigit() and not _is_uuid(rendezvous):
        return _fit_for_an_address(rendezvous), 0
    return None, 0


def _fit_for_an_address(name: str) -> str:
    """A run id from a name that was chosen for something else."""
    return name if identity_problem("run", name) is None else re.sub(r"[^\w.:@+=-]", "-", name)[:128].strip(".") or "job"


def _is_uuid(text: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}", text) is not None


def _job_key(env: Mapping[str, str], machine: str) -> str | None:
    """A name that all ranks of this job on this node derive alike and no other job does; None where the environment has none.

    It outlives a launcher's restart of its workers: torchrun's agent stays the parent process. machine: homes are shared between
    nodes, and so are the locks in them.
    """
    rank, _, size, _ = _place(env)
    if env.get("TORCHELASTIC_RESTART_COUNT") is not None:
        # python -m perfagent run replaces itself, so the agent is the parent; a wrapper script between is followed upwards
        agent = _elastic_agent()
        parts = ["elastic", env.get("TORCHELASTIC_RUN_ID", ""), env.get("MASTER_ADDR", ""), str(agent), str(process_start(agent))]
    elif env.get("PMIX_NAMESPACE"):
        parts = ["pmix", env["PMIX_NAMESPACE"]]
    elif env.get("MASTER_PORT") and env.get("MASTER_ADDR"):
        # a container for each task (`srun apptainer exec`) hides who started the tasks; their step is the same
        tasks = slurm.under_srun(env) and slurm.ranks_are_tasks(env, rank, size)
        starter = f"{env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}" if tasks else str(_starter(_told_by(env, rank, size)))
        parts = ["address", env["MASTER_ADDR"], env["MASTER_PORT"], env.get("WORLD_SIZE", ""), starter]
    elif env.get("SLURM_JOB_ID") and slurm.under_srun(env):
        parts = ["slurm", env["SLURM_JOB_ID"], env.get("SLURM_STEP_ID", "")]
    elif any(env.get(names[0][0]) for names in _LAUNCHERS[1:4]):
        daemon = _starter(_told_by(env, rank, size))  # one a node starts the ranks there
        parts = ["mpi", str(daemon), str(process_start(daemon))]
    else:
        address = _store_address()
        if address is None:
            return None
        parts = ["store", address]
    return hashlib.sha256("\0".join([*parts, machine]).encode()).hexdigest()[:24]


def _machine() -> str:
    """This node, told from every other: the name alone may be "localhost" on all, the boot alone is that of many containers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        boot = ""
    return f"{os.uname().nodename} {boot}"


def _store_address() -> str | None:
    """Where the ranks of an initialised torch.distributed met, which nobody told in the environment (mp.spawn, tcp://)."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    try:
        store = distributed.distributed_c10d._get_default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        return f"{store.host}:{store.port}" if hasattr(store, "port") else str(store.path)
    except Exception:  # noqa: BLE001 - a store of another kind, or of another torch
        return None


def _elastic_agent() -> int:
    """Pid of torchrun's agent, which tells its workers of their restarts."""
    return _starter(["TORCHELASTIC_RESTART_COUNT"])


def _told_by(env: Mapping[str, str], rank: int, size: int) -> list[str]:
    """The variables by which this process was told that it is this rank of so many, but for SLURM's."""
    return [names[0][0] for names in _LAUNCHERS[:4] if (_first(env, names[0]), _first(env, names[2])) == (rank, size)]


def _starter(told: list[str]) -> int:
    """Pid of what told a rank these variables: the nearest ancestor that was started without them. A script or a program of its
    own between the two (`mpirun sh task.sh`, `timeout 1h python train.py`) is another process for each rank."""
    names = tuple(f"{name}=".encode() for name in told)
    pid = os.getppid()
    for _ in range(8):
        try:
            if not any(variable.startswith(names) for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")):
                return pid
            pid = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
        except (OSError, ValueError, IndexError):  # somebody else's, as SLURM's daemon: none of a rank's own
            break
    return pid


def process_start(pid: int) -> int:
    """Start of a process in clock ticks after boot, 0 when it is gone: with the pid, a name that is never reused."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def owner_line(pid: int) -> str:
    """What the lock file of a source holds: by it, the watcher finds the folder of the process that it watches."""
    return f"{pid} {process_start(pid)}"


class Meeting:
    """Where rank 0 leaves run, attempt and start step for the others: a file for its node, the job's store for other nodes."""

    def __init__(self, folder: Path, key: str | None, env: Mapping[str, str], started: int, ordinal: int) -> None:
        """key: the same for all ranks of a node, and of one node only. ordinal: which run of this process it is."""
        self._path = folder / (f"{key}-{ordinal}.json" if ordinal else f"{key}.json") if key else None
        self._restart = _int(env.get("TORCHELASTIC_RESTART_COUNT")) or 0
        self._elastic = env.get("TORCHELASTIC_RESTART_COUNT") is not None
        self._agent_store = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._by_hand = not self._elastic and bool(env.get("RANK"))
        self._in_group = False  # at any time
        self._address = env.get("MASTER_ADDR", ""), _int(env.get("MASTER_PORT")) or 0
        self._store_key = f"{STORE_KEY}/{self._restart}/{ordinal}"
        self._started = started
        self._since = time.monotonic()
        self._store: Any = None
        self._store_failed = 0
        self._filed = self._stored = False
        self._next_store = 0.0

    @property
    def publishing(self) -> bool:
        """Whether rank 0 still waits for the job's store, which often comes long after it knows the run's id."""
        return not self._stored and self._store_failed < _MOST_FAILURES

    def poll(self, mine: Identity) -> None:
        self._in_group = self._in_group or in_group()
        if mine.rank == 0:
            self._settle(mine)
            self._publish(mine)
        elif not mine.known:
            self._look(mine)

    def _settle(self, mine: Identity) -> None:
        """Rank 0 decides. After a launcher's restart the run keeps the id of the attempt before."""
        if mine.run is None:
            earlier = self._read_file()
            mine.run = str(earlier["run"]) if earlier and self._elastic else draw_id()
        mine.attempt = mine.attempt or self._started

    def _message(self, mine: Identity) -> dict[str, Any]:
        return {
            "run": mine.run,
            "attempt": mine.attempt,
            "start_step": mine.start_step,
            "restart": self._restart,
            "pid": os.getpid(),
            "pid_start": process_start(os.getpid()),
        }

    def _publish(self, mine: Identity) -> None:
        if self._path is not None and not self._filed:
            self._filed = True
            temporary = self._path.with_suffix(f".{os.getpid()}")
            with contextlib.suppress(OSError):
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                _sweep(self._path.parent)
                fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
                with os.fdopen(fd, "w", encoding="utf-8") as file:
                    json.dump(self._message(mine), file)
                temporary.replace(self._path)
        if not self._stored:
            store = self._find_store()
            if store is not None:
                try:
                    store.set(self._store_key, json.dumps(self._message(mine)))
                    self._stored = True
                except Exception:  # noqa: BLE001 - whatever the store's backend raises: the file and a later try remain
                    self._lose_store()

    def _look(self, mine: Identity) -> None:
        found = self._read_file()
        if found is not None and not self._fits(found):
            found = None
        if found is None:
            found = self._read_store()
        if found is not None:
            mine.run, mine.attempt = str(found["run"]), int(found["attempt"])
            if mine.start_step is None and isinstance(found.get("start_step"), int):
                mine.start_step = found["start_step"]
        elif self._by_hand and not self._in_group and self._has_waited(mine):
            mine.stand_alone(self._started)
        elif time.monotonic() - self._since > ALONE_AFTER_S and mine.run is not None:
            mine.attempt = (
                mine.attempt or self._started
            )  # a named run without a meeting place: an attempt of its own is better than none

    def _has_waited(self, mine: Identity) -> bool:
        """Whether a rank that trains in no group need look no longer for the others: its variables may be those of an
        earlier training, in the same shell."""
        return mine.ended() or (mine.begun() and (self._path is None or time.monotonic() - self._since > ALONE_AFTER_S))

    def _fits(self, found: dict[str, Any]) -> bool:
        """Whether the file is of this start of the job. Outside torchrun the key may be an older job's: its rank 0 must live."""
        if self._elastic:
            return found.get("restart") == self._restart
        return process_start(int(found.get("pid", 0))) == found.get("pid_start") != 0

    def _read_file(self) -> dict[str, Any] | None:
        if self._path is None:
            return None
        try:
            return _message(self._path.read_text(encoding="utf-8"))
        except OSError:
            return None

    def _read_store(self) -> dict[str, Any] | None:
        store = self._find_store()
        if store is None:
            return None
        key = self._store_key
        try:
            if not store.check([key]):
                return None
            return _message(store.get(key).decode("utf-8"))
        except Exception:  # noqa: BLE001 - a store whose host is gone raises what its backend likes
            self._lose_store()
            return None

    def _find_store(self) -> Any:
        """The job's key-value store, once torch.distributed has one; tried once a second, given up after ten failures."""
        if self._store is not None or self._store_failed >= _MOST_FAILURES or time.monotonic() < self._next_store:
            return self._store
        distributed = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available():
            return None
        if not self._agent_store and not distributed.is_initialized():
            return None
        self._next_store = time.monotonic() + 1.0
        try:
            if self._agent_store and all(self._address):
                from datetime import timedelta

                self._store = distributed.TCPStore(
                    self._address[0], self._address[1], is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5)
                )
            else:
                store = distributed.distributed_c10d._get_default_store()
                self._store = store.clone()  # one connection must not be shared by two threads
        except Exception:  # noqa: BLE001 - the store of a job that ends, or of a backend without clone()
            self._store_failed += 1
        return self._store

    def _lose_store(self) -> None:
        self._store = None
        self._store_failed += 1


def _message(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
        return found if isinstance(found["run"], str) and found["run"] and isinstance(found["attempt"], int) else None
    except (ValueError, KeyError, TypeError):
        return None


def _sweep(folder: Path) -> None:
    """Jobs end without a word; what they left a week ago goes when the next one starts. The links that count a step's trainings
    stay for eight: that step may still be running."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                age_s = time.time() - path.lstat().st_mtime
                if age_s > _WEEK_S and (age_s > 8 * _WEEK_S or not path.is_symlink()):
                    path.unlink()


def _int(text: str | None) -> int | None:
    try:
        return int(text) if text else None
    except ValueError:
        return None
