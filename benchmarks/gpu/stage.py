"""Where the checks take place: the device, and the folder that their recordings go to."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Stage"]


@dataclass(frozen=True, slots=True)
class Stage:
    """dry: on a CPU, to see that the checks themselves work; nothing that they measure says anything about a GPU
    then."""

    out: Path
    dry: bool = False

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    def size(self, name: str) -> str:
        return "tiny" if self.dry else name

    def steps(self, number: int) -> int:
        return min(number, 12) if self.dry else number

    def seconds(self, number: float) -> float:
        """For what takes time on a device alone, such as coming to its clock rate."""
        return 0.0 if self.dry else number

    def recording(self, name: str) -> Path:
        """A folder for one process to record into, empty. It stays, for `perfagent sync`."""
        folder = self.out / "recorded" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder
