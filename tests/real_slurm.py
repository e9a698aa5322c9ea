"""A real SLURM of one node on this machine, as far as Debian's packages slurm-wlm and munge are there: two "GPUs" that are
devices of another kind."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from builders import free_port, until

__all__ = ["IS_INSTALLED", "Slurm", "slurm"]

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
IS_INSTALLED = os.geteuid() == 0 and all(shutil.which(name, path=_PATH) for name in _PROGRAMS)
_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldPort={controller}
SlurmdPort={node}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
MailProg=/bin/true
MinJobAge=600
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=64 RealMemory=1000 Gres=gpu:2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._environment = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _PATH}

    def ask(self, *words: str, **environment: str) -> str:
        done = subprocess.run(
            words, env={**environment, **self._environment}, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def submit(self, *words: str, environment: Mapping[str, str]) -> str:
        """The job's id."""
        path = f"{environment['PATH']}:{_PATH}"
        done = subprocess.run(
            ["sbatch", "--parsable", "-o", str(self.folder / "job.log"), *words],
            env={**environment, **self._environment, "PATH": path}, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def state(self, job: str) -> str:
        told = self.ask("scontrol", "show", "job", job)
        return told.partition("JobState=")[2].split()[0]

    @property
    def log(self) -> str:
        file = self.folder / "job.log"
        return file.read_text(errors="replace")[-4000:] if file.exists() else ""


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    text = _CONFIGURATION.format(host=socket.gethostname(), folder=folder, controller=free_port(), node=free_port())
    (folder / "slurm.conf").write_text(text)
    (folder / "gres.conf").write_text("AutoDetect=off\nName=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    munge = [f"--{name}={folder}/munge.{end}" for name, end in (
        ("key-file", "key"), ("socket", "socket"), ("pid-file", "pid"), ("log-file", "log"), ("seed-file", "seed"),
    )]  # fmt: skip
    running = Slurm(folder)
    commands = (["munged", "-F", "--force", *munge], ["slurmctld", "-D"], ["slurmd", "-D", "-N", socket.gethostname()])
    with contextlib.ExitStack() as stack:
        for command in commands:
            log = stack.enter_context((folder / f"{command[0]}.log").open("wb"))
            environment = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _PATH}
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            time.sleep(0.5)
        until(lambda: "idle" in running.ask("sinfo"), within_s=60, every_s=0.5, why="no node is idle")
        yield running
