"""Times backward passes and reads the loss, by a patch of `torch.autograd.backward`, which `Tensor.backward` calls.

Only the outermost call counts (activation checkpointing calls backward again inside). The tensor that it starts from is
the loss that the optimizer minimizes. `GradScaler.scale` is watched so that we keep the tensor before scaling: dividing
afterward would turn a loss of 3.0 in half precision, scaled by 65536, into infinity.
"""

from __future__ import annotations

import functools
import sys
from threading import get_ident
from typing import Any

from perfagent.boundary.dynamo import Function, untraced
from perfagent.boundary.guard import failed, failures, guarded
from perfagent.device import DeviceClock, Event, Reading, read_later, read_number_later
from perfagent.measure.loss_function import is_packed, loss_function
from perfagent.step import trace as kinds
from perfagent.step.state import StepState, now, state
from perfagent.step.trace import BACKWARD, BACKWARD_END, MOST_ITEMS, Loss, LossScale

__all__ = ["begin_pass", "check_arrived", "remember", "watch_backward"]


def watch_backward(original: Function) -> Function:
    """Wraps torch.autograd.backward."""
    plain_tensor = sys.modules["torch"].Tensor

    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        p = state.current
        if p is None or p.backward_depth or (p.thread != get_ident() and not p.claim_thread()):
            return original(tensors, *args, **kwargs)
        began = now()
        try:
            p.backward_depth = 1
            if not failures or _NAME not in failures:
                try:
                    if p.plain and type(tensors) is plain_tensor and tensors.is_cpu and tensors.numel() == 1:
                        # usually the only backward pass of the step, of a single number: does what `_begin` does,
                        # inline
                        p.plain = False
                        p.opened = True
                        value = tensors.item()
                        p.trace.extend((began, None, value, False, BACKWARD))
                        p.loss_count = 1
                        if value - value != 0.0:
                            _suspect(p, tensors)
                    else:
                        _begin(p, tensors, began)
                except Exception as error:  # noqa: BLE001 - it must not reach the training loop
                    failed(_NAME, error)
            return original(tensors, *args, **kwargs)
        except (RuntimeError, MemoryError) as error:
            p.links.investigator.passing(error)
            raise
        finally:
            p.backward_depth = 0
            p.trace.extend((now(), None if p.clock is None else p.clock.mark(), BACKWARD_END))

    return backward


_NAME = f"{__name__}.backward"
_SCALINGS, _MOST_SCALINGS = ("DivBackward0", "MulBackward0"), 3
"""Operators that scale a loss: by the number of micro-batches, and by a GradScaler."""


@untraced
def _begin(p: StepState, tensors: Any, began: int) -> None:
    """Records the start of a backward pass."""
    single = hasattr(tensors, "requires_grad")
    if p.losses.proof is not None:
        proof, p.losses.proof = p.losses.proof, None
        proof(tensors)
    if p.losses.loss_made is None:
        p.losses.loss_made = {}  # first: an error in there must not come again, nor cost the rest
        _note_loss(p, tensors)
    if p.loss_count and single and _is_whole(tensors):
        for at in kinds.backward_passes(p.trace):
            p.trace[at + 2] = None  # the loss of a part
        p.loss_count = 0
    event = begin_pass(p, tensors if single else None)
    root = None
    if not p.losses.inside_closure:  # LBFGS evaluates several times; only the first is the loss at the current weights
        if p.entered:  # called by the optimizer's own step, through a closure
            p.losses.inside_closure = p.unusual = True
        root = _root(p, tensors) if single else _sum(p, tensors)
    if root is None:
        p.trace.extend((began, event, None, False, BACKWARD))
    else:
        p.trace.extend((began, event, *root, BACKWARD))
        p.loss_count += 1
    if len(p.trace) > MOST_ITEMS:  # backward passes without an optimizer: this will never be a step
        p.trace, p.loss_count = [], 0


@guarded
def _note_loss(p: StepState, tensors: Any) -> None:
    """Notes the function of the loss, the first of several. (torch takes any iterable, and edges of a graph, too.)"""
    if type(tensors) in (list, tuple):
        tensors = tensors[0] if tensors else None
    if hasattr(tensors, "grad_fn"):
        p.losses.loss_made = loss_function(tensors)


