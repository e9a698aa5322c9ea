"""What is done when a module is imported: once, and only when the module is complete."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perfagent import patching


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A module that imports another one half way, and a third one that is imported later."""
    (tmp_path / "half_way_library.py").write_text("import half_way_torch\nclass Trainer: pass\n")
    (tmp_path / "half_way_torch.py").write_text("")
    (tmp_path / "half_way_later.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    finders = [*sys.meta_path]
    yield
    sys.meta_path[:] = finders
    for name in ("half_way_library", "half_way_torch", "half_way_later", "half_way_slots"):
        sys.modules.pop(name, None)


@pytest.fixture
def found(package) -> list[bool]:
    """What an adapter of the library sees when it is called."""
    found: list[bool] = []

    def adapt() -> None:
        found.append(hasattr(sys.modules["half_way_library"], "Trainer"))

    patching.when_imported("half_way_torch", lambda: patching.when_imported("half_way_library", adapt))
    return found


def test_a_library_importing_torch_waits_to_be_complete(found) -> None:
    importlib.import_module("half_way_library")
    importlib.import_module("half_way_later")
    assert found == [True]


def test_a_library_whose_import_failed_is_adapted_later(found, tmp_path: Path) -> None:
    broken = tmp_path / "half_way_library.py"
    whole = broken.read_text()
    broken.write_text("import half_way_torch\nraise ImportError('not today')\n")
    with pytest.raises(ImportError, match="not today"):
        importlib.import_module("half_way_library")
    importlib.import_module("half_way_later")
    assert found == []
    broken.write_text(whole)
    importlib.invalidate_caches()
    importlib.import_module("half_way_library")
    assert found == [True]


def test_a_loader_that_takes_no_attribute_loads_all_the_same(package) -> None:
    class Loader:
        __slots__ = ()

        def create_module(self, spec: ModuleSpec) -> None: ...

        def exec_module(self, module: Any) -> None:
            module.loaded = True

    sys.meta_path.append(SimpleNamespace(find_spec=lambda name, *_: ModuleSpec(name, Loader())))
    patching.when_imported("half_way_slots", lambda: None)
    assert importlib.import_module("half_way_slots").loaded
