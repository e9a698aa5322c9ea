"""Standing in a module's call, where `module.compile()` puts a compiled one: the module calls what is there instead of itself.

No hook of the user's sees it and none is registered: those cost the module its fast path (2 µs a call), would be copied and
pickled along with it, and become part of the graph where torch.compile traces them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType, FunctionType
from typing import Any

__all__ = ["CALL", "Standing", "anything_compiled", "copy_that_calls"]

CALL = "_compiled_call_impl"
_KNOWS = "perfagent.signals.compiled"


def copy_that_calls(caller: FrameType, module: Any) -> Any:
    """The module that is being called where that is another one, which was made by copying the watched one's `__dict__` with all
    that is in it: a replica of DataParallel, a clone of meta-learning. It must not be answered with the original's weights.

    caller: the frame that has called what stands there.
    """
    if caller.f_code.co_name != "_wrapped_call_impl":
        return None
    calling = caller.f_locals.get("self", module)
    return calling if calling is not module and isinstance(calling, sys.modules["torch"].nn.Module) else None


def anything_compiled() -> bool | None:
    """Whether torch.compile was used in this process; None while the sender's thread imports what can tell."""
    compiled = getattr(sys.modules.get(_KNOWS), "compiled", None)
    return None if compiled is None else bool(compiled())


class Standing:
    """What stands in one module's call, from `put_on` until `take_off`. The call itself is a subclass's.

    replaced: what it calls; what stood there before, unless told otherwise. The module is held weakly: deleting it must free its
    memory at once. Modules leave this attribute out of copies and pickles, and the wrappers that do not get None for it.
    """

    __slots__ = ("_module", "_replaced")

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """What torch.jit.script takes it for: a function, which it leaves out where it cannot compile it. Of anything else in a
        module it asks for the type, and stumbles."""
        return FunctionType


    def __init__(self, module: Any, replaced: Callable[..., Any] | None = None) -> None:
        self._module, self._replaced = weakref.ref(module), replaced

    def put_on(self) -> None:
        module: Any = self._module()
        self._replaced = module.__dict__.get(CALL)
        module.__dict__[CALL] = self  # not by setattr: torch.compile's wrapper would hand it on to the model inside

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def take_off(self) -> None:
        """Unless somebody else stands there by now."""
        module = self._module()
        if module is None or module.__dict__.get(CALL) is not self:
            return
        if self._replaced is None:
            del module.__dict__[CALL]
        else:
            module.__dict__[CALL] = self._replaced
