"""docs/techniques.md says what was measured, and nothing else."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from perfagent.bench.command import BENCHMARKS

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


def test_promises_are_held_against_the_figures(script: ModuleType) -> None:
    def report(fill: float | None, pack_s: float) -> dict[str, object]:
        figures = {"fill": {"value": fill}, "speed": {"value": 0.1}}
        return {"name": "packing", "figures": figures, "beside": {"pack_s": pack_s}}

    assert script.broken(report(99.5, 0.2)) == []
    assert script.broken(report(None, 0.0)) == []
    assert script.broken(report(98.0, 1.5)) == ["packing.fill is 98.00, below 99", "packing takes 1.50 s, more than 1"]
