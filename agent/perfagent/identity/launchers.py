"""Reads from a launcher's environment the rank of a process, the run id where there is one, and a name that all ranks
of a job on one node share.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from perfagent.identity import slurm
from perfagent.identity.process_group import in_group
from perfagent.identity.slurm import first_number, number
from perfagent.process.pids import boot_id, owner_line
from perfagent.wire.limits import identity_problem

__all__ = ["STORE_ERRORS", "job_key", "named_by_launcher", "place", "sweep", "this_node"]

STORE_ERRORS = (RuntimeError, ValueError, OSError, AttributeError, TypeError)
"""What torch's stores raise: RuntimeError of every kind, ValueError without a group; a backend may lack a method."""
_WEEK_S = 7 * 86400.0
_LAUNCHERS = (
    # torchrun, deepspeed, scripts of one's own
    (("RANK",), ("LOCAL_RANK",), ("WORLD_SIZE",), ("GROUP_RANK", "NODE_RANK", "CROSS_RANK", "SLURM_NODEID")),
    (("OMPI_COMM_WORLD_RANK",), ("OMPI_COMM_WORLD_LOCAL_RANK",), ("OMPI_COMM_WORLD_SIZE",), ()),
    (("MV2_COMM_WORLD_RANK",), ("MV2_COMM_WORLD_LOCAL_RANK",), ("MV2_COMM_WORLD_SIZE",), ()),
    (("PMI_RANK",), ("MPI_LOCALRANKID",), ("PMI_SIZE",), ()),
    (("SLURM_PROCID",), ("SLURM_LOCALID",), slurm.STEP_TASKS, ("SLURM_NODEID",)),
)
"""Where each launcher tells rank, local rank, world size and node; in every list the first that holds a number counts.
(MPI does not tell the node: OMPI_COMM_WORLD_NODE_RANK is the rank on the node, and how ranks are dealt to nodes is an
option of mpirun.)"""


def place(env: Mapping[str, str]) -> tuple[int, int, int, int | None]:
    """(rank, local_rank, world_size, node_rank), from the first launcher whose variables hold a world size."""
    for names in _LAUNCHERS:
        rank, local, size, node = (first_number(env, choice) for choice in names)
        if rank is None or size is None or not 0 <= rank < size:
            continue
        if names[0] == ("SLURM_PROCID",) and (not slurm.under_srun(env) or (size == 1 and in_group())):
            continue  # one task may start several processes, by mp.spawn
        return rank, local or 0, size, 0 if size == 1 else node
    if in_group():
        distributed = sys.modules["torch.distributed"]
        size = distributed.get_world_size()
        return distributed.get_rank(), number(env, "LOCAL_RANK") or 0, size, number(env, "GROUP_RANK")
    return 0, 0, 1, 0


def named_by_launcher(env: Mapping[str, str], rank: int, size: int, before: int) -> str | None:
    """The run, where a launcher has a real id for this training. before: how many runs this process has had."""
    run = slurm.run_id(env, rank, size, before)
    if run is not None:
        return run
    rendezvous = env.get("TORCHELASTIC_RUN_ID", "")
    # torchrun's own ids: "none" by default, a random uuid with --standalone; a bare number (100 in PyTorch's
    # documentation, $RANDOM in many scripts) names many jobs: only a name that somebody chose is an id
    if re.fullmatch(r"|none|\d+|[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}", rendezvous):
        return None
    if identity_problem("run", rendezvous) is None:
        return rendezvous
    return re.sub(r"[^\w.:@+=-]", "-", rendezvous)[:128].strip(".") or "job"


def job_key(env: Mapping[str, str], machine: str) -> str | None:
    """A name that all ranks of this job on this node derive alike and no other job does; None where the environment has none. It
    outlives a launcher's restart of its workers. machine: homes are shared between nodes, and so are the locks in them."""
    rank, _, size, _ = place(env)
    if env.get("TORCHELASTIC_RESTART_COUNT") is not None:
        agent = owner_line(_starter(["TORCHELASTIC_RESTART_COUNT"]))
        parts = ["elastic", env.get("TORCHELASTIC_RUN_ID", ""), env.get("MASTER_ADDR", ""), agent]
    elif env.get("PMIX_NAMESPACE"):
        parts = ["pmix", env["PMIX_NAMESPACE"]]
    elif env.get("MASTER_PORT") and env.get("MASTER_ADDR"):
        # a container for each task (`srun apptainer exec`) hides who started the tasks; their step is the same
        tasks = slurm.under_srun(env) and slurm.ranks_are_tasks(env, rank, size)
        starter = f"{env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}" if tasks else str(_starter(_set_by(env, rank, size)))
        parts = ["address", env["MASTER_ADDR"], env["MASTER_PORT"], env.get("WORLD_SIZE", ""), starter]
    elif env.get("SLURM_JOB_ID") and slurm.under_srun(env):
        parts = ["slurm", env["SLURM_JOB_ID"], env.get("SLURM_STEP_ID", "")]
    elif any(env.get(names[0][0]) for names in _LAUNCHERS[1:4]):
        parts = ["mpi", owner_line(_starter(_set_by(env, rank, size)))]  # one daemon a node starts the ranks there
    else:
        address = _store_address()
        if address is None:
            return None
        parts = ["store", address]
    return hashlib.sha256("\0".join([*parts, machine]).encode()).hexdigest()[:24]


def this_node() -> str:
    """A name for this node. The host name may be "localhost" on all of them, and containers share the id of their host's boot."""
    return f"{os.uname().nodename} {boot_id()}"


def _store_address() -> str | None:
    """Where the ranks of an initialized torch.distributed met, where no variable says it (mp.spawn, tcp://)."""
    if not in_group():
        return None
    distributed = sys.modules["torch.distributed"]
    try:
        store = distributed.distributed_c10d._get_default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        return f"{store.host}:{store.port}" if hasattr(store, "port") else str(store.path)
    except STORE_ERRORS:  # a store of another kind, or of another torch
        return None


def _set_by(env: Mapping[str, str], rank: int, size: int) -> list[str]:
    """The variables that say which rank of how many this process is, without those of SLURM."""
    claims = ((names[0], first_number(env, names[0]), first_number(env, names[2])) for names in _LAUNCHERS[:4])
    return [names[0] for names, its_rank, its_size in claims if (its_rank, its_size) == (rank, size)]


def _starter(variable_names: list[str]) -> int:
    """Finds the launcher: the pid of the nearest ancestor that was started without these variables. A rank's parent may be
    a wrapper instead (`mpirun sh task.sh`, `timeout 1h python train.py`)."""
    names = tuple(f"{name}=".encode() for name in variable_names)
    pid = os.getppid()
    with contextlib.suppress(OSError, ValueError, IndexError):  # somebody else's, as SLURM's daemon: no rank's own
        for _ in range(8):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if not any(variable.startswith(names) for variable in variables):
                return pid
            pid = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    return pid


def sweep(folder: Path) -> None:
    """Jobs end without a word; what they left a week ago goes when the next one starts."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                if time.time() - path.lstat().st_mtime > _WEEK_S:
                    path.unlink()
