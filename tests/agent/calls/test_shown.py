"""What a run shows of itself where it is printed, and in a notebook."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from whole_end import whole_end

import perfagent
from perfagent.calls.shown import Shown


def test_shown_run_has_its_newest_loss_and_no_foreign_markup() -> None:
    shown = Shown("<img src=x>", "running", 12, (12, float("nan")), 'http://server/run/"><script>')
    assert "running, step 12, loss nan at http://server/run" in shown.text()
    assert "<a href=" in shown.html()
    assert "<img" not in shown.html() and "<script>" not in shown.html()
    assert Shown("", "starting", None, None, None).text() == "<perfagent run: starting>"


def test_training_shows_its_last_completed_step_and_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole_end(monkeypatch)
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = perfagent.attach(model, optimizer, record=tmp_path / "record", name="mine")
    assert repr(run) == f"<perfagent run 'mine': starting, recorded in {tmp_path / 'record'}>"
    for step in range(60):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).pow(2).mean()
        loss.backward()
        assert f"step {step + 1}" not in repr(run)
        if step % 8 == 0:  # told of other steps than the loss
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert f"running, step {step + 1}" in repr(run)
    run.finish()
    where = f"recorded in {tmp_path / 'record'}"
    assert repr(run) == f"<perfagent run 'mine': finished, step 60, loss {loss.item():.6g}, {where}>"
    assert "<a " not in run._repr_html_()
    run.show()
    assert "<perfagent run 'mine': finished" in capsys.readouterr().out, "outside of a notebook it is printed"


def test_disabled_run_does_nothing_and_has_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERFAGENT_DISABLED", "1")
    run = perfagent.attach(nn.Linear(2, 1), run_id="silent", record=tmp_path / "record")
    run.log({"x": 1})
    run.alert("x")
    run.finish()
    assert (run.url, run.verdict()) == (None, None)
    assert repr(run) == "<perfagent run 'silent': disabled>"
    assert not (tmp_path / "record").exists()
