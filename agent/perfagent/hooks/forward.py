"""Forward time: from the root model's first call to the start of backward, and batch shapes for loops without a DataLoader.

Only the root is watched, and only after the first step; the wrapper when the model is compiled. Not by forward hooks: they cost
the module its fast path (2 µs a call), would be copied and pickled along with it (a closure cannot be), and become part of the
graph where torch.compile traces them.

Where the model returns the loss, the forward pass is over when it returns: a trainer that fetches its next batch between
the model's call and backward does not have that time in `forward`; not so where backward passes start from something else than
that loss (preference optimization), which is looked at a few times. (What was returned before is let go of later: outputs.py.)
A call counts only when a backward pass follows; calls in evaluation mode of a model that is trained in training mode never do.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any

from perfagent.boundary.call_slot import CALL, Standing, copy_that_calls
from perfagent.boundary.dynamo import not_traced, untraced
from perfagent.boundary.gc_instances import living
from perfagent.boundary.guard import failed, failures, guarded
from perfagent.hooks.dataloader import measure_of
from perfagent.hooks.evaluation import evaluated, interrupted
from perfagent.hooks.output_lifetime import Outputs
from perfagent.step.state import Progress, now, state
from perfagent.step.trace import DATA, FIELDS, FORWARD, RETURNED

__all__ = ["Watched", "size_of_call", "watch_forward"]

logger = logging.getLogger("perfagent")

_PARTS_FOR = 16
"""Calls after one without a fetch in which the size of what the model is called with is looked at, too: it may be a part of the
batch that was fetched."""
_ENOUGH = 3
"""So many training calls whose output held no loss, and outputs are no longer looked at."""


def watch_forward(model: Any) -> Watched | None:
    """Watches the calls of a root model until `take_off`; None where this torch does not let us."""
    root = _outermost(model)
    if not hasattr(root, CALL):
        logger.warning("perfagent: this torch has no Module.%s: the forward pass cannot be timed", CALL)
        return None
    watched = Watched(root)
    watched.put_on()
    return watched


_PROOFS, _UNUSED = 3, -1
"""So many backward passes from something else than the loss that the model had returned, and it is not the one trained on."""
_MOST_NODES = 4096
"""Of a graph that are looked at, nearest first: a loss is scaled, and others are added, one for each layer in some loops. 1 µs
each, and only in so many passes."""
_MOST_RETURNED = 256
_DATA = FIELDS[DATA]


class Watched(Standing):
    """Stands in a root's call. called: in the course of a training step."""

    __slots__ = ("_grad_enabled", "_looks", "_returned", "_tracing", "_unproven", "called")

    def __init__(self, root: Any, replaced: Callable[..., Any] | None = None) -> None:
        super().__init__(root, replaced)
        self._grad_enabled = sys.modules["torch"].is_grad_enabled
        self._tracing = sys.modules["torch"]._C._get_tracing_state
        self._looks = _ENOUGH
        self._unproven = _PROOFS  # 0: the loss that it returns is the one trained on
        self._returned: set[int] = set()  # the numbers of the nodes that made the losses since the last backward pass
        self.called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        root: Any = self._module()
        copy = copy_that_calls(sys._getframe(1), root)
        if copy is not None:
            return copy._call_impl(*args, **kwargs)
        call = self._replaced or root._call_impl  # it lives: it is calling us
        p = state.current
        if p is None or p.backward_depth or p.phase_depth or _NAME in failures or p.thread != get_ident():
            return call(*args, **kwargs)
        if self._tracing() is not None:  # torch.jit.trace warns of each size that is looked at
            return call(*args, **kwargs)
        if not self._grad_enabled():
            return evaluated(p, root.training, call, args, kwargs)
        outputs = p.outputs  # another thread may end the run meanwhile
        try:
            began = now()
            p.opened = True
            training = root.training
            if not training:
                interrupted(p)
            if outputs is not None:
                if outputs.rest:
                    outputs.rest -= 1
                else:
                    outputs.called()
            trace = p.trace
            size = None
            if len(trace) < _DATA or trace[_DATA - 1] != DATA:  # no loader: the model is called with the batch
                size = size_of_call(p, args, kwargs)
                if p.parts_for < _PARTS_FOR:
                    p.parts_for = _PARTS_FOR  # ... or with another part of the one before
            elif p.parts_for:
                p.parts_for -= 1
                size = size_of_call(p, args, kwargs)
            trace.extend((began, None if p.clock is None else p.clock.mark(), training, size, FORWARD))
            probe = p.probe  # threads that take turns in a training may be here at once
            if probe is not None and training:
                call, p.probe = functools.partial(_probed, probe, call), None
        except Exception as error:  # noqa: BLE001 - it must not reach the training loop
            failed(_NAME, error)
        try:
            output = call(*args, **kwargs)
        except BaseException as error:
            if outputs is not None:
                outputs.held = None  # who has run out of memory drops all that there is
            if p.investigator is not None and isinstance(error, (RuntimeError, MemoryError)):
                p.investigator.passing(error)
            raise
        if not self._looks:
            return output
        try:
            self.called = True
            holds_loss = self._unproven != _UNUSED and _holds_loss(output)
            if holds_loss and self._unproven:
                if len(self._returned) > _MOST_RETURNED:
                    self._returned.clear()  # no backward pass ever follows
                self._returned.update(loss.grad_fn._sequence_nr() for loss in _losses(output) if loss.grad_fn is not None)
                p.proof = self._prove
                p.plain = False  # the backward pass is to ask for it
            p.trace.extend((now(), None if p.clock is None else p.clock.mark(), holds_loss, RETURNED))
            if holds_loss:
                self._looks = _ENOUGH
                if outputs is None and p.clock is None:
                    p.outputs = outputs = Outputs()
                if outputs is not None and not outputs.rest:
                    outputs.returned(output)
            elif root.training:
                self._looks -= 1
        except Exception as error:  # noqa: BLE001 - it must not reach the training loop
            failed(_NAME, error)
        return output

    @guarded
    def _prove(self, roots: Any) -> None:
        """A backward pass starts, from these."""
        returned, self._returned = self._returned, set()
        if not returned:
            return
        several = roots if isinstance(roots, (list, tuple)) else [roots]
        made = [getattr(root, "grad_fn", None) for root in several]  # torch also takes edges of a graph
        if _leads_to(returned, [node for node in made if node is not None]):
            self._unproven = 0
        else:
            self._unproven = self._unproven - 1 or _UNUSED


