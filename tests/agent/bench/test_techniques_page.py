"""docs/techniques.md says what was measured, and nothing else."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from perfagent_tools.bench.command import BENCHMARKS

ROOT = Path(__file__).parents[3]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    path = ROOT / "benchmarks" / "techniques" / "measure.py"
    specification = importlib.util.spec_from_file_location("techniques_measure", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "techniques_measure", module)
    specification.loader.exec_module(module)
    return module


def test_the_page_is_what_the_script_writes_from_kept_figures(script: ModuleType) -> None:
    found = {kind: script.kept(kind) for kind in script.KINDS}
    text = (ROOT / "docs" / "techniques.md").read_text()
    inside = re.search(r"<!-- techniques:begin -->\n(.*)<!-- techniques:end -->", text, re.DOTALL)
    assert inside is not None
    assert inside[1].strip() == script.page(found).strip()


def test_every_benchmark_has_figures_of_a_cpu(script: ModuleType) -> None:
    assert script.kept("cpu").keys() == BENCHMARKS.keys()
