"""Calls a function when a given module is imported.

Imports little, since it is loaded in processes that may never train.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
from _thread import get_ident
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

__all__ = ["Once", "is_executing", "when_imported"]


def is_executing(module: str) -> bool:
    """Whether the module is being imported at this moment: what it defines is not all there yet.

    Python's import system asks the same field before it lets another thread use a module.
    """
    return bool(getattr(getattr(sys.modules.get(module), "__spec__", None), "_initializing", False))


def when_imported(module: str, done: Callable[[], None]) -> Callable[[], None]:
    """Calls `done` now if the module is there, else when its import is complete. Returns how to wait no longer."""
    finder = Once(module, done)
    if module in sys.modules and not is_executing(module):
        done()
    else:
        sys.meta_path.insert(0, finder)
    return finder.forget


class Once:
    """A finder that Python asks for every import until the module is imported. It only observes: the other
    finders load.

    A caller that only wants the module's spec (importlib.util.find_spec) does not execute it; the finder
    then stays in place. A module whose import had begun before passes no finder again: the function is then
    called at the next import of any other module once it is complete.
    """

    def __init__(self, module: str, done: Callable[[], None]) -> None:
        self.module, self._done = module, done
        self._began_before = is_executing(module)
        self._asking: set[int] = set()  # threads in our find_spec; other finders may ask all finders, us included

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if self._began_before and not is_executing(self.module):
            self._began_before = False
            if self.module in sys.modules:  # else its import failed, and may come again
                self.forget()
                self._done()
                return None
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
        load = getattr(loader, "exec_module", None)
        if load is None:
            return

        def exec_module(module: ModuleType) -> None:
            loader.__dict__.pop("exec_module", None)  # uncovers the class's own; may be gone already
            load(module)
            if self in sys.meta_path:
                self.forget()
                self._done()

        with contextlib.suppress(
            AttributeError
        ):  # a loader with slots: this module goes unseen, and its import succeeds
            loader.exec_module = exec_module
