"""The operations that torch runs inside a block: what is launched on a device, and what would wait for it."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["READS", "Dispatched"]

READS = frozenset({"_local_scalar_dense", "nonzero", "item", "equal", "is_nonzero"})


class Dispatched(TorchDispatchMode):
    """names: of the operations, in their order, but for those that only make another view."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        self.names += [name] if name not in ("detach", "view") else []
        return function(*args, **(kwargs or {}))
