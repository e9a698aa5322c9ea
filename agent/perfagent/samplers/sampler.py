"""What the host, this process and its GPU do, once a second, in the same rows as the training series.

No thread of its own: host and process are read on the sender's tick, NVML on the courier's thread (see sender.py). Utilization
is read twice a second and its mean is sent. Each rank sends `process/*` and the `gpu/*` of its own device; one rank of the node,
elected by a lock file, sends `host/*` and the GPUs that belong to no rank as `node_gpu<i>/*`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfagent.samplers.host import HostReader, ProcessReader
from perfagent.samplers.nvml import Device, devices, visible

if TYPE_CHECKING:
    from perfagent.delivery.sender import Sender

__all__ = ["Sampler"]

SLOW_EVERY = 1  # of the once-a-second rounds: memory, power, temperature, clocks
ELECTION_S = 10.0


class Sampler:
    """`Sampler(sender, step=lambda: current_step).install()`.

    step: the step that a sample belongs to. device: ordinal of this rank's CUDA device, or None while it has none; asked on the
    courier's thread. find_devices: the NVML probe (a test passes fake devices).
    """

    def __init__(
        self,
        sender: Sender,
        *,
        step: Callable[[], int],
        device: Callable[[], int | None] | None = None,
        find_devices: Callable[[], Sequence[Device]] = devices,
        environ: Mapping[str, str] | None = None,
        host: HostReader | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sender, self._step, self._clock = sender, step, clock
        self._identity, self._config = sender.identity, sender.config
        self._environ = os.environ if environ is None else environ
        self._device = device or self._guess_device
        self._find_devices = find_devices
        self._host, self._process = host or HostReader(), ProcessReader()
        self.period_s = self._config.sample_s
        """The governor may stretch it."""
        self._next = 0.0
        self._next_gpu = 0.0
        self._devices: list[Device] | None = None
        self._visible: list[Device] = []
        self._own: Device | None = None
        self._utilization: dict[int, list[float]] = {}
        self._gpu_values: dict[str, float] = {}
        self._lost: set[int] = set()
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._started = clock()
        self._lock_fd = -1
        self._elected = self._elect(late=False)
        forget = weakref.WeakMethod(self._in_forked_child)
        os.register_at_fork(after_in_child=lambda: (method := forget()) and method())

    def install(self) -> None:
        self._sender.add_source(self.poll)
        self._sender.add_slow_source(self.poll_gpu)

    def poll(self) -> None:
        """On the sender thread."""
        now = self._clock()
        if now < self._next:
            return
        self._next = _following(self._next, now, self.period_s)
        values = self._process.read(now)
        if not self._elected and now - self._started > ELECTION_S:
            self._started = now
            self._elected = self._elect(late=True)
        if self._elected:
            values.update(self._host.read(now))
        values.update(self._gpu_values)
        self._gpu_values = {}
        if values:
            names = tuple(values)
            self._sender.rows.append(
                (self._step(), time.time(), now, self._names.setdefault(names, names), tuple(values.values()))
            )

    def poll_gpu(self) -> None:
        """On the courier's thread, about twice a second."""
        if self._devices is None:
            self._devices = list(self._find_devices())
            self._visible = visible(self._devices, self._environ)
        if not self._devices:
            return
        if self._own is None:
            ordinal = self._device()
            if ordinal is not None and 0 <= ordinal < len(self._visible):
                self._own = self._visible[ordinal]
        now = self._clock()
        watched = [
            (device, prefix)
            for device in self._devices
            if (prefix := self._prefix(device)) is not None and device.index not in self._lost
        ]
        report = now >= self._next_gpu
        if report:
            self._next_gpu = _following(self._next_gpu, now, self.period_s)
        values: dict[str, float] = {}
        for device, prefix in watched:
            try:
                used = device.utilization_pct()
                readings = self._utilization.setdefault(device.index, [])
                if used is not None:
                    readings.append(used)
                if report:
                    if readings:
                        values[prefix + "utilization_pct"] = sum(readings) / len(readings)
                        readings.clear()
                    values.update((prefix + name, value) for name, value in device.read().items())
            except Exception:  # noqa: BLE001 - NVML's errors are made at run time; a lost device answers every call with one
                self._lost.add(device.index)
        if values:
            self._gpu_values = values

    def _prefix(self, device: Device) -> str | None:
        if device is self._own:
            return "gpu/"
        if not self._elected or device in self._of_ranks():
            return None
        return f"node_gpu{device.index}/"

    def _of_ranks(self) -> list[Device]:
        """Devices that other ranks of this node report themselves: rank by rank, as launchers place them."""
        local = int(self._environ.get("LOCAL_WORLD_SIZE") or 1)
        return self._visible[:local] if local > 1 else []

    def _guess_device(self) -> int | None:
        """CUDA's ordinal of this rank's device, once this process uses CUDA. (The current device is a matter of each thread, so
        it cannot be asked for here.)"""
        torch: Any = sys.modules.get("torch")
        cuda = getattr(torch, "cuda", None)
        if cuda is None or not hasattr(cuda, "is_initialized") or not cuda.is_initialized():
            return None
        return self._identity.local_rank if self._identity.local_rank < len(self._visible) else 0

    # ---- who speaks for the node

    def _elect(self, *, late: bool) -> bool:
        """The lowest local rank takes the job's lock at once; another one takes it later, when that rank is gone."""
        key = self._identity.job_key
        if self._identity.world_size <= 1 or key is None:
            return True
        if self._identity.local_rank > 0 and not late:
            return False
        folder = Path(self._config.state_dir) / "jobs"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(folder / f"{key}.node", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return self._identity.local_rank == 0
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return False
        self._lock_fd = fd
        return True

    def _in_forked_child(self) -> None:
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


def _following(due: float, now: float, period_s: float) -> float:
    """The next due time: on the beat of the first, or a period from now when beats were missed."""
    return due + period_s if due + period_s > now else now + period_s
