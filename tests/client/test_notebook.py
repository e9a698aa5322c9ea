"""What runs, findings and comparisons show in a notebook."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_builders import Listening, frame, listening
from builders import job_environment, until

from perfagent.wire import Finding, Series
from perfagent.wire.notebook_html import card, curves_html, link
from perfagent_client import Client

pytestmark = pytest.mark.real

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listening]:
    with listening(tmp_path_factory.mktemp("notebook")) as running:
        sick = [2.0 / step if step < 40 else math.nan for step in range(1, 60)]
        running.take(frame({"loss": sick, "step_time_s": [0.1] * 59}, run="a", name=HOSTILE))
        running.take(frame({"loss": [1.0, 2.0, 1.5], "step_time_s": [0.1] * 3}, run="b", name="other"))
        yield running


def test_run_shows_its_verdict_and_curves(server: Listening) -> None:
    with Client(server.url) as client:
        until(lambda: client.verdict("a").rule == "nonfinite_loss", why="the NaN was not judged")
        html = client.run("a")._repr_html_()
        assert "nonfinite_loss" in html and "<details><summary>Evidence" in html
        assert html.count("<svg") == 2 and f'href="{server.url}/run/a"' in html
        assert "<img" not in html and "&lt;img" in html
        compared = client.compare(["a", "b"])
        html = compared._repr_html_()
        assert html.count('fill="none"') == 2 and "<th>run</th>" in html and "<img" not in html
        assert compared["sides"][1]["name"] == "other", "it is the answer itself"


def test_card_escapes_and_has_no_color_of_text() -> None:
    finding = Finding(
        rule=HOSTILE, severity="warning", message=HOSTILE, fix=HOSTILE, evidence={HOSTILE: HOSTILE, "wait_s": 0.25}
    )
    html = card(link(HOSTILE, 'https://x/"><script>'), [HOSTILE], finding._repr_html_())
    assert "<img" not in html and "<script" not in html
    assert "250 ms" in html
    assert not re.search(r'style="[^"]*(?<!-)\b(color:(?!inherit)|background)', html), (
        "light and dark are the notebook's"
    )
    assert "href" not in link("x", "javascript:alert(1)")


@pytest.mark.parametrize("mean", [[], [math.nan], [1.0], [-1.7e308, 1.7e308], [1.0, math.nan, 2.0, 2.0]])
def test_small_curve_of_any_values_has_finite_coordinates(mean: list[float]) -> None:
    count = [1] * len(mean)
    series = Series(
        name="loss", rank=0, unit="", exact=True, step=list(range(len(mean))), min=mean, max=mean, mean=mean, count=count,
        nonfinite=count,
    )  # fmt: skip
    html = curves_html("loss", [series, series], ["a", "b"])
    assert "nan" not in html and "inf" not in html
    assert html.count("v-4") == (2 * len(mean) if html else 0), "marks of values that are not finite"
    assert bool(html) == any(map(math.isfinite, mean))


TRAINING = """
import time, torch, perfagent
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run = perfagent.attach(model, optimizer, name="mine")
"""
STEPS = """
for step in range(200):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).pow(2).mean().backward()
    optimizer.step()
    time.sleep(0.01)
run.finish()
time.sleep(1.5)
"""


def test_shown_run_moves_while_a_cell_below_trains(
    server: Listening, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    for name, value in job_environment(tmp_path, PERFAGENT_SERVER=server.url).items():
        monkeypatch.setenv(name, value)
    reader = "from perfagent_client import Client\nclient = Client()\nclient.show('other', every_s=0.2)"
    cells = [nbformat.v4.new_code_cell(source) for source in (TRAINING, "run.show(every_s=0.2)", reader, STEPS, "run")]
    done = nbclient.NotebookClient(nbformat.v4.new_notebook(cells=cells), timeout=120, kernel_name="python3").execute()

    def shown(at: int) -> str:
        [output] = done.cells[at].outputs
        data: dict[str, Any] = output["data"]
        return str(data["text/html"])

    assert ": finished, step 200" in shown(1), "it was shown at step 0"
    assert "<svg" in shown(1) and f'href="{server.url}/run/' in shown(1)
    assert "other" in shown(2) and "<svg" in shown(4)
