"""What a run sends of the media that a script logs, and what it leaves out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from agent_recorded import Recording
from builders import until
from torch import nn
from whole_end import whole_end

import perfagent
from perfagent.media import outbox

GRAY = np.full((4, 4), 0.5)


@pytest.fixture(autouse=True)
def ended(monkeypatch):
    whole_end(monkeypatch)


def sent(folder) -> list[tuple[int, str, int, str]]:
    events = [event for _, events in Recording(folder).frames() for event in events if event.kind == "media"]
    named = [one for one in events if "name" in one.data]
    return [(one.step, one.data["name"], one.data["index"], one.data.get("caption", "")) for one in named]


def test_media_have_the_step_and_the_place_of_their_call(tmp_path):
    run = perfagent.attach(record=tmp_path)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 4):
        images = [perfagent.Image(GRAY, f"a {step}"), perfagent.Image(GRAY, "b")]
        run.log({"early" if step == 1 else "samples": images, "x": 1.0})
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    run.log({"named": perfagent.Histogram([1, 2])}, step=70)
    run.finish()
    assert sent(tmp_path) == [
        (1, "early", 0, "a 1"), (1, "early", 1, "b"), (1, "samples", 0, "a 2"), (1, "samples", 1, "b"), (2, "samples", 0, "a 3"),
        (2, "samples", 1, "b"), (70, "named", 0, ""),
    ]  # fmt: skip
    assert [step for step, _ in Recording(tmp_path).series("x")] == [1, 1, 2]


def test_what_cannot_be_sent_is_said_and_counted(tmp_path, caplog):
    run = perfagent.init(record=tmp_path)
    for _ in range(2):
        run.log({"drawing": perfagent.Image(b"<svg/>"), "loss": 1.0})
    run.log({"many": [perfagent.Image(GRAY)] * 103})
    run.finish()
    said = [record.getMessage() for record in caplog.records]
    assert sum("'drawing': perfagent.Image takes PNG" in one for one in said) == 1
    assert sum("'many' has 103 items" in one for one in said) == 1
    assert len(sent(tmp_path)) == 100
    assert Recording(tmp_path).events("media")[-1] == {"left_out": 5}
    assert [value for _, value in Recording(tmp_path).series("loss")] == [1.0, 1.0]


def test_a_few_images_wait_for_their_device_and_no_number(fakegpu, tmp_path, monkeypatch):
    monkeypatch.setattr(outbox, "WAITING_ITEMS", 5)
    run, image = perfagent.init(record=tmp_path), torch.ones(4, 4, device="fakegpu:0")
    with fakegpu.held():
        for step in range(9):
            run.log({"samples": perfagent.Image(image), "x": 1.0}, step=step)
        until(lambda: len(Recording(tmp_path).series("x")) == 9, why="numbers wait for the images")
        assert sent(tmp_path) == []
    run.finish()
    assert [step for step, *_ in sent(tmp_path)] == [0, 1, 2, 3, 4]
    assert max(one.get("left_out", 0) for one in Recording(tmp_path).events("media")) == 4


def test_a_run_that_logs_too_many_goes_on_with_fewer(tmp_path, monkeypatch):
    monkeypatch.setattr(outbox, "RUN_ITEMS", 4)
    run = perfagent.init(record=tmp_path)
    for _ in range(12):
        run.log({"samples": perfagent.Image(GRAY)})
    run.finish()
    assert [step for step, *_ in sent(tmp_path)] == [0, 1, 2, 3, 4, 6, 8, 10], "without torch each call is a step"
