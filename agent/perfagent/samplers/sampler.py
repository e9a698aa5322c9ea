"""Samples the host, this process and its GPU once a second, into rows like those of the training series.

Host and process are read on the sender's tick; NVML and file systems, which may hang, on the courier's thread. Each rank sends
`process/*` and the `gpu/*` of its own device; one rank of the node, elected by a lock file, sends `host/*` and the GPUs that
belong to no rank as `node_gpu<i>/*`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from perfagent.device.memory import allocator, device_in_use
from perfagent.process.descriptors import Descriptor, opened
from perfagent.samplers import folders
from perfagent.samplers.folders import FolderSampler
from perfagent.samplers.process import PSS_EVERY_S, ProcessReader, WorkerMemory, WorkerReader

if TYPE_CHECKING:
    from perfagent.delivery.handoff import Source
    from perfagent.delivery.sender import Sender
    from perfagent.samplers.gpu.nvml import Library
    from perfagent.samplers.gpu.sampler import GpuSampler
    from perfagent.samplers.host import HostReader
    from perfagent.samplers.training_thread import TrainingThreadReader

__all__ = ["Sampler"]

_IMPORTS = (
    "perfagent.samplers.host",
    "perfagent.samplers.training_thread",
    "perfagent.samplers.gpu.sampler",
    *(("pynvml",) if os.path.exists("/dev/nvidiactl") else ()),  # noqa: PTH110 - a tenth of the time of a Path
)
"""What `poll` needs: imported when the sender starts, so that no fork can come between."""
ELECTION_S = 10.0
HUNG_S = 2.0
"""NVML answers in microseconds or, when a GPU fell off the bus, never."""


class _Readers(NamedTuple):
    """Made on the sender's thread: what they open costs the training thread nothing."""

    host: HostReader
    process: ProcessReader
    workers: WorkerReader
    thread: TrainingThreadReader


