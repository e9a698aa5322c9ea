"""Figures of a finding, as lines."""

from __future__ import annotations

from typing import Any

import pytest

from perfagent.wire import Finding
from perfagent_client.evidence import evidence_lines


@pytest.mark.parametrize(
    ("evidence", "lines"),
    [
        ({"bytes_per_s": 2.0**20, "bytes": 2.0**31}, ["bytes per s: 1 MiB", "bytes: 2 GiB"]),
        ({"peak_bytes_by_rank": {"0": 2.0**30}}, ["peak bytes by rank: 0 1 GiB"]),
        (
            {"left_s": 90.0, "taken_pct": 12.5, "used_bytes": 1024.0},
            ["left: 90 s", "taken: 12.5 %", "used: 1 KiB"],
        ),
        ({"world_size": 8, "doubt": "likely", "left_s": None}, []),
    ],
    ids=["bytes in front", "bytes within", "units at the end", "of the sentence alone"],
)
def test_figures_have_the_unit_in_their_name(evidence: dict[str, Any], lines: list[str]) -> None:
    assert evidence_lines(Finding(rule="r", severity="info", message="", evidence=evidence)) == lines
