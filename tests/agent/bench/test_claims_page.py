"""docs/claims.md says what was measured, and nothing else."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from perfagent.bench.claims import CLAIMS

ROOT = Path(__file__).parents[3]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    specification = importlib.util.spec_from_file_location(
        "claims_measure", ROOT / "benchmarks" / "claims" / "measure.py"
    )
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "claims_measure", module)
    specification.loader.exec_module(module)
    return module


def test_the_page_is_what_the_script_writes_from_the_kept_figures(script: ModuleType) -> None:
    found = {kind: script.kept(kind) for kind in script.KINDS}
    text = (ROOT / "docs" / "claims.md").read_text()
    inside = re.search(r"<!-- claims:begin -->\n(.*)<!-- claims:end -->", text, re.DOTALL)
    assert inside is not None
    assert inside[1].strip() == script.page(found).strip()


def test_every_claim_has_a_figure_of_a_cpu(script: ModuleType) -> None:
    measured = {claim["id"] for report in script.kept("cpu").values() for claim in report["claims"]}
    assert measured == {claim.id for claim in CLAIMS}


def test_a_column_without_a_run_says_so(script: ModuleType) -> None:
    page = script.page({"cpu": script.kept("cpu"), "cuda": {}})
    rows = [line for line in page.splitlines() if line.startswith("| ") and line.count(" | ") == 3]
    cells = [line.split(" | ") for line in rows if "---" not in line and not line.startswith("| claim")]
    assert len(cells) == len(CLAIMS)
    assert {row[2] for row in cells} == {"not run"}


def test_what_perfagent_promises_is_held_against_the_figures(script: ModuleType) -> None:
    def report(fill: float | None, pack_s: float) -> dict[str, object]:
        claims = [{"id": "packing.fill", "value": fill}, {"id": "amp.speed", "value": 0.1}]
        return {"claims": claims, "beside": {"pack_s": pack_s}}

    assert script.broken(report(99.5, 0.2)) == []
    assert script.broken(report(None, 0.0)) == []
    assert script.broken(report(98.0, 1.5)) == ["packing.fill is 98.00, below 99", "packing takes 1.50 s, more than 1"]
