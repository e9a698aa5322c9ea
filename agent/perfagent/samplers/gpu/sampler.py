"""Samples the GPUs that this process answers for: its own as `gpu/*`, and on one rank of a node the rest as
`node_gpu<i>/*`.

NVML, or else the files of AMD's and Intel's drivers, are read twice a second on the courier's thread, and sent once a second as
mean, minimum and maximum; counters every ten seconds. At 10 Hz and more NVML's calls queue up in the driver, and were seen to
block kernel launches.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence

from perfagent.samplers.gpu import kernel_gpu
from perfagent.samplers.gpu.board import DeviceLost, Interval
from perfagent.samplers.gpu.device import Gpu, slices, text_of
from perfagent.samplers.gpu.kernel_gpu import KernelGpu
from perfagent.samplers.gpu.nvml import NO_DRIVER, Door, Library, load
from perfagent.samplers.gpu.own import Board, Claims, own_board
from perfagent.samplers.gpu.xid import XidEvents

__all__ = ["GpuSampler"]

RARE_EVERY_S = 10.0
ENERGY_OVER_S = 5.0
"""The energy of a step is taken over at least this long: the counter moves in steps of 20 to 100 ms."""
OTHERS_AFTER_S = 60.0
"""For so long the boards of no rank are left out while ranks of this node have not named theirs."""

Emit = Callable[[dict[str, float]], None]
Tell = Callable[[dict[str, object]], None]


class GpuSampler:
    """`poll()`, about twice a second.

    emit: takes the values of one moment; tell: takes what happened (an event's data). ordinal: CUDA's number of this
    rank's device, or None while it has none. step: the step in progress. begun: whether one has ended. elected: whether
    this rank speaks for the node. period_s: how often values are sent. claims: which boards the other ranks report.
    library: starts NVML; kernel_gpus: finds the boards of AMD and Intel (a test passes its own).
    """

    def __init__(
        self,
        emit: Emit,
        tell: Tell,
        *,
        ordinal: Callable[[], int | None],
        step: Callable[[], int],
        begun: Callable[[], bool] = lambda: True,
        elected: Callable[[], bool],
        period_s: Callable[[], float],
        environ: Mapping[str, str],
        claims: Claims,
        library: Callable[[], tuple[Library | None, str]] = load,
        kernel_gpus: Callable[[], Sequence[KernelGpu]] = kernel_gpu.boards,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._emit, self._tell, self._clock = emit, tell, clock
        self._ordinal, self._step, self._begun, self._elected, self._period_s = ordinal, step, begun, elected, period_s
        self._environ, self._claims, self._start, self._kernel_gpus = environ, claims, library, kernel_gpus
        words = (environ.get("LOCAL_WORLD_SIZE") or "1").strip()
        self._ranks = int(words) if words.isdigit() else 1
        self._others_at = clock() + OTHERS_AFTER_S
        self._found: Sequence[Board] | None = None
        self._slices: dict[str, list[Gpu]] = {}
        self._own: Board | None = None
        self._intervals: dict[str, Interval] = {}
        self._lost: set[str] = set()
        self._events: XidEvents | None = None
        self._energy: dict[str, float] = {}
        self._energy_mark: tuple[float, float, int] | None = None
        self._next = self._next_rare = 0.0
        self.free_bytes: float | None = None
        """Memory of the own device that nobody uses, as of the last reading."""

    def poll(self) -> bool:
        """False where there is no GPU that could be asked: it need not be polled again."""
        now = self._clock()
        if self._found is None:
            self._probe()
        if not self._found:
            return False
        if self._own is None:
            ordinal = self._ordinal()
            if ordinal is not None:
                self._own = own_board(self._found, self._slices_of, ordinal, self._environ)
            if self._own is not None:
                self._claims.claim(self._own.board)
        report = now >= self._next
        rare = report and now >= self._next_rare
        if report:
            due = self._next + self._period_s()
            self._next = due if due > now else now + self._period_s()
        if rare:
            self._next_rare = now + RARE_EVERY_S
        values: dict[str, float] = {}
        watched = self._watched(now)
        for gpu, prefix in watched:
            if gpu.board in self._lost:
                continue
            try:
                self._read(gpu, prefix, values, now, report=report, rare=rare)
            except DeviceLost as error:
                self._lost.add(gpu.board)
                if gpu is self._own:
                    self.free_bytes = None
                self._tell({"what": "lost", "index": gpu.index, "uuid": gpu.uuid, "reason": str(error)})
        if self._events is not None:
            self._events.watch([gpu for gpu, _ in watched if isinstance(gpu, Gpu)])
            for failed, code in self._events.poll():
                values.update((prefix + "xid", float(code)) for one, prefix in watched if one is failed)
                which = {} if failed is None else {"index": failed.index, "uuid": failed.uuid}
                self._tell({"what": "xid", "code": code, **which})
        if values:
            self._emit(values)
        return True

    def _probe(self) -> None:
        self._found = []
        library, reason = self._start()
        if library is None:
            self._found = others = self._kernel_gpus() if reason == NO_DRIVER else []
            self._describe(others, kernel_gpu.driver_of(others), reason)
            return
        found: list[Gpu] = []
        door = Door(library)
        count = 0
        with contextlib.suppress(DeviceLost):
            count = int(door.ask("nvmlDeviceGetCount") or 0)
        for index in range(count):
            try:
                handle = door.ask("nvmlDeviceGetHandleByIndex", index, what=f"device {index}")
                if handle is not None:  # else a container that was not given this one, though it is counted
                    gpu = Gpu(library, index, handle)
                    self._slices[gpu.board] = slices(library, gpu)
                    found.append(gpu)
            except DeviceLost as error:  # one device that is gone must not hide the others
                self._tell({"what": "lost", "index": index, "reason": str(error)})
        self._events = XidEvents(library)
        self._found = found
        driver = None
        # a driver that goes at this moment is reported when a device is read, too
        with contextlib.suppress(DeviceLost):
            driver = door.ask("nvmlSystemGetDriverVersion")
        shown = [part for gpu in found for part in (self._slices_of(gpu) or [gpu])]
        self._describe(shown, text_of(driver), "no_device")

    def _describe(self, shown: Sequence[Board], driver: str, why_none: str) -> None:
        described = []
        for gpu in shown:
            with contextlib.suppress(DeviceLost):  # it is reported when it is read
                described.append(gpu.describe())
        found: dict[str, object] = {"what": "found", "driver": driver, "gpus": described}
        self._tell(found if shown else {"what": "unavailable", "reason": why_none})

    def _slices_of(self, gpu: Board) -> list[Gpu]:
        return self._slices.get(gpu.board, [])

    def _watched(self, now: float) -> list[tuple[Board, str]]:
        """(Device, prefix of its names). Lost devices stay: an Xid may still explain them."""
        watched = [(self._own, "gpu/")] if self._own is not None else []
        if self._elected():
            taken = self._claims.taken(now) | {gpu.board for gpu, _ in watched}
            if len(taken) >= self._ranks or now >= self._others_at:
                watched += [
                    (gpu, f"node_gpu{gpu.index}/")
                    for gpu in self._found or []
                    if gpu.board not in taken and not gpu.is_integrated
                ]
        return watched

    def _read(self, gpu: Board, prefix: str, values: dict[str, float], now: float, *, report: bool, rare: bool) -> None:
        own = gpu is self._own
        interval = self._intervals.get(prefix)
        if interval is None:
            interval = self._intervals[prefix] = Interval(spread=own)
        readings = gpu.readings()
        interval.add(readings)
        if own:
            self.free_bytes = gpu.free_bytes
        if not report:
            return
        found = interval.take() | gpu.second(now)
        self._add_energy(gpu, found, now, own=own)
        if own:
            found.update(gpu.processes.read(now))
        if rare:
            found.update(gpu.rare())
        values.update((prefix + name, value) for name, value in found.items())

    def _add_energy(self, gpu: Board, found: dict[str, float], now: float, *, own: bool) -> None:
        energy = gpu.energy_j()
        if energy is None:
            return
        begin = self._energy.setdefault(gpu.uuid, energy)
        if energy < begin:  # the driver was loaded anew
            begin = self._energy[gpu.uuid] = energy
            self._energy_mark = None
        found["energy_j"] = energy - begin
        if not own or not self._begun():  # what loading the data and compiling took is no step's
            return
        step = self._step()
        mark = self._energy_mark
        if mark is None:
            self._energy_mark = now, energy, step
        elif now - mark[0] >= ENERGY_OVER_S and step > mark[2]:
            found["energy_per_step_j"] = (energy - mark[1]) / (step - mark[2])
            self._energy_mark = now, energy, step
