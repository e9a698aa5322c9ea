"""The demo's text: the sources of Python's own standard library, real text that lies on every machine with Python.

The bytes are read once and kept in memory, so that a healthy demo waits for no disk.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from perfagent.errors import PerfagentError

__all__ = ["Windows", "loader", "read_sources"]

MAX_BYTES = 4_000_000  # enough for 60,000 windows of 64 bytes, and read in a fraction of a second


def read_sources(folder: Path | None = None, max_bytes: int = MAX_BYTES) -> bytes:
    """The standard library's modules in the order of their names, cut at max_bytes. Raises PerfagentError without
    sources."""
    folder = folder or Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")) + sorted(folder.glob("[a-z]*/*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    if len(text) < 100_000:
        raise PerfagentError(
            f"the demo trains on the sources of Python's standard library, and {folder} holds only {len(text)} bytes of them; "
            "use a Python that was installed with its sources"
        )
    return bytes(text[:max_bytes])


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of `context` bytes that do not overlap, each with the same window one byte later as its target."""

    def __init__(self, text: bytes, context: int) -> None:
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """-> tokens and targets, both int64 (context,)."""
        begin = index * self.context
        window = self.bytes[begin : begin + self.context + 1].long()
        return window[:-1], window[1:]


def loader(
    windows: Dataset[tuple[Tensor, Tensor]],
    batch_size: int,
    *,
    seed: int = 0,
    rank: int = 0,
    ranks: int = 1,
    shuffle: bool = True,
) -> DataLoader[tuple[Tensor, Tensor]]:
    """Batches, shuffled in the same order for the same seed; of several ranks, each sees its own share."""
    if ranks > 1:
        share: DistributedSampler[tuple[Tensor, Tensor]] = DistributedSampler(
            windows, ranks, rank, seed=seed, drop_last=True, shuffle=shuffle
        )
        return DataLoader(windows, batch_size=batch_size, sampler=share, drop_last=True)
    order = torch.Generator().manual_seed(seed)
    return DataLoader(windows, batch_size=batch_size, shuffle=shuffle, drop_last=True, generator=order)
