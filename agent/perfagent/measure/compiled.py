"""Finds what torch.compile has compiled in this process."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

__all__ = ["compiled"]

_LIBRARIES = ("bitsandbytes.backends.default.ops",)
"""Libraries that compile functions of their own at import, used or not; those take tensors only and call no module."""
_theirs: WeakKeyDictionary[ModuleType, frozenset[int]] = WeakKeyDictionary()
"""module -> ids of the backends of the functions that it compiles: inductor has one backend per function"""


def compiled() -> bool:
    """True if this process used torch.compile for anything that may call a module."""
    used = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {})
    asked = {id(backend) for backend in used.values() if backend is not None}  # disabling torch.compile leaves None
    for module in map(sys.modules.get, _LIBRARIES) if asked else ():
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            if module not in _theirs:
                _theirs[module] = frozenset(map(id, _backends_in(module)))
            asked -= _theirs[module]
    return bool(asked)


def _backends_in(module: ModuleType) -> Iterator[object]:
    """Yields the compiler backends behind functions that torch.compile made, or that these functions call. A compiled
    function is a wrapper whose closure holds the compile context, which holds the backend."""
    dynamo: Any = sys.modules["torch._dynamo.eval_frame"]
    own = getattr(sys.modules["torch"], "_TorchCompileInductorWrapper", ())
    functions = [one for one in vars(module).values() if isinstance(one, FunctionType)]
    held = [*functions, *(one for function in functions for one in _held(function) if isinstance(one, FunctionType))]
    for context in (one for function in held for one in _held(function)):
        if isinstance(context, dynamo._TorchDynamoContext) and hasattr(dynamo, "innermost_backend"):
            backend = dynamo.innermost_backend(context.callback)
            if isinstance(backend, own):  # other backends are shared by all who request the compiler by that name
                yield backend


def _held(function: FunctionType) -> Iterator[object]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell
            yield cell.cell_contents
