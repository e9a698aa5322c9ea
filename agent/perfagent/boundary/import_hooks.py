"""Calls a function when a given module is imported.

Imports little, since it is loaded in processes that may never train.
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
    """A finder that Python asks for every import until the module is imported. It only observes: the other
    finders load.

    A caller that only wants the module's spec (importlib.util.find_spec) does not execute it; the finder
    then stays in place.
    """

    def __init__(self, module: str, done: Callable[[], None]) -> None:
        self.module, self._done = module, done
        self._asking: set[int] = set()  # threads in our find_spec; other finders may ask all finders, us included

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
            loader.__dict__.pop("exec_module", None)  # uncovers the class's own; may be gone already
            load(module)
            if self in sys.meta_path:
                self.forget()
                self._done()

        loader.exec_module = exec_module
