"""What trainers and scripts log by other means than ours: every scalar of it is in the run, exactly, once, at its
step."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
from agent.frameworks.running import logged_once, trained
from agent_recorded import Recording
from judging import make_evaluator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from perfagent.wire import loss_kind, metric
from perfagent_server.store.codec.tail import TailGroup
from perfagent_server.store.stored import FromTail

SCRIPTS = Path(__file__).with_name("scripts")
pytestmark = pytest.mark.real


def is_logged(name: str) -> bool:
    """Whether a script has logged it: it is none of the agent's own."""
    return metric(name).meaning.startswith("logged by") and not name.startswith("phase/")


@pytest.mark.parametrize(
    ("script", "part"),
    [
        ("trainer.py", "alone"), ("trainer.py", "forwarding"), ("lightning_module.py", "none"),
        ("lightning_module.py", "two"), ("lightning_module.py", "testing"), ("lightning_module.py", "fabric"),
        ("loops.py", "accelerate"), ("loops.py", "writer"), ("loops.py", "untrained"),
        ("loops.py", "spoken"),
    ],
)  # fmt: skip
def test_every_logged_scalar_is_in_the_run_once_at_its_step(script, part):
    recording, names = logged_once(trained(SCRIPTS / script) / part)
    assert {name for name in recording.names() if is_logged(name)} <= names
    steps = [step for step, _ in recording.series("loss")]
    assert steps == sorted(set(steps)), "measured or logged, and never both"


@pytest.mark.parametrize("part", ["alone", "forwarding"])
def test_what_the_trainer_evaluates_stands_beside_the_loss(part):
    recording = Recording(trained(SCRIPTS / "trainer.py") / part / "record")
    assert [step for step, _ in recording.series("eval/loss")] == [4, 8, 10], "and at the end"
    assert [step for step, _ in recording.series("loss")] == [*range(1, 11)]
    assert [step for step, _ in recording.series("train/epoch")] == [2, 4, 6, 8, 10], "an evaluation repeats the epoch"


def test_what_is_logged_stays_out_where_that_is_wanted():
    recording = Recording(trained(SCRIPTS / "trainer.py") / "off" / "record")
    assert [step for step, _ in recording.series("loss")] == [*range(1, 11)]
    assert not {name for name in recording.names() if is_logged(name)}


def test_a_measured_loss_is_not_the_one_that_a_writer_logs():
    folder = trained(SCRIPTS / "loops.py") / "writer"
    recording = Recording(folder / "record")
    measured, copied = recording.series("loss"), recording.series("logged/loss")
    assert [step for step, _ in measured] == [*range(1, 9)]
    assert measured == copied
    assert loss_kind("logged/loss") == loss_kind("logged/train/loss") == ""
    [events] = (folder / "mirror").iterdir()  # our own files hold nothing twice although a writer is watched
    assert [event.step for event in EventAccumulator(str(events)).Reload().Scalars("score")] == [*range(1, 9)]


def test_a_loss_that_breaks_is_one_alert_however_often_logged():
    recording = Recording(trained(SCRIPTS / "loops.py") / "nan" / "record")
    assert [step for step, value in recording.series("train/loss") if math.isnan(value)] == [39]
    assert [step for step, value in recording.series("logged/loss") if math.isnan(value)] == [39]
    evaluator = make_evaluator()
    changes = []
    for number, (groups, events) in enumerate(recording.frames(), 1):
        held = [TailGroup.of_group(group) for group in groups]
        changes += evaluator.take(FromTail(number, "r", 1, 0, "s", number, time.time(), held, events))
    alerts = [one for one in changes if one.kind in ("fire", "reopen") and one.finding.rule == "nonfinite_loss"]
    assert [(alert.finding.evidence["series"], alert.finding.since_step) for alert in alerts] == [("loss", 40)]
