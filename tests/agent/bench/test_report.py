from __future__ import annotations

from perfagent.bench.report import Figure, Report


def test_a_report_says_each_figure_and_its_condition() -> None:
    found = Report(
        name="pinning", device="cpu", machine="a machine", setup="a copy",
        figures={"copy": Figure(2.5, "as measured", "with large batches"), "training": Figure(None, "no GPU", "always")},
        head=["way", "ms"], rows=[["one", "1.5"]],
    )  # fmt: skip
    text = " ".join(found.text().split())
    assert "copy as measured with large batches training no GPU (not measured) always way ms one 1.5" in text
    assert found.as_dict()["figures"]["copy"] == {
        "value": 2.5,
        "here": "as measured",
        "condition": "with large batches",
    }
