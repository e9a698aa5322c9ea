"""The next batches on their way to the GPU while it computes.

    for batch in Prefetcher(loader, "cuda"):     # tensors are on the device
        ...

The thread that asks for a batch also reads it. So a dataset draws the same random numbers as before, and the monitor
shows the same wait for data. Only the copy to the device overlaps with computation. `perfagent.loop` needs none."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader, get_worker_info

from perfagent.errors import ConfigError
from perfagent.session import current
from perfagent_loop.checks import check_count, device_named
from perfagent_loop.data.transfer import CopyStream, moved
from perfagent_loop.kinds import Batch, Loader

__all__ = ["Prefetcher", "read_ahead", "timed", "unwrapped"]


Device: TypeAlias = torch.device | str | int | None


class Prefetcher:
    """Copies the next batches of a loader to the GPU while the current step computes.

        for batch in Prefetcher(loader, "cuda"):  # tensors are on the device
            ...

    `len()`, `set_epoch`, `dataset`, `sampler` and other attributes are the loader's. `state_dict()` is the state after
    the last batch that was handed out. An error of the loader is raised where its batch would have come. On the CPU the
    loader's own batches are handed out.

    Args:
        loader: A DataLoader, or any iterable of batches.
        device: The device; the current CUDA device by default, else the CPU.
        ahead: How many batches are copied in advance. Each needs its memory on the device.

    Raises:
        ConfigError: There is no such device, or it runs in a DataLoader worker, where a GPU cannot be used.
    """

    def __init__(self, loader: Iterable[Batch], device: Device = None, *, ahead: int = 1) -> None:
        if not isinstance(loader, Iterable):
            raise ConfigError(f"it takes a DataLoader or another iterable of batches, not {type(loader).__name__}")
        check_count("ahead", ahead, "a number of batches on their way")
        self.loader, self.device, self.ahead = loader, _device(device), ahead
        self._state: Any = None  # of a loader that has one, at the batch that was handed out last

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        self._state = None
        if self.device.type == "cpu":
            return timed(self.loader)
        if self.device.type != "cuda":
            return (moved(batch, self.device) for batch in timed(self.loader))
        if get_worker_info() is not None:
            raise ConfigError(
                "a Prefetcher to a GPU cannot be read in a DataLoader worker: give the worker the loader, and wrap the DataLoader"
            )
        stream = CopyStream(self.device)
        return timed(self._through(stream.send, stream.receive))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":  # while being copied or unpickled
            raise AttributeError(name)
        if name == "state_dict":
            own = self.loader.state_dict  # type: ignore[attr-defined]
            return lambda: own() if self._state is None else self._state
        if name == "load_state_dict":
            self._state = None
        return getattr(self.loader, name)

    def _through(self, send: Callable[[Batch], Batch], receive: Callable[[Batch], Batch]) -> Iterator[Batch]:
        """Every batch sent ahead and received in its turn, with the loader's state as of that one."""
        keeps_state = hasattr(self.loader, "state_dict")

        def send_with_state(batch: Batch) -> tuple[Any, Any]:
            state = self.loader.state_dict() if keeps_state else None  # type: ignore[attr-defined]
            return send(batch), state

        for sent, state in read_ahead(iter(self.loader), send_with_state, self.ahead):
            self._state = state
            batch = receive(sent)
            del sent  # or it would live as long as the next one
            yield batch
            del batch
        self._state = None


def timed(loader: Loader) -> Iterator[Batch]:
    """Waits for batches are seen in a DataLoader's iterator; of any other iterable the run is asked to time them."""
    run = None if isinstance(loader, DataLoader) else current()
    return iter(loader if run is None else run.batches(loader))


def unwrapped(loader: Loader) -> Any:
    """The loader inside any Prefetchers, which hide what it is."""
    while isinstance(loader, Prefetcher):
        loader = loader.loader
    return loader


def read_ahead(source: Iterator[Batch], send: Callable[[Batch], Batch], ahead: int) -> Iterator[Batch]:
    """send(batch) of each batch, handed out when `ahead` more have been sent or the source is at its end.

    An error of the source is raised after the batches before it."""
    waiting: deque[Any] = deque()
    error: BaseException | None = None
    while True:
        while error is None and len(waiting) <= ahead:
            try:
                waiting.append(send(next(source)))
            except StopIteration as ended:
                error = ended
            except Exception as failed:  # noqa: BLE001 - raised below, when it is its turn
                error = failed
        if not waiting:
            if error is None or isinstance(error, StopIteration):
                return
            raise error
        yield waiting.popleft()


def _device(wanted: Device) -> torch.device:
    if wanted is None:
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    device = device_named(wanted)
    if device.type != "cuda":
        return device
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = (torch.cuda.current_device() if there else 0) if device.index is None else device.index
    if index >= there:
        raise ConfigError(f"device {wanted} is not there: torch sees {there} CUDA devices; leave device out")
    return torch.device("cuda", index)
