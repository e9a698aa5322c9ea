"""Forward time: from the root model's first call to the start of backward, and batch shapes for loops without a DataLoader.

The hooks go on the root only, and only after the first step (a hook that is there when torch.compile traces a module becomes
part of its graph); on the wrapper when the model is compiled, or round the compiled call of `module.compile()`.

Where the model returns the loss, the forward pass is over when it returns: a trainer that fetches its next batch between
the model's call and backward does not have that time in `forward`. A call counts only when a backward pass follows;
calls without gradients, and calls in evaluation mode of a model that is trained in training mode, never do.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any

from perfagent.hooks.account import DATA, FORWARD, RETURNED
from perfagent.hooks.guard import guarded
from perfagent.hooks.progress import now, state
from perfagent.signals.throughput import reader

__all__ = ["watch_forward"]

_ENOUGH = 3
"""So many training calls whose output held no loss, and the hook that looks at outputs is taken off again."""


def watch_forward(model: Any) -> Callable[[], None]:
    """Puts the hooks on a root model; the answer takes them off again."""
    root = _compiled_wrapper(model)
    grad_enabled = sys.modules["torch"].is_grad_enabled
    compiled_call = root.__dict__.get("_compiled_call_impl")
    if compiled_call is not None:  # module.compile(): hooks would be traced into the graph
        return _around(weakref.ref(root), compiled_call, grad_enabled)
    without_loss = 0

    @guarded
    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _called(module, args, kwargs, grad_enabled())

    @guarded
    def after(module: Any, args: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001 - the signature torch calls
        nonlocal without_loss
        if _returned(output, grad_enabled()):
            without_loss = 0
        elif module.training and grad_enabled():
            without_loss += 1
            if without_loss >= _ENOUGH:
                handle_after.remove()

    handle_before = root.register_forward_pre_hook(before, with_kwargs=True)
    handle_after = root.register_forward_hook(after)

    def remove() -> None:
        handle_before.remove()
        handle_after.remove()

    return remove


def _around(root: Any, call: Callable[..., Any], grad_enabled: Callable[[], bool]) -> Callable[[], None]:
    called, returned = guarded(_called), guarded(_returned)

    def compiled_call(*args: Any, **kwargs: Any) -> Any:
        grad = grad_enabled()
        called(root(), args, kwargs, grad)
        output = call(*args, **kwargs)
        returned(output, grad)
        return output

    def remove() -> None:
        module = root()
        if module is not None:
            module._compiled_call_impl = call

    root()._compiled_call_impl = compiled_call
    return remove


def _compiled_wrapper(model: Any) -> Any:
    """The torch.compile wrapper of a model, or the model itself. Looks only if something was compiled in this process."""
    wrapper = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    if wrapper is None or isinstance(model, wrapper):
        return model
    for candidate in gc.get_objects():
        if type(candidate) is wrapper and candidate.__dict__.get("_modules", {}).get("_orig_mod") is model:
            return candidate
    return model


def _called(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], grad: bool) -> None:
    p = state.current
    if p is None or not grad or p.backward_depth or p.phase_depth or p.thread != get_ident():
        return
    began = now()
    p.opened = True
    size = None
    trace = p.trace
    if not trace or trace[0][0] != DATA:  # no loader: the batch is what the model is called with
        batch = args[0] if len(args) == 1 and not kwargs else (args or kwargs)
        measure = p.readers.get(0)
        if measure is None:
            measure = p.readers[0] = reader(batch)
        size = measure(batch)
    trace.append((FORWARD, began, None if p.clock is None else p.clock.mark(), module.training, size))


def _returned(output: Any, grad: bool) -> bool:
    """Notes the end of a call; True where the output holds a loss."""
    p = state.current
    if p is None or not grad or p.backward_depth or p.phase_depth or p.thread != get_ident():
        return False
    holds_loss = _holds_loss(output)
    p.trace.append((RETURNED, now(), None if p.clock is None else p.clock.mark(), holds_loss))
    return holds_loss


def _holds_loss(output: Any) -> bool:
    """Whether the loss is already in what the model returned: a scalar that gradients can start from."""
    tensor = sys.modules["torch"].Tensor
    if isinstance(output, tensor):
        return bool(output.dim() == 0 and output.requires_grad)
    if isinstance(output, (tuple, list)):
        candidates: Any = output[:4]
    elif isinstance(output, dict):
        candidates = (output.get("loss"),)
    else:
        candidates = (getattr(output, "loss", None),)
    return any(isinstance(item, tensor) and item.dim() == 0 and item.requires_grad for item in candidates)
