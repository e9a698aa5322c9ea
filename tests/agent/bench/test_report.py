from __future__ import annotations

import pytest

from perfagent.bench.claims import CLAIMS, ELSEWHERE, SOURCES, Claim, claims_of
from perfagent.bench.command import BENCHMARKS
from perfagent.bench.report import Figure, Report


def report(copy: float | None) -> Report:
    return Report(
        name="pinning", device="cpu", machine="a machine", setup="a copy",
        figures={"copy": Figure(copy, "as measured", "with large batches"), "training": Figure(None, "no GPU", "always")},
        head=["way", "ms"], rows=[["one", "1.5"]],
    )  # fmt: skip


def test_every_benchmark_judges_a_claim_and_every_claim_has_a_benchmark_and_known_sources() -> None:
    assert {claim.id.partition(".")[0] for claim in CLAIMS} == BENCHMARKS.keys()
    assert len({claim.id for claim in CLAIMS}) == len(CLAIMS)
    for one in (*CLAIMS, *ELSEWHERE):
        assert one.sources
        assert set(one.sources) <= SOURCES.keys()


@pytest.mark.parametrize(
    ("figure", "compared"), [(None, "not measured"), (1.49, "below"), (1.5, "within"), (3.0, "within"), (3.01, "above")]
)
def test_a_figure_lies_within_the_claimed_range_or_not(figure: float | None, compared: str) -> None:
    assert Claim(id="a.b", sources=("S1",), says="", least=1.5, most=3.0).compared(figure) == compared


def test_a_claim_without_a_figure_is_not_judged() -> None:
    assert Claim(id="a.b", sources=("S1",), says="").compared(2.0) == "no figure"


def test_a_report_says_claim_source_figure_and_condition() -> None:
    text = " ".join(report(2.5).text().split())
    claim = claims_of("pinning")[0]
    assert (
        f"claim {claim.says} (S1, {SOURCES['S1']}) here as measured: more than claimed condition with large batches"
        in text
    )
    assert "no GPU: not measured" in text
    assert report(1.75).as_dict()["claims"][0]["compared"] == "within"


def test_a_report_that_leaves_out_a_claim_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the claims of pinning are \['copy', 'training'\]"):
        Report(name="pinning", device="cpu", machine="", setup="", figures={}, head=[], rows=[])
