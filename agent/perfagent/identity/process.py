"""The identity of this process: project, run, attempt, rank."""

from __future__ import annotations

import itertools
import os
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from perfagent.identity.launchers import job_key, named_by_launcher, place, this_node
from perfagent.identity.naming import default_name, draw_id
from perfagent.identity.process_group import Joining, in_group, may_join
from perfagent.identity.rendezvous import Meeting, Member
from perfagent.process.launch_options import Start, parents_start

if TYPE_CHECKING:
    from perfagent.agent_config import AgentConfig

__all__ = ["Identity"]

_meetings = itertools.count()
_runs = itertools.count()
_NO_START = Start()


@dataclass(slots=True, kw_only=True)
class Identity(Member):
    """run: None until it is known (ranks above 0 of a job without a named run). source: this process in this attempt.
    attempt: rank 0's start in Unix milliseconds, shared by all ranks. local_rank: 0 where the launcher says nothing;
    node_rank: None there."""

    project: str
    name: str | None = None
    source: str = field(default_factory=lambda: uuid.uuid4().hex)
    local_rank: int = 0
    world_size: int = 1
    node_rank: int | None = 0
    shared: bool = False
    """Whether the watcher of `perfagent run` may have spoken as this source already."""
    group: Path | None = field(default=None, repr=False)
    """A file that is there once a group of spawned ranks trains in place of this launched process."""
    job_key: str | None = None
    """A name that the ranks of this job on this node share (None where the environment has none)."""
    meeting: Meeting | None = field(default=None, repr=False)
    joining: Joining | None = field(default=None, repr=False)
    """While it is open whether this process is a rank of a job: place, run and attempt are those that it has if it is none, and
    nothing is sent."""
    placed: Callable[[], None] = field(default=lambda: None, repr=False)
    """Called by poll() where this process turns out to be another rank than was said first."""

    @property
    def settled(self) -> bool:
        """Whether there is nothing left to poll for: rank 0 has published the run for the other nodes, too."""
        if self.joining is not None:
            return False
        return self.known and (self.meeting is None or self.rank != 0 or not self.meeting.publishing)

    def poll(self) -> bool:
        """On the sender thread: publishes (rank 0) or looks for (others) the run's id. True once it is known."""
        if self.joining is not None:
            if not self.joining.over(begun=self.begun()):
                return False
            self._settle(self.joining)
        if self.meeting is not None and self.meeting.poll(self):
            self._stand_alone(self.meeting.started)
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
        start: Start = _NO_START,
        environ: Mapping[str, str] | None = None,
        now: Callable[[], float] = time.time,
        machine: Callable[[], str] | None = None,
    ) -> Identity:
        """meet: look for the other ranks of a job; a command that will become the trainer only wants to know its place.
        ordinal: which run of this process it is, counted when not given. start: what `perfagent run` drew for this start
        of the job; an id that was given wins. machine: names the node; a test has several on one."""
        env = os.environ if environ is None else environ
        mine = cls(project=config.project, run=config.run_id, name=name, start_step=start_step)
        mine.rank, mine.local_rank, mine.world_size, mine.node_rank = place(env)
        started = max(1, int(now() * 1000))
        folder = config.state_dir / "jobs"
        if mine.run is None:
            before = ordinal if ordinal is not None else next(_runs) if meet else 0
            mine.run = named_by_launcher(env, mine.rank, mine.world_size, before)
        mine.run = mine.run or start.run
        if start.attempt and mine.run == start.run and (mine.world_size == 1 or mine._leads_first_group(folder, start)):
            mine.attempt = start.attempt
            if start.source:
                mine.shared, mine.source, mine.group = True, start.source, _group_file(folder, start)
        key = mine.job_key = job_key(env, (machine or this_node)())
        if mine.world_size <= 1 or (key is None and mine.rank == 0 and "torch.distributed" not in sys.modules):
            mine.attempt = mine.attempt or started
            mine.run = mine.run or draw_id()
        if meet and mine.world_size <= 1 and may_join():
            mine.joining = Joining(folder, config.run_id, mine.attempt)
        if meet and mine.world_size > 1:
            again = next(_meetings) if ordinal is None else ordinal
            mine.meeting = Meeting(folder, key, env, started, again)
            mine.meeting.poll(mine)
        return mine

    def _settle(self, joining: Joining) -> None:
        """It is a rank of the group that it has joined, or alone."""
        self.joining = None
        if in_group():
            self.rank, self.local_rank, self.world_size, self.node_rank = place(os.environ)
        if self.world_size > 1:
            start = parents_start()
            self.run, self.attempt = joining.named or start.run or (self.run if self.rank == 0 else None), 0
            if start.attempt and self.run == start.run and self._leads_first_group(joining.folder, start):
                self.attempt = start.attempt
            self.job_key = job_key(os.environ, this_node())
            self.meeting = Meeting(joining.folder, self.job_key, os.environ, joining.started, next(_meetings))
        self.placed()

    def _leads_first_group(self, folder: Path, start: Start) -> bool:
        """Whether this is rank 0 of the first group that a launched process spawned, which is part of that process's attempt; a
        later group is an attempt of its own."""
        if self.rank != 0:
            return False
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _group_file(folder, start).touch(mode=0o600, exist_ok=False)
        except OSError as error:  # without a disk: the first group is the usual one
            return not isinstance(error, FileExistsError)
        return True

    def default_name(self, given: str | None, started: str | None = None) -> str | None:
        """Of a run with a random id, which rank 0 sends; else None. given: the id that the user chose. started: the script,
        where this process is not yet the one that runs it."""
        if self.rank != 0 or self.joining is not None or self.run is None or given is not None or "-" in self.run:
            return None
        return default_name(self.run, started)

    def adopt(self, run: str) -> None:
        """The training continues that run, from a checkpoint. The other ranks read the same one, or learn it from rank 0."""
        self.run = run
        if self.joining is not None:
            self.joining.named = run
        if self.meeting is not None:
            self.meeting.publish_again()

    def _stand_alone(self, started: int) -> None:
        """The environment describes a job that does not exist: variables that were left in a shell."""
        self.rank, self.local_rank, self.world_size, self.node_rank = 0, 0, 1, 0
        self.run, self.attempt, self.meeting = self.run or draw_id(), started, None
        self.placed()


def _group_file(folder: Path, start: Start) -> Path:
    return folder / f"{start.run}-{start.attempt}.group"