def _is_whole(tensor: Any) -> bool:
    """True if parts of this loss were backpropagated while it was computed (cached gradients). Such a loss is a number
    without a graph, apart from its scaling, and a hook on it does the rest of the pass."""
    node = tensor.grad_fn
    for _ in range(_MOST_SCALINGS):
        if node is None or type(node).__name__ not in _SCALINGS:
            break
        node = node.next_functions[0][0]
    leaf: Any = tensor if tensor.grad_fn is None else getattr(node, "variable", None)
    return type(leaf) is sys.modules["torch"].Tensor and leaf.numel() == 1 and bool(leaf._backward_hooks)


def begin_pass(p: StepState, tensor: Any) -> Event | None:
    """Begins the next step if it has not begun, and returns the mark of this backward pass on the device."""
    p.plain = False
    if p.clock is None and tensor is not None and not tensor.is_cpu:
        p.clock = DeviceClock(tensor.device)
    p.opened = p.losses.seen_backward = True
    if p.early and p.logs.first_logged < 0:
        p.settle_early(p.completed + 1)
        p.logs.first_logged = 0
    return None if p.clock is None else p.clock.begin(tensor)


def _root(p: StepState, tensor: Any) -> Loss | None:
    if p.amp.scaled:
        unscaled = p.amp.scaled.pop(id(tensor), None)
        if unscaled is not None:
            p.losses.arriving = unscaled.value if isinstance(unscaled.value, Reading) else None
            return unscaled
    if tensor.numel() != 1:
        return None  # a vector, or a pipeline stage, which passes gradients on and has no loss
    local = getattr(tensor, "_local_tensor", tensor)
    if local.is_cpu:
        value = float(local.item())
        if value - value != 0.0:  # NaN or infinite: measure the gradients of this step
            _suspect(p, tensor)
        return Loss(value, _divided(tensor) if p.losses.accumulates or p.loss_count else False)
    if p.losses.arriving is not None:
        check_arrived(p, updates=False)  # of the micro-batch before
    p.losses.arriving = later = read_later(local)
    return None if later is None else Loss(later, _divided(tensor))


@guarded
def check_arrived(p: StepState, *, updates: bool = True) -> None:
    """Before gradients or weights change, asks whether the step's newest loss has come from its device by now and is no
    number. It mostly has: the script read it, or the device cannot be further behind than its queue is long. updates:
    else more gradients will be added."""
    arriving = p.losses.arriving
    if arriving is None or p.clock is None or p.clock.blocked():
        return
    value = arriving.seen()
    p.losses.is_late = value is None
    if value is not None:
        p.losses.arriving = None
        if value - value != 0.0:
            _suspect(p, None)
    elif updates:
        p.links.on_late_loss()


def _suspect(p: StepState, tensor: Any) -> None:
    """Has the gradients of this very step measured and the cause investigated, since the loss is NaN or infinite. Of a
    loss that stays so only the first step: what follows is its consequence, and costs what any step does."""
    if p.links.investigator.suspect(tensor):
        p.measure_at = p.completed
        p.unusual = True


def _sum(p: StepState, tensors: Any) -> Loss | None:
    """Returns the sum of several roots in one call, since their gradients add up."""
    if not isinstance(tensors, (list, tuple)):
        return None
    roots = [_root(p, tensor) for tensor in tensors if hasattr(tensor, "requires_grad")]
    values = [root.value for root in roots if root is not None]
    if not values or not all(isinstance(value, float) for value in values):
        return None if len(values) != 1 else roots[0]
    return Loss(float(sum(value for value in values if isinstance(value, float))), divided=True)


def _divided(tensor: Any) -> LossScale:
    """Returns the divisor if a division made the loss; True for a product or an unknown divisor; else False.

    Never runs the hooks that hold tensors for the backward pass: activation checkpointing would run the model again.
    """
    node = tensor.grad_fn
    kind = type(node).__name__
    if kind != "DivBackward0":
        return kind == "MulBackward0"
    try:
        if is_packed(node._raw_saved_other):
            return True
        other = node._saved_other
        value = None if other.numel() != 1 or hasattr(other, "_local_tensor") else read_number_later(other)
    except (RuntimeError, TypeError, AttributeError):  # already freed, complex, or not kept by this version of torch
        return True
    return True if value is None else value


@guarded
def remember(p: StepState, outputs: Any, scaled: Any) -> None:
    """A backward pass from `scaled` is one of the loss `outputs`."""
    if not isinstance(outputs, sys.modules["torch"].Tensor) or outputs.numel() != 1:
        return
    p.amp.scaling, p.unusual, p.plain = True, True, False
    value = read_number_later(outputs)
    if value is not None:
        if len(p.amp.scaled) > 64:  # scaled and never used for a backward pass
            p.amp.scaled.clear()
        p.amp.scaled[id(scaled)] = Loss(value, _divided(outputs))
