"""Times exposed communication, `phase/comm_s`: the time for which training waited only for a collective.

Watched, in a job of several ranks and from the first step on:

- a collective that returns when done, and `Work.wait()` of an earlier one;
- FSDP2's wait for the parameters of a module;
- the end of a backward pass, where DDP and FSDP2 wait for gradients in callbacks of the autograd engine, which runs them
  in the order in which they were queued. Our first one, queued by the very first gradient, runs when the local work is
  done. It queues a second, which runs when the exchange is done.

On a device the time is that between two events on the computing stream; waits on another stream hold up no computation.
Communication that overlaps with computation is left out on purpose.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from threading import get_ident
from types import FunctionType
from typing import Any

from perfagent.boundary.dynamo import Function, keep_out_of_frames
from perfagent.boundary.guard import guarded
from perfagent.hooks.phases import device_mark, note_phase
from perfagent.step.state import StepState, now, state

__all__ = ["COLLECTIVES", "install"]

COLLECTIVES = (
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single", "all_reduce",
    "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather",
    "gather_object", "monitored_barrier", "recv", "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor",
    "scatter", "scatter_object_list", "send", "_broadcast_coalesced",
)  # fmt: skip
"""Functions of torch.distributed. With async_op=True they do not wait and are not counted."""
_WARNS = "barrier"
"""Its warning names its caller, so no frame of ours may call it within torch; torch.compile cannot trace it."""
_FSDP2 = "torch.distributed.fsdp._fully_shard._fsdp_param_group"

Patch = Callable[..., None]
"""Takes an owner, the name of its attribute and the watching function. traced: torch.compile traces the original."""


def install(patch: Patch) -> None:
    """Watches the waits of a process that is one of several ranks; does nothing in any other."""
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
    """Returns the cell in which torch's wrappers of a collective keep the function that does the work, or None.

    With the patch in the cell, the collective stays the object by which torch.compile knows its replacement in a graph and
    by which other modules have imported it, and the wrapper that warns about its use still names its caller.
    """
    cell = None
    while isinstance(collective, FunctionType):
        inside = dict(zip(collective.__code__.co_freevars, collective.__closure__ or (), strict=True))
        found = inside.get("func") or inside.get("arg")
        if found is None:
            break
        cell, collective = found, found.cell_contents
    return cell


def _watch_wait(original: Function) -> Function:
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
        if not hasattr(result, "wait"):  # otherwise the collective has only begun
            note_phase(p, "comm", began, event)
        return result

    return wait


def _trains(p: StepState) -> bool:
    """True on the training's threads: the loop's, and the autograd engine's, which Python did not start."""
    me = get_ident()
    return p.thread == me or bool(p.clock is not None and p.backward_depth and _is_foreign(me))


def _is_foreign(thread: int) -> bool:
    """True of a thread that was not started by Python, also where a log record or `threading.current_thread` has made
    Python note it."""
    known = threading._active.get(thread)  # type: ignore[attr-defined]
    return known is None or type(known) is threading._DummyThread


def _watch_end_of_backward(original: Function) -> Function:
    """Wraps torch.autograd.backward, whose last part is the wait for the other ranks."""

    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        p = state.current
        if p is None or p.backward_depth or p.phase_depth or p.thread != get_ident():
            return original(tensors, *args, **kwargs)
        handle, depth = _listen(p, tensors), p.phase_depth
        try:
            return original(tensors, *args, **kwargs)
        finally:
            p.phase_depth = depth  # whatever was raised meanwhile
            if handle is not None:
                handle.remove()

    return backward


@guarded
def _listen(p: StepState, tensors: Any) -> Any:
    """Has the engine report the end of this backward pass and of its local part. Returns a handle to
    remove the hook."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled is not None and compiled.compiled_autograd_enabled:
        return None  # the hook would become part of the compiled graph
    if hasattr(tensors, "requires_grad"):
        root = tensors if tensors.requires_grad else None
    else:
        root = next((tensor for tensor in tensors if tensor.requires_grad), None)
    return None if root is None else root.register_hook(_End(p).first_gradient)


class _End:
    """Times the end of one backward pass. The autograd engine calls the methods."""

    __slots__ = ("_began", "_event", "_progress", "_queue")

    def __init__(self, p: StepState) -> None:
        self._progress = p
        self._queue = sys.modules["torch.autograd"].Variable._execution_engine.queue_callback

    @guarded
    def first_gradient(self, gradient: object) -> None:  # noqa: ARG002 - the signature torch calls
        self._queue(self.local_part_done)

    @guarded
    def local_part_done(self) -> None:
        self._event, self._began = device_mark(self._progress), now()
        self._queue(self.all_is_done)
        self._progress.phase_depth += 1  # waits within this time count only once

    @guarded
    def all_is_done(self) -> None:
        self._progress.phase_depth -= 1
        note_phase(self._progress, "comm", self._began, self._event)
