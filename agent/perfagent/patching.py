"""Puts the hooks into torch and takes them out again. Nothing here imports torch: that is the user's decision.

Installed once per process, whatever number of runs follows; without an active run every hook passes straight through, and in a
forked child too. Each patch replaces one module or class attribute, and is taken back only where it is still ours.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from perfagent import frameworks
from perfagent.boundary.dynamo import keep_out_of_frames, not_traced, passed_by
from perfagent.boundary.guard import guarded
from perfagent.boundary.import_hooks import Once
from perfagent.hooks import checkpoint_saves, collectives, evaluation, flat_clipping, grad_clipping, host_to_device
from perfagent.hooks.backward import watch_backward
from perfagent.hooks.dataloader import watch_iter, watch_next
from perfagent.hooks.grad_scaler import watch_scale, watch_scaler_step, watch_unscale
from perfagent.hooks.optimizer_step import after_step, before_step, watch_clear

__all__ = ["TESTED", "install", "install_late", "installed", "remove", "when_torch_is_imported"]

logger = logging.getLogger("perfagent")
TESTED = ((2, 11), (2, 14))
"""torch from the first version on, below the second."""
_undo: list[Callable[[], None]] = []
_Function = Callable[..., Any]
_Watch = Callable[[_Function], _Function]
_patches: dict[tuple[_Watch, int], tuple[_Function, _Function]] = {}
"""What watches a function, and the id of the function or of its patch -> the function, its patch."""


def installed() -> bool:
    return bool(_undo)


def install() -> bool:
    """All hooks, if torch is imported. False when it is not (yet)."""
    if _undo:
        return True
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "compile"):  # defined near the end of torch's own import
        return False
    _check_version(str(torch.__version__))
    import torch.amp.grad_scaler as grad_scaler  # all of these came with `import torch`
    import torch.autograd as autograd
    import torch.utils.data.dataloader as dataloader
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    before, after = register_optimizer_step_pre_hook(before_step), register_optimizer_step_post_hook(after_step)
    _undo.extend((before.remove, after.remove))
    _patch(autograd, "backward", watch_backward)
    _patch(dataloader._BaseDataLoaderIter, "__next__", watch_next)
    _patch(dataloader.DataLoader, "__iter__", watch_iter)
    _patch(grad_scaler.GradScaler, "scale", watch_scale)
    _patch(grad_scaler.GradScaler, "step", watch_scaler_step)
    _patch(grad_scaler.GradScaler, "unscale_", watch_unscale)
    _patch(torch.optim.Optimizer, "zero_grad", watch_clear)
    _patch(torch.nn.Module, "zero_grad", watch_clear, traced=True)
    grad_clipping.install(_patch)
    flat_clipping.install(_patch, when_imported)
    keep_out_of_frames()
    checkpoint_saves.install(_patch, when_imported)
    evaluation.install(_patch, when_imported)
    frameworks.install(_patch, when_imported)
    return True


def install_late() -> None:
    """What is watched only where it is used, after the first step: the waits of several ranks, copies to a device."""
    for install in (collectives.install, host_to_device.install):
        guarded(install)(_patch)


def remove() -> None:
    """Takes every hook out again."""
    while _undo:
        _undo.pop()()
    _patches.clear()


def _patch(owner: Any, name: str, watch: _Watch, *, traced: bool = False) -> None:
    """traced: torch.compile can trace the original, and is to do so."""
    original, watched = _patch_of(getattr(owner, name), watch, traced=traced)
    inherited = name not in getattr(owner, "__dict__", (name,))  # the cell of a closure has no attribute but its contents
    setattr(owner, name, watched)

    def undo() -> None:
        if getattr(owner, name) is not watched:
            return  # someone patched on top of us: ours stays below, and passes through
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)

    _undo.append(undo)


def _patch_of(function: _Function, watch: _Watch, *, traced: bool) -> tuple[_Function, _Function]:
    """A function and its patch, one for all the modules that have it: pickle takes no two objects of one name for the same.

    Where a module took the patched function from another when it was imported, that patch is the one.
    """
    known = _patches.get((watch, id(function)))
    if known is None:
        patch = watch(function)
        known = function, passed_by(patch, function) if traced else not_traced(patch)
        _patches[watch, id(function)] = _patches[watch, id(known[1])] = known
    return known


def _check_version(version: str) -> None:
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if not TESTED[0] <= numbers < TESTED[1]:
        low, high = (".".join(map(str, bound)) for bound in TESTED)
        logger.warning("perfagent is tested with torch >=%s,<%s; with torch %s some signals may be missing", low, high, version)


def when_torch_is_imported(done: Callable[[], None]) -> None:
    """Calls back when the user's own `import torch` is complete; at once if it already is."""
    if "torch" in sys.modules:
        done()
    elif not any(isinstance(finder, Once) and finder.module == "torch" for finder in sys.meta_path):
        sys.meta_path.insert(0, Once("torch", done))


def when_imported(module: str, done: Callable[[], None]) -> None:
    """The same for a module of a framework, until the hooks are taken out. Whatever `done` raises ends here."""
    watched = guarded(done)
    if module in sys.modules:
        watched()
        return
    finder = Once(module, watched)
    sys.meta_path.insert(0, finder)
    _undo.append(finder.forget)
