"""timm: its adaptive clipping (`--clip-mode agc`) changes gradients unit by unit, and nothing of torch's clipping is in
it.

Its other two ways of clipping are torch's own.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from perfagent.integrations import api

if TYPE_CHECKING:
    from perfagent.integrations import Patch

__all__ = ["install"]

_ALSO = ("timm.utils", "timm.utils.clip_grad")
"""Where the function is known by its name, too; these are imported later, or were before there is a run."""


def install(framework: ModuleType, patch: Patch) -> None:
    """framework: timm.utils.agc."""
    original = framework.adaptive_clip_grad
    for owner in (framework, *map(sys.modules.get, _ALSO)):
        if getattr(owner, "adaptive_clip_grad", None) is original:
            patch(owner, "adaptive_clip_grad", _watch_clip)


def _watch_clip(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def adaptive_clip_grad(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if api.is_training_thread():
            is_one = isinstance(parameters, sys.modules["torch"].Tensor)
            parameters = [parameters] if is_one else list(parameters)  # a generator can be asked once
            api.begin_clipping(parameters)
        return original(parameters, *args, **kwargs)

    return adaptive_clip_grad
