"""Forward time: from the root model's first call to the start of backward, and batch shapes for loops without a DataLoader.

The hooks go on the root only, and only after the first step (a hook that is there when torch.compile traces a module becomes
part of its graph); on the wrapper when the model is compiled, or round the compiled call of `module.compile()`.

Where the model returns the loss, the forward pass is over when it returns: a trainer that fetches its next batch between
the model's call and backward does not have that time in `forward`. A call counts only when a backward pass follows;
calls without gradients, and calls in evaluation mode of a model that is trained in training mode, never do.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any

from perfagent.hooks.guard import guarded
from perfagent.hooks.progress import active, now
from perfagent.signals.throughput import reader

__all__ = ["watch_forward"]


def watch_forward(model: Any) -> Callable[[], None]:
    """Puts the hooks on a root model; the answer takes them off again."""
    root = compiled_wrapper(model)
    compiled_call = root.__dict__.get("_compiled_call_impl")
    if compiled_call is not None:  # module.compile(): hooks would be traced into the graph
        root._compiled_call_impl = _around(weakref.ref(root), compiled_call)
        return _undo(weakref.ref(root), compiled_call)
    before = root.register_forward_pre_hook(_before, with_kwargs=True)
    after = root.register_forward_hook(_after)

    def remove() -> None:
        before.remove()
        after.remove()

    return remove


def _around(root: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    def compiled_call(*args: Any, **kwargs: Any) -> Any:
        module = root()
        _before(module, args, kwargs)
        output = call(*args, **kwargs)
        _after(module, args, output)
        return output

    return compiled_call


def _undo(root: Any, call: Callable[..., Any]) -> Callable[[], None]:
    def remove() -> None:
        module = root()
        if module is not None:
            module._compiled_call_impl = call

    return remove


def compiled_wrapper(model: Any) -> Any:
    """The torch.compile wrapper of a model, or the model itself. Looks only if something was compiled in this process."""
    if "torch._dynamo" not in sys.modules or hasattr(model, "_orig_mod"):
        return model
    import gc

    wrapper = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    if wrapper is None:
        return model
    for candidate in gc.get_objects():
        if type(candidate) is wrapper and candidate.__dict__.get("_modules", {}).get("_orig_mod") is model:
            return candidate
    return model


@guarded
def _before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    p = active()
    if p is None or p.backward_depth or p.phase_depth or p.thread != get_ident():
        return
    p.forward_depth += 1
    if p.forward_depth > 1 or not sys.modules["torch"].is_grad_enabled():
        return
    if module.training:
        p.training_only = True
    elif p.training_only:
        return
    started = now()
    p.open()
    if not p.forward_start:
        p.forward_start = started
        if p.clock is not None:
            p.mark = p.clock.mark()
    p.forward_starts += 1
    if not p.fetches:
        batch = args[0] if len(args) == 1 and not kwargs else (args or kwargs)
        measure = p.readers.get(0)
        if measure is None:
            measure = p.readers[0] = reader(batch)
        p.root_size = measure(batch)
    p.own_ns += now() - started


@guarded
def _after(module: Any, args: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001 - the signature torch calls
    p = active()
    if p is None or p.forward_depth == 0 or p.backward_depth or p.phase_depth or p.thread != get_ident():
        return
    p.forward_depth -= 1
    if p.forward_depth or not p.forward_start or not _holds_loss(output):
        return
    p.forward_pending += now() - p.forward_start
    p.forward_start = 0
    if p.clock is not None and p.mark is not None:
        mark = p.clock.mark()
        if mark is not None:
            p.device_forward.append((p.mark, mark))
        p.mark = None


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
