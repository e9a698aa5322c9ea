"""The file of `perfagent report` in a real browser: opened from the disk, without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from perfagent.wire import Alert, Finding, Latest, Quantiles, Series, StepWindow, Timing
from perfagent_client.models import RunDetails
from perfagent_client.report.facts import ReportFacts, ToldAlert
from perfagent_client.report.page import report_html

pytestmark = pytest.mark.browser

CORPUS = (
    "<script>hacked()</script>", "<img src=x onerror=hacked()>", '"><svg onload=hacked()>', "'><iframe src=javascript:hacked()>",
    "</style><script>hacked()</script>", "</title><script>hacked()</script>", "<!--<script>hacked()</script>", "{{ 7 * 7 }}",
    "&lt;script&gt;hacked()&lt;/script&gt;", '<a href="javascript:hacked()">x</a>', "<style>*{display:none}</style>",
    "<meta http-equiv=refresh content=0;url=//example.org>", "\u202e\x00\x1b[31m",
)  # fmt: skip


def facts(text: str) -> ReportFacts:
    """A run with the text in every field that a run, a rule or a person fills."""
    causes = [{"batch": {"hash": text}}]
    evidence = {"traceback": f"{text}\n{text}", "losses": [1.0, text], text: text, "causes": causes}
    finding = Finding(rule=text, severity="critical", message=text, title=text[:90], cause=text, cost=text, fix=text,
                      since_step=3, since=text, evidence=evidence, gain_pct=12.0)  # fmt: skip
    alert = Alert(id="a1", state="firing", run="r", rule=text, severity="warning", message=text, title=text, since=text,
                  since_step=30, acknowledged=text, acknowledged_by=text, note=text)  # fmt: skip
    run = RunDetails(
        run=text, project=text, name=text, state="failed", step=100, started="2026-01-01T00:00:00Z",
        updated="2026-01-01T00:01:00Z", reason=text, tags=[text], host=text, notes=text,
        config={text: text, "nested": {text: [text]}, "techniques": {text: {text: text}}},
        meta={"command": [text], "packages": {text: text}, "environment": {text: text}},
    )  # fmt: skip
    steps = list(range(1, 101))
    values = [2.0 - step / 100 for step in steps]
    columns = {"step": steps, "min": values, "max": values, "mean": values, "count": [1] * 100, "nonfinite": [0] * 100}
    charts = [Series(name=name, rank="all", unit=text, exact=True, **columns) for name in ("loss", text)]  # type: ignore[arg-type]
    quantiles = Quantiles(p50=0.1, p90=0.2, p99=0.3, mean=0.1, count=99)
    timing = Timing(
        from_step=1, to_step=100, series={"step_time_s": quantiles, "phase/data_s": quantiles, f"phase/{text}_s": quantiles},
        shares={}, phase_shares={"data": 0.6, text: 0.4}, window=StepWindow(from_step=1, to_step=100, steps=100),
    )  # fmt: skip
    return ReportFacts(
        run, finding, [finding], {"loss": Latest(value=1.0, step=100, time=0.0, rank=0)}, timing,
        [ToldAlert(alert, [{"time": text, "event": text, "who": text, "note": text}])], 1, charts,
        [{"rank": 0, "data": {"lines": [text]}}], [{"data": {"traceback": text}}], "http://127.0.0.1:8420/run/r", text,
    )  # fmt: skip


def opened(browser: Browser, file: Path, **look: Any) -> tuple[Page, list[str], list[str]]:
    """The page, what it asked for, and what it complained about."""
    page = browser.new_page(**look)
    asked: list[str] = []
    complaints: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.expose_function("hacked", lambda: complaints.append("a text was run"))
    page.goto(file.as_uri())
    return page, asked, complaints


def test_no_text_of_a_run_is_run_and_nothing_is_asked_for(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    everything = " ".join(CORPUS)
    for text in (everything, CORPUS[2], CORPUS[4]):
        file.write_text(report_html(facts(text)), "utf-8")
        page, asked, complaints = opened(browser, file)
        assert (complaints, asked) == ([], [file.as_uri()]), text
        assert page.locator("script, img, iframe, math").count() == 0
        shown = text.replace("\x00", "\ufffd").replace("\x1b", "\ufffd")
        assert page.locator("h1").text_content() == shown
        assert page.locator("pre").filter(has_text=shown.split()[0]).count() >= 3
        assert page.locator("figure svg").count() == 2
        page.close()


def test_the_file_forbids_scripts_by_itself(browser: Browser, tmp_path: Path) -> None:
    """Should a text get through one day, its policy is what is left."""
    file = tmp_path / "report.html"
    html = report_html(facts("x")).replace(
        "</main>", "<script>document.title = 'run'</script><img src='http://127.0.0.1:9/x'></main>"
    )
    file.write_text(html, "utf-8")
    page, _, complaints = opened(browser, file)
    assert page.title() != "run"
    assert sum("Content Security Policy" in text for text in complaints) >= 2
    page.close()


def test_it_reads_in_light_and_dark_on_a_phone_and_on_paper(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(report_html(facts("a_very_long_word_" * 20)), "utf-8")
    colors = set()
    for scheme in ("light", "dark"):
        page, *_ = opened(browser, file, viewport={"width": 390, "height": 900}, color_scheme=scheme)
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        colors.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert page.evaluate("getComputedStyle(document.querySelector('svg .line')).fill") == "none"
        height = "document.querySelector('details:not([open])').getBoundingClientRect().height"
        assert page.evaluate(height) < 40
        page.emulate_media(media="print")
        assert page.evaluate(height) > 80, "what is folded is printed"
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        page.close()
    assert len(colors) == 2
