"""Which board is this rank's, by what torch and the driver say of it; and which the other ranks report.

Where torch has neither UUID nor PCI address (older builds for XPU), only a machine of one board leaves no doubt. Numbers in
CUDA_VISIBLE_DEVICES and the like are not followed: they count in orders that only the vendors' runtimes know.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path

from perfagent.device import accelerator
from perfagent.samplers.gpu.board import place
from perfagent.samplers.gpu.device import Gpu
from perfagent.samplers.gpu.kernel_gpu import KernelGpu

__all__ = ["Board", "Claims", "own_board"]

_READ_EVERY_S = 10.0

Board = Gpu | KernelGpu


def own_board(
    boards: Sequence[Board], slices_of: Callable[[Board], Sequence[Board]], ordinal: int, environ: Mapping[str, str]
) -> Board | None:
    """None where it is not known. ordinal: torch's number of its device.

    A board of one MIG slice stands for that slice. Which of several it is shows in CUDA_VISIBLE_DEVICES, too.
    """
    named, pci = _of_torch(ordinal)
    word = "".join(environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[ordinal : ordinal + 1]).strip()
    uuids = [_tail(name) for name in (word if word.startswith(("MIG-", "GPU-")) else "", named) if name]
    devices = [[*slices_of(board)] or [board] for board in boards if not board.is_divided]
    for uuid in uuids:
        for device in chain.from_iterable(devices):
            if _tail(device.uuid).startswith(uuid):
                return device
    whole = [parts[0] for parts in devices if len(parts) == 1]
    for device in whole:
        if _tail(device.board) in uuids or (pci and place(device.pci) == pci):
            return device
    return whole[0] if len(whole) == len(boards) == 1 and not uuids and not pci else None


def _of_torch(ordinal: int) -> tuple[str, str]:
    """UUID (of AMD the unique_id) without its "GPU-", and PCI address as `place` writes it; "" for what the runtime does
    not have. Properties are cached by torch: nothing is started or waited for."""
    backend = accelerator()
    properties = backend.ask("get_device_properties", ordinal) if backend.in_use() else None
    uuid, pci, raw = _tail(str(getattr(properties, "uuid", ""))), "", b""
    numbers = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None not in numbers:
        pci = place(":".join(f"{number:02x}" for number in numbers))
    with contextlib.suppress(ValueError):
        raw = bytes.fromhex(uuid.replace("-", ""))
    if raw.isalnum():  # ROCm: the 16 digits of the unique_id, as text
        return raw.decode("ascii").lower(), pci
    if raw.startswith(b"\x86\x80") and len(raw) == 16:
        # Level Zero (compute-runtime: Device::generateUuidFromPciBusInfo); the last byte numbers a tile, which shares
        # its board with others
        pci = place(f"{raw[7]:02x}{raw[6]:02x}:{raw[8]:02x}:{raw[9]:02x}") if not raw[15] else "of several tiles"
    return uuid, pci


def _tail(uuid: str) -> str:
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


class Claims:
    """The boards that the ranks of a job report: a file a board in the job's folder. key: None for a job of one process."""

    def __init__(self, folder: Path, key: str | None) -> None:
        self._folder, self._prefix = folder, f"{key}.gpu-" if key else ""
        self._taken: frozenset[str] = frozenset()
        self._read_at = 0.0

    def claim(self, board: str) -> None:
        """This rank reports that board."""
        if self._prefix:
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                (self._folder / f"{self._prefix}{board}").touch(mode=0o600)
            except OSError:
                return  # then it may be reported twice

    def taken(self, now: float) -> frozenset[str]:
        """Boards that some rank reports, as of at most ten seconds ago. now: monotonic seconds."""
        if self._prefix and now >= self._read_at:
            self._read_at = now + _READ_EVERY_S
            try:
                names = [path.name for path in self._folder.iterdir()]
            except OSError:
                names = []
            self._taken = frozenset(name.removeprefix(self._prefix) for name in names if name.startswith(self._prefix))
        return self._taken