def _leads_to(numbers: set[int], nodes: list[Any]) -> bool:
    """Whether one of the nodes with these numbers is among the nearest to these."""
    seen = set(nodes)
    for node in nodes:
        if node._sequence_nr() in numbers:
            return True
        following = {each for each, _ in node.next_functions if each is not None and each not in seen}
        if len(seen) < _MOST_NODES:
            seen |= following
            nodes.extend(following)
    return False


def size_of_call(p: Progress, args: Any, kwargs: Any) -> Any:
    """Samples and tokens of the batch that a model is called with. Beside tokens there may be a state, or a mask."""
    batch = args[0] if args and ((len(args) == 1 and not kwargs) or are_tokens(args[0])) else (args or kwargs)
    measure = p.readers.get(0)
    if measure is None:
        measure = measure_of(p, 0, batch)
    return measure(batch)


def are_tokens(value: Any) -> bool:
    torch = sys.modules["torch"]
    return type(value) is torch.Tensor and value.dim() == 2 and value.dtype in (torch.int64, torch.int32)


def _probed(probe: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return probe.call(call, args, kwargs)


_NAME = f"{__name__}.watch_forward"
not_traced(Watched.__call__)
not_traced(_probed)


def _outermost(model: Any) -> Any:
    """What the training loop calls: the torch.compile wrapper of a model, its DataParallel wrapper, or the model itself.

    DataParallel copies the `__dict__` of what it wraps to other devices: nothing of ours may be in it. Looks only if something
    was compiled in this process, or if there are several devices.
    """
    torch = sys.modules["torch"]
    compiled = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    parallel = torch.nn.DataParallel if torch.cuda.is_initialized() and torch.cuda.device_count() > 1 else None
    wrappers = {kind: name for kind, name in ((compiled, "_orig_mod"), (parallel, "module")) if kind is not None}
    if not wrappers or type(model) in wrappers:
        return model
    for candidate in living(*wrappers):
        name = wrappers.get(type(candidate))
        if name is not None and candidate.__dict__.get("_modules", {}).get(name) is model:
            return candidate
    return model


@untraced
def _holds_loss(output: Any) -> bool:
    """Whether the loss is already in what the model returned: a scalar that gradients can start from."""
    return any(True for _ in _losses(output))


def _losses(output: Any) -> Iterator[Any]:
    tensor = sys.modules["torch"].Tensor
    if isinstance(output, (tuple, list)):
        candidates: Any = output[:4]
    elif isinstance(output, dict):
        candidates = (output.get("loss"),)
    else:
        candidates = (output if isinstance(output, tensor) else getattr(output, "loss", None),)
    return (item for item in candidates if isinstance(item, tensor) and item.dim() == 0 and item.requires_grad)
