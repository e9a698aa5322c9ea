"""docs/evidence/techniques.md says what was measured, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from techniques import measure

from perfagent_tools.bench.command import BENCHMARKS


def test_the_page_is_what_the_script_writes_from_kept_figures() -> None:
    found = {kind: measure.kept(kind) for kind in measure.KINDS}
    assert found["cpu"].keys() == BENCHMARKS.keys()
    text = (Path(__file__).parents[3] / "docs" / "evidence" / "techniques.md").read_text()
    inside = re.search(r"<!-- techniques:begin -->\n(.*)<!-- techniques:end -->", text, re.DOTALL)
    assert inside is not None
    assert inside[1].strip() == measure.page(found).strip()
