"""bitsandbytes compiles functions of its own when it is imported, used or not. They take tensors only."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

from perfagent.integrations import api

__all__ = ["install"]


def install(library: ModuleType, _patch: object) -> None:
    """library: bitsandbytes.backends.default.ops. What torch.compile made, and what calls that, has a closure which holds
    the compile context, which holds the backend."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    if not hasattr(dynamo, "innermost_backend"):
        return
    held = [*_held(vars(library).values())]
    contexts = [one for one in [*held, *_held(held)] if isinstance(one, dynamo._TorchDynamoContext)]
    backends = [dynamo.innermost_backend(context.callback) for context in contexts]
    # other backends are shared by all who request the compiler by that name
    own = getattr(sys.modules["torch"], "_TorchCompileInductorWrapper", ())
    api.ignore_backends(backend for backend in backends if isinstance(backend, own))


def _held(values: Iterable[object]) -> Iterator[object]:
    """What the closures of the functions among these hold."""
    for value in values:
        for cell in (value.__closure__ or ()) if isinstance(value, FunctionType) else ():
            with contextlib.suppress(ValueError):  # an empty cell
                yield cell.cell_contents
