"""Exposed communication: the time for which nothing but a collective held up the training, `phase/comm_s`.

Three places where training can wait are watched, only in a process that is one of several ranks, from its first step on:

- a collective that the script or a framework calls and that returns when it is done, and `Work.wait()` of one begun before;
- FSDP2's wait for the parameters of a module;
- the end of a backward pass, where DDP and FSDP2 wait for the gradients still on their way. Those waits are in C++, in callbacks
  of the autograd engine. It runs its callbacks in the order in which they were queued: one of ours, queued by the first gradient
  of all, runs when the local work is done, and one queued by that one when the exchange is. In between is what was exposed.

On the CPU that is the host's time. On CUDA a wait puts the stream on hold, not the host: the time between two events on the
stream that computes is the time for which that stream had nothing else to do. Waits on another stream hold up no computation
and are left out. Work that overlaps with computation is not communication by this measure, which is the point of it.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from threading import get_ident
from types import FunctionType
from typing import Any

from perfagent.boundary.dynamo import keep_out_of_frames
from perfagent.boundary.guard import failed, failures
from perfagent.hooks.phases import device_mark
from perfagent.step.state import Progress, now, state
from perfagent.step.trace import PHASE

__all__ = ["COLLECTIVES", "install"]

COLLECTIVES = (
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single", "all_reduce",
    "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather",
    "gather_object", "monitored_barrier", "recv", "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor",
    "scatter", "scatter_object_list", "send", "_broadcast_coalesced",
)  # fmt: skip
"""Functions of torch.distributed; with async_op=True they keep nobody waiting and are not counted."""
_WARNS = "barrier"
"""It warns in its caller's name, so nothing of ours may call it from inside of torch; torch.compile cannot trace it."""
_FSDP2 = "torch.distributed.fsdp._fully_shard._fsdp_param_group"

Patch = Callable[..., None]
"""Takes an owner, the name of its attribute and what watches that; traced: where torch.compile traces it."""


def install(patch: Patch) -> None:
    """Watches the waits of a process that is one of several; does nothing in another."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        return
    functions = sys.modules["torch.distributed.distributed_c10d"]
    for name in COLLECTIVES:
        inside = None if name == _WARNS else _cell_of(getattr(functions, name, None))
        if inside is not None:
            patch(inside, "cell_contents", _watch_wait, traced=True)
            continue
        for module in (functions, dist):
            if hasattr(module, name):
                patch(module, name, _watch_wait)
    patch(functions.Work, "wait", _watch_wait)
    sharded = getattr(sys.modules.get(_FSDP2), "FSDPParamGroup", None)
    if hasattr(sharded, "wait_for_unshard"):
        patch(sharded, "wait_for_unshard", _watch_wait)
    patch(sys.modules["torch.autograd"], "backward", _watch_end_of_backward)
    keep_out_of_frames()


def _cell_of(collective: Any) -> Any:
    """Where torch's own wrappers of a collective keep the function that does the work; None if there are none.

    Patched there, the collective stays the object by which torch.compile knows what to put into a graph in its place, also under
    the names by which other modules have imported it. And the wrapper that warns of its use warns in its caller's name.
    """
    cell = None
    while isinstance(collective, FunctionType):
        inside = dict(zip(collective.__code__.co_freevars, collective.__closure__ or (), strict=True))
        found = inside.get("func") or inside.get("arg")
        if found is None:
            break
        cell, collective = found, found.cell_contents
    return cell


def _watch_wait(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wait(*args: Any, **kwargs: Any) -> Any:
        p = state.current
        if p is None or p.phase_depth or not _trains(p):
            return original(*args, **kwargs)
        event, began = device_mark(p), now()
        p.phase_depth += 1
        try:
            result = original(*args, **kwargs)
        finally:
            p.phase_depth -= 1
        if not hasattr(result, "wait"):  # else it was only begun
            _note(p, began, event)
        return result

    return wait


def _trains(p: Progress) -> bool:
    """Whether this thread is the training's: that of the loop, or one of the autograd engine's, which Python does not know."""
    me = get_ident()
    return p.thread == me or bool(p.clock is not None and p.backward_depth and me not in threading._active)  # type: ignore[attr-defined]


def _note(p: Progress, began: int, event: Any) -> None:
    if p.clock is None:
        p.trace.extend((began, now(), "comm", None, None, PHASE))
    elif event is not None:
        ended = device_mark(p)
        if ended is not None:
            p.trace.extend((began, now(), "comm", event, ended, PHASE))


def _watch_end_of_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch.autograd.backward, whose last part is the wait for the other ranks."""

    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        p = state.current
        if p is None or p.backward_depth or p.phase_depth or p.thread != get_ident() or _NAME in failures:
            return original(tensors, *args, **kwargs)
        handle, depth = None, p.phase_depth
        try:
            handle = _listen(p, tensors)
        except Exception as error:  # noqa: BLE001 - it must not reach the training loop
            failed(_NAME, error)
        try:
            return original(tensors, *args, **kwargs)
        finally:
            p.phase_depth = depth  # whatever was raised on the way
            if handle is not None:
                handle.remove()

    return backward


_NAME = f"{__name__}.backward"


def _listen(p: Progress, tensors: Any) -> Any:
    """Has the engine tell when the local part of this backward pass is over, and when all of it is; the answer ends it."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled is not None and compiled.compiled_autograd_enabled:
        return None  # there the hook would become part of the graph
    if hasattr(tensors, "requires_grad"):
        root = tensors if tensors.requires_grad else None
    else:
        root = next((tensor for tensor in tensors if tensor.requires_grad), None)
    return None if root is None else root.register_hook(_End(p).first_gradient)


class _End:
    """The end of one backward pass. What these three methods raise would end up in the autograd engine."""

    __slots__ = ("_began", "_event", "_progress", "_queue")

    def __init__(self, p: Progress) -> None:
        self._progress = p
        self._queue = sys.modules["torch.autograd"].Variable._execution_engine.queue_callback

    def first_gradient(self, gradient: Any) -> None:  # noqa: ARG002 - the signature torch calls
        try:
            self._queue(self.local_part_done)
        except Exception as error:  # noqa: BLE001
            failed(_NAME, error)

    def local_part_done(self) -> None:
        try:
            self._event, self._began = device_mark(self._progress), now()
            self._queue(self.all_is_done)
            self._progress.phase_depth += 1  # what is waited for in between counts once
        except Exception as error:  # noqa: BLE001
            failed(_NAME, error)

    def all_is_done(self) -> None:
        try:
            self._progress.phase_depth -= 1
            _note(self._progress, self._began, self._event)
        except Exception as error:  # noqa: BLE001
            failed(_NAME, error)
