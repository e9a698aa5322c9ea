"""Times the forward pass, from the root model's first call to the start of backward.

Also reads batch shapes in loops without a DataLoader.

Only the root is watched, and only after the first step; for a compiled model, its wrapper (boundary/call_slot.py).

If the model returns the loss, the forward pass is over when it returns: a trainer that fetches its next batch between
the model's call and backward does not have that time in `forward`. A call counts only if a backward pass follows; calls
in evaluation mode of a model that is trained in training mode never do.
"""

from __future__ import annotations

import functools
import logging
import sys
from threading import get_ident
from typing import Any

from perfagent.boundary.call_slot import CALL, CallSlot, copy_that_calls
from perfagent.boundary.dynamo import Function, not_traced, untraced
from perfagent.boundary.gc_instances import instances_of
from perfagent.boundary.guard import failed, failures
from perfagent.device import accelerator
from perfagent.hooks.dataloader import contents_of, measure_of
from perfagent.hooks.evaluation import evaluated, interrupted
from perfagent.measure.batches.contents import NO_LOADER
from perfagent.measure.step_witness import inputs_of
from perfagent.step.state import StepState, now, state
from perfagent.step.trace import DATA, FIELDS, FORWARD, RETURNED

__all__ = ["WatchedModel", "size_of_call", "watch_forward"]

logger = logging.getLogger("perfagent")

_PARTS_FOR = 16
"""After a call without a fetch, the sizes of the model's inputs are read for so many calls more: an input may be a part
of the fetched batch."""
_SEARCHES = 3
"""Outputs are no longer searched after so many training calls whose output held no loss."""


def watch_forward(model: Any) -> WatchedModel | None:
    """Watches the calls of a root model until `take_off`. Returns None if this version of torch does not allow it."""
    root = _outermost(model)
    if not hasattr(root, CALL):
        logger.warning("perfagent: this torch has no Module.%s: the forward pass cannot be timed", CALL)
        return None
    watched = WatchedModel(root)
    watched.put_on()
    return watched


_DATA = FIELDS[DATA]


class WatchedModel(CallSlot):
    """Replaces the root's call. called_at: `completed` when it was last called with gradients."""

    __slots__ = ("_grad_enabled", "_is_compiled", "_searches_left", "_tracing", "called_at")

    def __init__(self, root: Any, replaced: Function | None = None) -> None:
        super().__init__(root, replaced)
        self._grad_enabled = sys.modules["torch"].is_grad_enabled
        self._tracing = sys.modules["torch"]._C._get_tracing_state
        self._is_compiled = "_orig_mod" in root.__dict__.get("_modules", ())
        self._searches_left = _SEARCHES
        self.called_at = -1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        root: Any = self._module()
        copy = copy_that_calls(sys._getframe(1), root)
        if copy is not None:
            return copy._call_impl(*args, **kwargs)
        call = self._replaced or root._call_impl  # the root is alive, since it is calling us
        p = state.current
        if p is None or p.backward_depth or p.phase_depth or _NAME in failures or p.thread != get_ident():
            return call(*args, **kwargs)
        if self._tracing() is not None:  # torch.jit.trace warns about each size that is read
            return call(*args, **kwargs)
        # In torch 2.4 `model.eval()` does not change the wrapper of a compiled model.
        training = (root._modules["_orig_mod"] if self._is_compiled else root).training
        if not self._grad_enabled():
            return evaluated(p, training, call, args, kwargs)
        try:
            began = now()
            p.opened = True
            self.called_at = p.completed
            if not training:
                interrupted(p)
            trace = p.trace
            size = None
            if len(trace) < _DATA or trace[_DATA - 1] != DATA:  # no fetch just before: the input is the batch
                size = size_of_call(p, args, kwargs)
                if training:
                    contents_of(p).inspect(NO_LOADER, kwargs or args)
                if p.losses.parts_for < _PARTS_FOR:
                    p.losses.parts_for = _PARTS_FOR  # ... or another part of the batch before
            elif p.losses.parts_for:
                p.losses.parts_for -= 1
                size = size_of_call(p, args, kwargs)
            if p.losses.is_late and training:
                p.losses.inputs = inputs_of(args, kwargs)
            trace.extend((began, None if p.clock is None else p.clock.mark(), training, size, FORWARD))
            probe = p.probe  # several threads of one training may be here at once
            if probe is not None and training:
                call, p.probe = functools.partial(_probed, probe, call), None
        except Exception as error:  # noqa: BLE001 - it must not reach the training loop
            failed(_NAME, error)
        try:
            output = call(*args, **kwargs)
        except (RuntimeError, MemoryError) as error:
            p.links.investigator.passing(error)
            raise
        if not self._searches_left:
            return output
        try:
            holds_loss = _holds_loss(output)
            p.trace.extend((now(), None if p.clock is None else p.clock.mark(), holds_loss, RETURNED))
            if holds_loss:
                self._searches_left = _SEARCHES
            elif training:
                self._searches_left -= 1
        except Exception as error:  # noqa: BLE001 - it must not reach the training loop
            failed(_NAME, error)
        return output


def size_of_call(p: StepState, args: Any, kwargs: Any) -> Any:
    """Returns the samples and tokens of a model's input batch. Besides tokens, the input may hold a state or a mask."""
    batch = args[0] if args and ((len(args) == 1 and not kwargs) or are_tokens(args[0])) else (args or kwargs)
    measure = p.readers.get(NO_LOADER)
    if measure is None:
        measure = measure_of(p, NO_LOADER, batch)
    return measure(batch)


def are_tokens(value: Any) -> bool:
    torch = sys.modules["torch"]
    return type(value) is torch.Tensor and value.dim() == 2 and value.dtype in (torch.int64, torch.int32)


def _probed(probe: Any, call: Function, *args: Any, **kwargs: Any) -> Any:
    return probe.call(call, args, kwargs)


_NAME = f"{__name__}.watch_forward"
not_traced(WatchedModel.__call__)
not_traced(_probed)


def _outermost(model: Any) -> Any:
    """Returns what the training loop calls: the model's torch.compile wrapper or DataParallel wrapper, or the model.

    DataParallel copies the `__dict__` of what it wraps to other devices, so that must hold nothing of ours. Searches
    only if this process compiled something, or if there are several devices.
    """
    torch = sys.modules["torch"]
    compiled = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    parallel = torch.nn.DataParallel if accelerator().in_use() and accelerator().count() > 1 else None
    wrappers = {kind: name for kind, name in ((compiled, "_orig_mod"), (parallel, "module")) if kind is not None}
    if not wrappers or type(model) in wrappers:
        return model
    for candidate in instances_of(*wrappers):
        name = wrappers.get(type(candidate))
        if name is not None and candidate.__dict__.get("_modules", {}).get(name) is model:
            return candidate
    return model


@untraced
def _holds_loss(output: object) -> bool:
    """True if the model's output holds the loss: a scalar from which gradients can start."""
    tensor = sys.modules["torch"].Tensor
    if isinstance(output, (tuple, list)):
        candidates = output[:4]
    elif isinstance(output, dict):
        candidates = (output.get("loss"),)
    else:
        candidates = (output if isinstance(output, tensor) else getattr(output, "loss", None),)
    return any(isinstance(item, tensor) and item.dim() == 0 and item.requires_grad for item in candidates)
