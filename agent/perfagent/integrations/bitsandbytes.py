"""bitsandbytes compiles functions of its own when it is imported, used or not. They take tensors only."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

from perfagent.integrations import api

__all__ = ["install"]


def install(library: ModuleType, _patch: object) -> None:
    """library: bitsandbytes.backends.default.ops."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    if hasattr(dynamo, "innermost_backend"):
        api.ignore_backends(_backends_in(library, dynamo))


def _backends_in(library: ModuleType, dynamo: Any) -> Iterator[object]:
    """Yields the compiler backends behind functions that torch.compile made, or that these functions call. A compiled
    function is a wrapper whose closure holds the compile context, which holds the backend."""
    own = getattr(sys.modules["torch"], "_TorchCompileInductorWrapper", ())
    functions = [one for one in vars(library).values() if isinstance(one, FunctionType)]
    held = [*functions, *(one for function in functions for one in _held(function) if isinstance(one, FunctionType))]
    for context in (one for function in held for one in _held(function)):
        if isinstance(context, dynamo._TorchDynamoContext):
            backend = dynamo.innermost_backend(context.callback)
            if isinstance(backend, own):  # other backends are shared by all who request the compiler by that name
                yield backend


def _held(function: FunctionType) -> Iterator[object]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell
            yield cell.cell_contents
