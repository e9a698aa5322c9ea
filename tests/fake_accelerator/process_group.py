"""The backend `fakeccl`: collectives of the fake devices, which gloo does on copies in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fake_accelerator.building import NAME

__all__ = ["BACKEND", "register"]

BACKEND = "fakeccl"


def register() -> None:
    dist.Backend.register_backend(BACKEND, FakeProcessGroup, devices=[NAME])


class FakeProcessGroup(dist.ProcessGroup):
    """Each collective has ended when its call returns. What torch does not call here is not there."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore(BACKEND, store), rank, size, timeout)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKEND

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        return self._on_copies(self._gloo.allreduce, tensors, opts or dist.AllreduceOptions())

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        for tensor in tensors:
            self.allreduce([tensor])
        return _done(tensors)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        return self._on_copies(self._gloo.broadcast, tensors, opts or dist.BroadcastOptions())

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> dist.Work:
        gathered = [[tensor.cpu() for tensor in output] for output in outputs]
        self._gloo.allgather(gathered, [tensor.cpu() for tensor in inputs]).wait()
        for output, host in zip(outputs, gathered, strict=True):
            _copy_back(output, host)
        return _done(outputs)

    def barrier(self, opts: Any = None) -> dist.Work:
        self._gloo.barrier().wait()
        return _done([])

    def _on_copies(self, collective: Callable[..., dist.Work], tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        copies = [tensor.cpu() for tensor in tensors]
        collective(copies, opts).wait()
        _copy_back(tensors, copies)
        return _done(tensors)


def _copy_back(tensors: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.copy_(copy)


def _done(result: Any) -> dist.Work:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)
