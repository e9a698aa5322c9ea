"""Calls back when a module is imported.

Light on purpose: it is loaded in processes that may never train.
"""

from __future__ import annotations

import importlib.machinery
import sys
from _thread import get_ident
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

__all__ = ["Once"]


class Once:
    """A finder that is asked for every import until the module comes along, then is gone: it only looks, others load.

    Who asks for the module's spec alone (importlib.util.find_spec) does not execute it, so it is there for the next who asks.
    """

    def __init__(self, module: str, done: Callable[[], None]) -> None:
        self.module, self._done = module, done
        self._asking: set[int] = set()  # threads that ask the other finders, of which some ask all others as we do

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        me = get_ident()
        if name != self.module or me in self._asking:
            return None
        self._asking.add(me)
        try:
            for finder in [*sys.meta_path]:
                spec = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
                if spec is not None:
                    self._watch(spec)
                    return spec
        finally:
            self._asking.discard(me)
        return None

    def forget(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def _watch(self, spec: importlib.machinery.ModuleSpec) -> None:
        loader: Any = spec.loader
        if loader is None:
            return
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            loader.__dict__.pop("exec_module", None)  # the class's own shows again; another finder of ours may have been here
            load(module)
            if self in sys.meta_path:
                self.forget()
                self._done()

        loader.exec_module = exec_module
