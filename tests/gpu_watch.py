"""The sampler of a rank's GPUs with a clock of our own, and what it emitted and told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fake_nvml import FakeGpu, FakeNvml

from perfagent.samplers.gpu.kernel_gpu import KernelGpu
from perfagent.samplers.gpu.nvml import NO_DRIVER
from perfagent.samplers.gpu.own import Claims
from perfagent.samplers.gpu.sampler import GpuSampler

__all__ = ["Watch", "prefixes"]


class Watch:
    """library: None on a machine without NVIDIA's driver. job: of a job of several ranks, the folder that they share."""

    def __init__(
        self,
        library: FakeNvml | None,
        *,
        kernel_gpus: Callable[[], Sequence[KernelGpu]] = list,
        ordinal: int | None = 0,
        elected: bool = True,
        environ: Mapping[str, str] | None = None,
        job: Path | None = None,
    ) -> None:
        self.now, self.step, self.ordinal, self.begun = 100.0, 1, ordinal, True
        self.rows: list[dict[str, float]] = []
        self.told: list[dict[str, Any]] = []
        self.sampler = GpuSampler(
            self.rows.append,
            self.told.append,
            ordinal=lambda: self.ordinal,
            step=lambda: self.step,
            begun=lambda: self.begun,
            elected=lambda: elected,
            period_s=lambda: 1.0,
            environ=environ or {},
            claims=Claims(job or Path(), "job" if job else None),
            library=library.load if library else lambda: (None, NO_DRIVER),
            kernel_gpus=kernel_gpus,
            clock=lambda: self.now,
        )

    def poll(self, times: int = 1, every_s: float = 0.5) -> dict[str, float]:
        """The last row after so many calls."""
        for _ in range(times):
            self.sampler.poll()
            self.now += every_s
        return self.rows[-1] if self.rows else {}

    def values(self, name: str) -> list[float]:
        return [row[name] for row in self.rows if name in row]

    def train(self, gpu: FakeGpu, seconds: int, joules: float, steps: int = 0) -> None:
        """joules, steps: in each of these seconds."""
        for _ in range(seconds):
            gpu.energy_mj += int(1000 * joules)
            self.step += steps
            self.poll(2)

    def kinds(self) -> list[tuple[str, str | None]]:
        return [(told["what"], told.get("uuid")) for told in self.told]


def prefixes(row: dict[str, float]) -> set[str]:
    return {name.partition("/")[0] for name in row}
