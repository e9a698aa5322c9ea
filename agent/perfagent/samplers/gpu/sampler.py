"""Samples the GPUs that this process answers for: its own as `gpu/*`, and on one rank of a node the rest as
`node_gpu<i>/*`.

NVML is asked twice a second. At 10 Hz and more its calls queue up in the driver, and were seen to block kernel
launches. Runs on the courier's thread, about twice a second: that thread may hang in the driver, and is replaced when
it does. What is read at every call is sent once a second as mean, minimum and maximum; counters every ten seconds.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from perfagent.samplers.gpu.claims import Claims
from perfagent.samplers.gpu.device import Gpu, slices, text_of
from perfagent.samplers.gpu.interval import Interval
from perfagent.samplers.gpu.nvml import DeviceLost, Door, Library, NotStarted, load
from perfagent.samplers.gpu.visible import visible, with_uuid
from perfagent.samplers.gpu.xid import MEANINGS, Xid, XidEvents

__all__ = ["GpuSampler"]

RARE_EVERY_S = 10.0
ENERGY_OVER_S = 5.0
"""The energy of a step is taken over at least this long: the counter moves in steps of 20 to 100 ms."""

Emit = Callable[[dict[str, float]], None]
Tell = Callable[[dict[str, Any]], None]


class GpuSampler:
    """`poll()`, about twice a second.

    emit: takes the values of one moment; tell: takes what happened (an event's data). ordinal: CUDA's number of this
    rank's device, or None while it has none. step: the step in progress. begun: whether one has ended. elected: whether
    this rank speaks for the node. period_s: how often values are sent. claims: which boards the other ranks report.
    library: starts NVML (a test passes its own).
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._emit, self._tell, self._clock = emit, tell, clock
        self._ordinal, self._step, self._begun, self._elected, self._period_s = ordinal, step, begun, elected, period_s
        self._environ, self._claims, self._start = environ, claims, library
        self._found: list[Gpu] | None = None
        self._slices: dict[int, list[Gpu]] = {}
        self._visible: list[Gpu] = []
        self._own: Gpu | None = None
        self._intervals: dict[str, Interval] = {}
        self._lost: set[str] = set()
        self._events: XidEvents | None = None
        self._energy: dict[str, float] = {}
        self._energy_mark: tuple[float, float, int] | None = None
        self._next = self._next_rare = self._not_before = 0.0
        self._described = False
        self.free_bytes: float | None = None
        """Memory of the own device that nobody uses, as of the last reading."""

    def poll(self) -> bool:
        """False where there is no GPU that could be asked: it need not be polled again."""
        now = self._clock()
        if self._found is None:
            if now < self._not_before:
                return True
            try:
                self._probe()
            except NotStarted:
                self._begin_again(now)
                return True
        if not self._found:
            return False
        if self._own is None:
            self._own = self._choose()
            if self._own is not None:
                self._claims.claim(self._own.board)
        report = now >= self._next
        rare = report and now >= self._next_rare
        if report:
            period = self._period_s()
            self._next = self._next + period if self._next + period > now else now + period
        if rare:
            self._next_rare = now + RARE_EVERY_S
        values: dict[str, float] = {}
        watched = self._watched(now)
        for gpu, prefix in watched:
            if gpu.board in self._lost:
                continue
            try:
                self._read(gpu, prefix, values, now, report=report, rare=rare)
            except NotStarted:  # whoever shut it down did so for all of this process
                self._begin_again(now)
                return True
            except DeviceLost as error:
                self._lost.add(gpu.board)
                if gpu is self._own:
                    self.free_bytes = None
                self._tell({"what": "lost", "index": gpu.index, "uuid": gpu.uuid, "reason": str(error)})
        if self._events is not None:
            self._events.watch([gpu for gpu, _ in watched])
            for xid in self._events.poll():
                self._tell_xid(xid, watched, values)
        if values:
            self._emit(values)
        return True

    def _probe(self) -> None:
        """Raises NotStarted where somebody shut NVML down in the midst of it."""
        self._found = []
        library, reason = self._start()
        if library is None:
            self._tell({"what": "unavailable", "reason": reason})
            return
        found: list[Gpu] = []
        door = Door(library)
        count = 0
        try:
            count = int(door.ask("nvmlDeviceGetCount") or 0)
        except NotStarted:
            raise
        except DeviceLost:
            pass
        for index in range(count):
            try:
                handle = door.ask("nvmlDeviceGetHandleByIndex", index, what=f"device {index}")
                if handle is not None:  # else a container that was not given this one, though it is counted
                    gpu = Gpu(library, index, handle)
                    self._slices[index] = slices(library, gpu)
                    found.append(gpu)
            except NotStarted:
                raise
            except DeviceLost as error:  # one device that is gone must not hide the others
                self._tell({"what": "lost", "index": index, "reason": str(error)})
        self._visible = visible(found, self._environ, self._slices_of)
        self._events = XidEvents(library)
        self._found = found
        if self._described:
            return
        shown = [part for gpu in found for part in (self._slices_of(gpu) or [gpu])]
        if not shown:
            self._tell({"what": "unavailable", "reason": "the NVIDIA driver shows no device"})
            return
        described = []
        for gpu in shown:
            with contextlib.suppress(DeviceLost):  # it is reported when it is read
                described.append(gpu.describe())
        driver = None
        # a driver that goes at this moment is reported when a device is read, too
        with contextlib.suppress(DeviceLost):
            driver = door.ask("nvmlSystemGetDriverVersion")
        self._tell({"what": "found", "driver": text_of(driver), "gpus": described})
        self._described = True

    def _begin_again(self, now: float) -> None:
        """NVML counts who started it: a script that shuts it down more often than it started it takes ours along.
        Handles and the set of events are of no use then."""
        self._found, self._own, self._events, self.free_bytes = None, None, None, None
        self._slices.clear()
        self._intervals.clear()
        self._not_before = now + RARE_EVERY_S

    def _slices_of(self, gpu: Gpu) -> list[Gpu]:
        return self._slices.get(gpu.index, [])

    def _choose(self) -> Gpu | None:
        """This rank's device: by the UUID that torch gives, else by the order that CUDA counts in."""
        ordinal = self._ordinal()
        if ordinal is None:
            return None
        uuid = _uuid_from_torch(ordinal)
        found = with_uuid(uuid, self._found or [], self._slices_of) if uuid else None
        if found is not None:
            return found
        return self._visible[ordinal] if 0 <= ordinal < len(self._visible) else None

    def _watched(self, now: float) -> list[tuple[Gpu, str]]:
        """Devices and the prefix of their names; those that were lost too, of which the reason may be heard later."""
        watched = [(self._own, "gpu/")] if self._own is not None else []
        if self._elected():
            taken = {gpu.board for gpu in self._of_ranks()} | self._claims.taken(now)
            if self._own is not None:
                taken.add(self._own.board)
            watched += [(gpu, f"node_gpu{gpu.index}/") for gpu in self._found or [] if gpu.board not in taken]
        return watched

    def _of_ranks(self) -> list[Gpu]:
        """Devices that other ranks of this node will report, before they say so: rank by rank, as launchers place
        them."""
        words = (self._environ.get("LOCAL_WORLD_SIZE") or "1").strip()
        local = int(words) if words.isdigit() else 1
        return self._visible[:local] if local > 1 else []

    def _read(self, gpu: Gpu, prefix: str, values: dict[str, float], now: float, *, report: bool, rare: bool) -> None:
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
        told = interval.take() | gpu.second(now)
        self._add_energy(gpu, told, now, own=own)
        if own:
            told.update(gpu.processes.read(now))
        if rare:
            told.update(gpu.rare())
        values.update((prefix + name, value) for name, value in told.items())

    def _add_energy(self, gpu: Gpu, told: dict[str, float], now: float, *, own: bool) -> None:
        energy = gpu.energy_j()
        if energy is None:
            return
        begin = self._energy.setdefault(gpu.uuid, energy)
        if energy < begin:  # the driver was loaded anew
            begin = self._energy[gpu.uuid] = energy
            self._energy_mark = None
        told["energy_j"] = energy - begin
        if not own or not self._begun():  # what loading the data and compiling took is no step's
            return
        step = self._step()
        mark = self._energy_mark
        if mark is None:
            self._energy_mark = now, energy, step
        elif now - mark[0] >= ENERGY_OVER_S and step > mark[2]:
            told["energy_per_step_j"] = (energy - mark[1]) / (step - mark[2])
            self._energy_mark = now, energy, step

    def _tell_xid(self, xid: Xid, watched: list[tuple[Gpu, str]], values: dict[str, float]) -> None:
        told: dict[str, Any] = {"what": "xid", "code": xid.code, "meaning": MEANINGS.get(xid.code, "")}
        if xid.gpu is not None:
            told |= {"index": xid.gpu.index, "uuid": xid.gpu.uuid}
        values.update((prefix + "xid", float(xid.code)) for gpu, prefix in watched if gpu is xid.gpu)
        self._tell(told)


def _uuid_from_torch(ordinal: int) -> str:
    """What CUDA itself says which device that is. Properties are cached by torch: nothing is started or waited for."""
    torch: Any = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not hasattr(cuda, "is_initialized") or not cuda.is_initialized():
        return ""
    try:
        return str(getattr(cuda.get_device_properties(ordinal), "uuid", ""))
    except (RuntimeError, AssertionError):
        return ""