class Sampler:
    """step: the step that a sample belongs to. begun: whether one has ended. thread: the training thread's number in the
    kernel, and how many steps it has completed. device: index of this rank's device, None while it has none; asked on both
    threads. library: starts NVML (a test passes its own, and its own host).
    """

    def __init__(
        self,
        sender: Sender,
        *,
        step: Callable[[], int],
        begun: Callable[[], bool] = lambda: True,
        thread: Callable[[], tuple[int | None, int]] = lambda: (None, 0),
        device: Callable[[], int | None] = device_in_use,
        library: Callable[[], tuple[Library | None, str]] | None = None,
        environ: Mapping[str, str] | None = None,
        host: HostReader | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sender, self._step, self._begun, self._clock = sender, step, begun, clock
        self._identity, self._config = sender.identity, sender.config
        self._environ = os.environ if environ is None else environ
        self._thread, self._device, self._library, self._host = thread, device, library, host
        self._readers: _Readers | None = None
        self.folders = FolderSampler(self._emit, self._config.record or self._config.state_dir)
        self.period_s = self._config.sample_s
        """The governor may stretch it."""
        self._next = 0.0
        self._source: Source | None = None
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._lock: Descriptor | None = None
        self._elected = False
        self._elect_at = 0.0
        self._gpus: GpuSampler | None = None
        self._gpu_since = 0.0
        self._gpu_hung = False
        self._stopped = False
        forget = weakref.WeakMethod(self.resign)
        os.register_at_fork(after_in_child=lambda: (method := forget()) and method())

    def install(self) -> None:
        self._sender.imports += _IMPORTS
        self._source = self._sender.add_source(self.poll)
        self._sender.add_slow_source(self.poll_gpu)
        self._sender.add_slow_source(self.folders.poll, every_s=folders.EVERY_S)
        self._sender.add_slow_source(WorkerMemory(self._emit).poll, every_s=PSS_EVERY_S)

    def stop(self) -> None:
        """Other processes train in place of this one, and speak for the same rank."""
        self._stopped = True

    def poll(self) -> None:
        """On the sender thread, at every tick while memory is tight, else once a period."""
        if self._stopped:
            return
        now = self._clock()
        readers = self._readers or self._open()
        if now < self._next:
            # the kernel may kill us before the next second: leave the last word
            if readers.host.tight and self._elected:
                self._emit(readers.host.memory(now) | readers.process.memory())
            return
        # on the beat of the first, or a period from now when beats were missed
        self._next = self._next + self.period_s if self._next + self.period_s > now else now + self.period_s
        values = readers.process.read(now)
        values.update(readers.workers.read(now))
        values.update(readers.thread.read(now))
        if not self._elected and self._identity.joining is None and now > self._elect_at:
            self._elected = self._elect(late=self._elect_at > 0.0)
            self._elect_at = now + ELECTION_S
        if self._elected:
            values.update(readers.host.read(now))
        hung = 0.0 < self._gpu_since < now - HUNG_S
        if hung and not self._gpu_hung:
            self._report_gpu({"what": "unavailable", "reason": "driver_hangs"})
        self._gpu_hung = hung
        values.update(self._allocator())
        self._emit(values)
        if self._source is not None and not readers.host.tight:
            self._source.due = self._next

    def _open(self) -> _Readers:
        from perfagent.samplers.host import HostReader
        from perfagent.samplers.training_thread import TrainingThreadReader

        self._readers = _Readers(
            self._host or HostReader(), ProcessReader(), WorkerReader(), TrainingThreadReader(self._thread)
        )
        return self._readers

    def _allocator(self) -> dict[str, float]:
        device = self._device()
        if device is None:
            return {}
        gpus = None if self._gpu_hung else self._gpus
        return allocator(device, free_bytes=None if gpus is None else gpus.free_bytes)

    def _report_gpu(self, data: dict[str, object]) -> None:
        self._sender.event("gpu", data, step=self._step())

    def poll_gpu(self) -> bool:
        """On the courier's thread, twice a second. False where this machine has no GPU that could be asked."""
        if self._stopped:
            return False
        if self._identity.joining is not None:
            return True
        if self._gpus is None:
            from perfagent.samplers.gpu.nvml import load
            from perfagent.samplers.gpu.own import Claims
            from perfagent.samplers.gpu.sampler import GpuSampler

            self._gpus = GpuSampler(
                self._emit, self._report_gpu, ordinal=self._device, step=self._step, begun=self._begun,
                elected=lambda: self._elected, period_s=lambda: self.period_s, environ=self._environ,
                claims=Claims(Path(self._config.state_dir) / "jobs", self._identity.job_key),
                library=self._library or load, clock=self._clock,
            )  # fmt: skip
        self._gpu_since = self._clock()
        try:
            return self._gpus.poll()
        finally:
            self._gpu_since = 0.0

    def _emit(self, values: dict[str, float]) -> None:
        """The values of this moment as a row; any thread."""
        if values:
            names = tuple(values)
            names = self._names.setdefault(names, names)
            self._sender.rows.append((self._step(), time.time(), self._clock(), names, tuple(values.values())))

    # ---- who speaks for the node

    def _elect(self, *, late: bool) -> bool:
        """The lowest local rank takes the job's lock at once; another one takes it later, when that rank is gone."""
        key, local_rank = self._identity.job_key, self._identity.local_rank
        if self._identity.world_size <= 1 or key is None:
            return True
        if local_rank > 0 and not late:
            return False
        folder = Path(self._config.state_dir) / "jobs"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._lock is None or not self._lock.is_ours:
                self._lock = opened(folder / f"{key}.node", os.O_RDWR | os.O_CREAT)
            fcntl.flock(self._lock.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # on a file system without locks (ENOSYS, ENOLCK, EOPNOTSUPP) nobody could ever hold this one
            return not isinstance(error, BlockingIOError) and local_rank == 0
        return True

    def resign(self) -> None:
        """The run is over, or this is a forked child: another rank, or the next run of this process, may speak for the node."""
        lock, self._lock = self._lock, None
        with contextlib.suppress(OSError):
            if lock is not None:
                lock.close()
        self._readers = None  # which closes their files
