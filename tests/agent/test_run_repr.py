"""What a run shows of itself where it is printed, and in a notebook."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from builders import free_port
from torch import nn
from whole_end import whole_end

import perfagent
from perfagent.run_repr import Shown


@pytest.fixture(autouse=True)
def no_run_left() -> Iterator[None]:
    yield
    perfagent.finish()


def test_a_run_tells_its_state_step_newest_loss_and_page() -> None:
    shown = Shown("mine", "running", 12, (11, 0.53125), "http://server:8420/run/mine")
    assert (
        shown.text()
        == "<perfagent run 'mine': running, step 12, loss 0.53125 (step 11) at http://server:8420/run/mine>"
    )
    assert (
        shown._replace(loss=(12, float("nan")))
        .text()
        .startswith("<perfagent run 'mine': running, step 12, loss nan at ")
    )


def test_a_rank_that_does_not_know_its_run_yet_shows_its_state() -> None:
    assert Shown("", "starting", None, None, None).text() == "<perfagent run: starting>"


def test_a_notebook_gets_a_link_and_no_markup_of_the_users() -> None:
    shown = Shown("<img src=x>", "running", None, None, 'http://server/run/"><script>')
    assert "<a href=" in shown.html()
    assert "<img" not in shown.html()
    assert "<script>" not in shown.html()


def test_a_training_shows_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole_end(monkeypatch)
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = perfagent.attach(model, optimizer, record=tmp_path / "record", name="mine")
    assert repr(run) == f"<perfagent run 'mine': starting, recorded in {tmp_path / 'record'}>"
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).pow(2).mean()
        loss.backward()
        optimizer.step()
    assert repr(run).startswith("<perfagent run 'mine': running, step 3")
    run.finish()
    assert (
        repr(run)
        == f"<perfagent run 'mine': finished, step 3, loss {loss.item():.6g}, recorded in {tmp_path / 'record'}>"
    )
    assert "<a " not in run._repr_html_()


def test_the_loss_that_is_shown_is_of_the_last_step_whatever_else_was_told_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_end(monkeypatch)
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = perfagent.attach(model, optimizer, record=tmp_path / "record", name="mine")
    for step in range(60):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).pow(2).mean()
        loss.backward()
        if step % 8 == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    run.finish()
    assert f": finished, step 60, loss {loss.item():.6g}, recorded" in repr(run)


def test_a_run_that_is_logged_by_hand_shows_its_page(tmp_path: Path) -> None:
    run = perfagent.init(server=f"http://127.0.0.1:{free_port()}", run_id="by-hand")
    run.log({"loss": 2.0}, step=7)
    run.finish("failed")
    assert repr(run) == f"<perfagent run 'by-hand': failed, step 7, loss 2 at {run.url}>"
    assert f'href="{run.url}"' in run._repr_html_()


def test_a_run_shows_its_last_completed_step_while_the_next_is_in_progress(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = perfagent.attach(model, optimizer, record=tmp_path / "record")
    for done in range(3):
        model(torch.ones(1, 2)).sum().backward()
        assert ("step" in repr(run)) is (done > 0)
        if done:
            assert f"step {done}" in repr(run)
        optimizer.step()
        assert f"step {done + 1}" in repr(run)


@pytest.mark.parametrize("start_step", [None, 500])
@pytest.mark.parametrize("step", [None, 0, 7])
def test_a_run_is_shown_as_running_from_its_first_log_on(
    tmp_path: Path, start_step: int | None, step: int | None
) -> None:
    run = perfagent.init(record=tmp_path / "record", start_step=start_step)
    assert ": starting" in repr(run)
    run.log({"score": 1.0}, step=step)
    assert ": running" in repr(run)
    assert ": running" in run._repr_html_()


def test_a_disabled_run_has_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERFAGENT_DISABLED", "1")
    run = perfagent.init(run_id="silent")
    assert run.url is None
    assert repr(run) == "<perfagent run 'silent': disabled>"
    assert "<a " not in run._repr_html_()


def test_a_forked_child_says_that_the_run_is_not_its_own(tmp_path: Path) -> None:
    run = perfagent.init(record=tmp_path / "record", name="mine")
    reads, writes = os.pipe()
    if not (child := os.fork()):
        os.write(writes, repr(run).encode())
        os._exit(0)
    os.close(writes)
    os.waitpid(child, 0)
    with os.fdopen(reads, "rb") as said:
        assert b"forked child" in said.read()
