"""Splits a batch that does not fit into the device's memory into halves, until it does.

Forward and backward pass run without any communication; then the ranks exchange whether one of them ran out of memory,
and only when none did are the gradients averaged. A rank that retried alone would leave the others waiting for ever
(mosaicml/composer issues 1319 and 3510). So the window is tried again on all ranks, in twice as many pieces."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from perfagent.errors import ConfigError
from perfagent_loop.checks import check_count
from perfagent_loop.collectives import all_reduce
from perfagent_loop.data.transfer import rebuilt, tensors_in
from perfagent_loop.events import count, tell
from perfagent_loop.kinds import Batch
from perfagent_loop.strategies import Data

if TYPE_CHECKING:
    from perfagent_loop.loop import Loop

__all__ = ["SplitOnOom", "cut", "is_out_of_memory"]

_AT_ONCE_BYTES = 32 * 2**20


class SplitOnOom:
    """Splits a batch into halves when it does not fit into the memory of the GPU, until it does. For `perfagent.loop`.

        split = perfagent.SplitOnOom(loop)
        for batch in loop.batches(loader):
            split.backward(batch, lambda piece: model(**piece).loss)
            loop.step()

    All ranks split together.

    Args:
        loop: A loop with `grad_accum=1`, over a plain or DistributedDataParallel model.
        most: The most pieces of a batch.
        items: Returns how many items the loss of a piece is the mean of. The gradient is then that of the mean over the
            items of all ranks. By default the first dimension is counted, and all ranks count alike.

    Attributes:
        pieces: How many pieces the next batch is split into. It stays where it was found.

    Raises:
        ConfigError: The model uses FSDP2 or DeepSpeed, which communicate in the forward pass. Use `find_batch_size`
            before the training.
    """

    def __init__(self, loop: Loop, *, most: int = 64, items: Callable[[Any], float] | None = None) -> None:
        if loop.strategy.kind not in ("plain", "ddp"):
            raise ConfigError(f"{loop.strategy.kind} communicates in its forward pass: use perfagent.find_batch_size()")
        if loop._window.size != 1:
            raise ConfigError("splitting replaces accumulation: use grad_accum=1, and whole windows as batches")
        check_count("most", most, "a number of pieces", least=2)
        self._loop, self._most, self._items = loop, most, items or _rows
        self._by_items = items is not None
        self.pieces = 1

    def backward(self, batch: Batch, compute: Callable[[Any], Tensor]) -> Tensor:
        """Computes the gradients of one batch.

        Args:
            batch: The batch.
            compute: Returns the mean loss of a piece of it.

        Returns:
            The mean loss of the batch on this rank.

        Raises:
            OutOfMemoryError: `most` pieces do not fit on this rank. RuntimeError if they do not fit on another rank.
        """
        share = self._share(batch)
        while True:
            error: BaseException | None = None
            loss: Tensor | None = None
            try:
                loss = self._try(batch, compute, share)
            except (RuntimeError, MemoryError) as problem:
                if not is_out_of_memory(problem):
                    raise
                error = problem.with_traceback(None)  # its frames hold the tensors that filled the memory
            # a collective, which every rank reaches, whatever became of its batch
            if self._loop.strategy.least(float(error is None)):
                break
            self._loop.discard_window()
            self._halve(batch, error)
        assert loss is not None
        self._average()
        self._loop._window.is_whole()
        return loss

    def _share(self, batch: Batch) -> float:
        """What this rank's mean weighs before the mean over ranks is taken; a collective where items are counted."""
        strategy = self._loop.strategy
        if strategy.world == 1 or not self._by_items:
            return 1.0
        mine = float(self._items(batch))
        total = strategy.total(torch.full((), mine, dtype=torch.float64, device=strategy.device))
        return mine * float(strategy.world) / max(float(total), 1.0)  # sync

    def _try(self, batch: Batch, compute: Callable[[Any], Tensor], share: float) -> Tensor:
        pieces = cut(batch, self.pieces)
        counts = [float(self._items(piece)) for piece in pieces]
        whole = sum(counts) or 1.0  # a batch without any item has no mean: its gradients are 0, not NaN
        scale = self._loop._scale
        total: Tensor | None = None
        strategy = self._loop.strategy
        with strategy._wrapper.no_sync() if isinstance(strategy, Data) else nullcontext():  # nothing is communicated
            for piece, items in zip(pieces, counts, strict=True):
                with self._loop._forward._autocast or nullcontext():
                    loss = compute(piece)
                part = loss * (items / whole)
                weighed = part * share
                (weighed if scale is None else scale(weighed)).backward()  # type: ignore[no-untyped-call]
                total = part.detach() if total is None else total + part.detach()
        assert total is not None
        return total

    def _halve(self, batch: Batch, error: BaseException | None) -> None:
        most = min(self._most, int(self._loop.strategy.least(_rows(batch))))
        if self.pieces >= most:
            raise error or RuntimeError(f"another rank ran out of memory with its batch in {self.pieces} pieces")
        self.pieces = min(2 * self.pieces, most)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        tell("out of memory", f"{error or 'on another rank'}; from here on each batch is cut into {self.pieces} pieces")
        count("recovery/pieces", float(self.pieces))

    def _average(self) -> None:
        """The mean of the gradients over ranks, some megabytes at a time, which DDP takes in the backward pass."""
        strategy = self._loop.strategy
        if strategy.world == 1:
            return
        held: list[Tensor] = []
        for parameter in strategy.module.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:  # unused here, perhaps not on another rank
                    parameter.grad = torch.zeros_like(parameter)
                held.append(parameter.grad)
        utils: Any = torch._utils
        for bucket in utils._take_tensors(held, _AT_ONCE_BYTES):
            flat = utils._flatten_dense_tensors(bucket)
            all_reduce(flat, group=strategy.group)
            flat /= strategy.world
            for gradient, mean in zip(bucket, utils._unflatten_dense_tensors(flat, bucket), strict=True):
                gradient.copy_(mean)


def cut(batch: Batch, pieces: int) -> list[Any]:
    """The batch in so many pieces along the first dimension of its tensors; dicts, lists and tuples keep their form."""
    rows = _rows(batch)
    pieces = max(1, min(pieces, rows))
    edges = [rows * number // pieces for number in range(pieces + 1)]
    return [_slice(batch, low, high, rows) for low, high in itertools.pairwise(edges)]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device or the host had no memory left."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)


def _rows(batch: Batch) -> int:
    found = {one.shape[0] for one in tensors_in(batch) if one.ndim}
    if len(found) != 1:
        raise ConfigError(
            f"a batch is split along the first dimension of its tensors, which must be the same in all; it is {sorted(found)}"
        )
    return int(found.pop())


def _slice(batch: Batch, low: int, high: int, rows: int) -> Any:
    if isinstance(batch, Tensor):
        return batch[low:high] if batch.ndim else batch
    listed = isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields") and len(batch) == rows
    if listed and not any(isinstance(one, (Tensor, Mapping, list, tuple)) for one in batch):
        return batch[low:high]  # texts, say: one for each row
    return rebuilt(batch, lambda one: _slice(one, low, high, rows))
