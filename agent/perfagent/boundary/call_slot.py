"""Replaces a module's call in the slot where `module.compile()` stores the compiled call: the module calls that slot
instead of its own forward.

No hook is registered, so the script sees none. A registered hook would cost the module its fast path (2 µs a call),
would be copied and pickled along with the module, and would become part of the graph that torch.compile traces.
"""

from __future__ import annotations

import sys
import weakref
from types import CodeType, FrameType, FunctionType
from typing import Any

from perfagent.boundary.dynamo import Function

__all__ = ["CALL", "CallSlot", "copy_that_calls"]

CALL = "_compiled_call_impl"


def copy_that_calls(caller: FrameType, module: Any) -> Any:
    """Returns the module that is really called, if it is a copy that took over the watched module's `__dict__` with
    our call in it: a replica of DataParallel, a clone in meta-learning. Such a call must not run with the
    original's weights.

    caller: the frame that called the slot.
    """
    if caller.f_code.co_name != "_wrapped_call_impl":
        return None
    calling = caller.f_locals.get("self", module)
    return calling if calling is not module and isinstance(calling, sys.modules["torch"].nn.Module) else None


class CallSlot:
    """Occupies the slot of one module's call, from `put_on` until `take_off`. A subclass defines the call.

    replaced: the callable to call; by default the one that was in the slot before. The module is held weakly, so
    that deleting it frees its memory at once. Copies and pickles of modules leave the slot out; wrappers that
    copy it get None.
    """

    __slots__ = ("_module", "_replaced")

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Passes for a function to torch.jit.script, which leaves out a function that it cannot compile. For any other
        object in a module it needs a type, and fails."""
        return FunctionType

    @property
    def __code__(self) -> CodeType:
        """torch.compile of torch 2.4 asks a function in which file it is, and leaves ours alone."""
        return type(self).__call__.__code__

    def __init__(self, module: Any, replaced: Function | None = None) -> None:
        self._module, self._replaced = weakref.ref(module), replaced

    def put_on(self) -> None:
        module: Any = self._module()
        self._replaced = module.__dict__.get(CALL)
        module.__dict__[CALL] = self  # not by setattr: torch.compile's wrapper would pass it on to the model inside

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def take_off(self) -> None:
        """Restores the slot, unless somebody else has replaced it since."""
        module = self._module()
        if module is None or module.__dict__.get(CALL) is not self:
            return
        if self._replaced is None:
            del module.__dict__[CALL]
        else:
            module.__dict__[CALL] = self._replaced
