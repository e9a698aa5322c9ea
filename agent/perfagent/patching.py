"""Installs the hooks into torch and removes them again. Never imports torch itself: that is the script's decision.

The hooks are installed once per process, however many runs follow. Without an active run, and in a forked child,
every hook passes straight through. So do the hooks in the script's own loggers, which need no torch. Each patch
replaces one attribute of a module or class, and is removed only if it is still in place.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from perfagent import integrations
from perfagent.boundary import import_hooks
from perfagent.boundary.dynamo import keep_out_of_frames, not_traced, passed_by
from perfagent.boundary.guard import guarded
from perfagent.hooks import collectives, compile_time, grad_clipping, graph_replays, host_to_device
from perfagent.hooks.backward import watch_backward
from perfagent.hooks.dataloader import watch_iter, watch_next
from perfagent.hooks.grad_scaler import watch_scale, watch_scaler_step, watch_unscale
from perfagent.hooks.optimizer_step import after_step, before_step, watch_clear
from perfagent.integrations import functions
from perfagent.step.state import state

__all__ = [
    "TESTED", "install", "install_for_run", "install_late", "installed", "remove", "watch_loggers", "when_torch_is_imported",
]  # fmt: skip

logger = logging.getLogger("perfagent")
TESTED = ((2, 4), (2, 14))
"""Tested with torch from the first version on and below the second."""
_undo: list[Callable[[], None]] = []
_installed: set[str] = set()
_Function = Callable[..., Any]
_Watch = Callable[[_Function], _Function]
_patches: dict[tuple[_Watch, int], tuple[_Function, _Function]] = {}
"""(the watching function, the id of the original or of its patch) -> (the original, its patch)."""


def installed() -> bool:
    return "torch" in _installed


def install() -> bool:
    """Installs all hooks if torch is imported. Returns False if it is not (yet)."""
    if installed():
        return True
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "compile"):  # defined near the end of torch's own import
        return False
    _installed.add("torch")
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
    graph_replays.install(_patch)
    functions.install(_patch, when_imported)
    compile_time.install(when_imported)
    _undo.append(compile_time.remove)
    integrations.install(_patch, when_imported)
    return True


def install_for_run() -> None:
    if state.current is not None:
        install()


def install_late() -> None:
    """Installs, after the first step, the hooks that only some loops need: waits for other ranks, copies
    to a device."""
    for install in (collectives.install, host_to_device.install):
        guarded(install)(_patch)


def watch_loggers() -> None:
    """What the script logs by other means than ours."""
    if "loggers" not in _installed:
        _installed.add("loggers")
        from perfagent.integrations.loggers.libraries import install as install_loggers

        install_loggers(_patch, when_imported)


def remove() -> None:
    """Removes every hook."""
    while _undo:
        _undo.pop()()
    _patches.clear()
    _installed.clear()


def _patch(owner: Any, name: str, watch: _Watch, *, traced: bool = False) -> None:
    """Replaces an attribute by its watched version. traced: torch.compile can trace the original, and must do so."""
    original, watched = _patch_of(getattr(owner, name), watch, traced=traced)
    inherited = name not in getattr(owner, "__dict__", (name,))  # a closure's cell has only its contents
    setattr(owner, name, watched)
    keep_out_of_frames()

    def undo() -> None:
        if getattr(owner, name) is not watched:
            return  # somebody patched over our patch: ours stays below theirs and passes through
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)

    _undo.append(undo)


def _patch_of(function: _Function, watch: _Watch, *, traced: bool) -> tuple[_Function, _Function]:
    """Returns the original function and its patch. All modules that hold a function get the same patch, since pickle
    refuses two objects of one name.

    Where a module imported the patched function from another module, `function` is already that patch.
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
        logger.warning(
            "perfagent is tested with torch >=%s,<%s; with torch %s some signals may be missing", low, high, version
        )


def when_torch_is_imported(done: Callable[[], None]) -> None:
    """Calls `done` when the script's own `import torch` is complete, or at once if it already is."""
    if "torch" in sys.modules:
        done()
    elif not any(isinstance(finder, import_hooks.Once) and finder.module == "torch" for finder in sys.meta_path):
        import_hooks.when_imported("torch", done)


def when_imported(module: str, done: Callable[[], None]) -> None:
    """Does the same for a framework's module, until the hooks are removed. An exception from `done` does not
    leave this call."""
    _undo.append(import_hooks.when_imported(module, guarded(done)))
