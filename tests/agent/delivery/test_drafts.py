"""Drafts: what a tick writes down as it was noted, and what another process reads of it."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import textwrap

import pytest
from builders import job_environment

from perfagent.decode.step_blocks import StepPacker, Steps, count
from perfagent.decode.step_decoder import StepReader
from perfagent.delivery.columns import Columns
from perfagent.delivery.drafts import Draft, is_pressing, left_behind, read
from perfagent.delivery.spool import Header, Spool
from perfagent.step.row import Note
from perfagent.step.trace import BACKWARD, BACKWARD_END, DATA, FORWARD, OPTIMIZER, OPTIMIZER_END, trace_of

MS = 1_000_000


def note(step: int, loss: float = 0.5, **changes: object) -> Note:
    """A step of 10 ms: 1 data, 3 forward, 4 backward, 1 optimizer, 1 anything else."""
    began = 100 * MS + 10 * MS * step
    entries = [
        (DATA, began, began + MS, 7, (32, None, False)),
        (FORWARD, began + MS, None, True, None),
        (BACKWARD, began + 4 * MS, None, loss, False),
        (BACKWARD_END, began + 8 * MS, None),
        (OPTIMIZER, began + 8 * MS, None),
        (OPTIMIZER_END, began + 9 * MS, None),
    ]
    last = began - MS
    return Note(step, 1000.0 + step, last, 1, 0.1, None, 0, trace_of(entries), None)._replace(**changes)


def drafted(*notes: Note) -> Draft:
    return Draft(StepReader().context(), [*notes])


def header() -> Header:
    return Header(source="s", project="p", rank=0, server=None, run="r", attempt=1)


def values(groups: list[object]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for group in groups:
        for name in group.values:
            found.setdefault(name, []).extend(group.column(name))
    return found


def test_a_draft_that_a_dead_process_left_is_read_as_it_would_have_been_itself(tmp_path):
    user = (4, 1004.0, 2.0, {"accuracy": 0.5, "epoch": 1})
    rows = [
        note(1),
        note(2, math.nan),
        note(3, rare={"grad/norm": 2.5}),
        user,
        (4, 1004.0, 2.0, ("host/cpu_pct",), [12.0]),
    ]
    draft = Draft(StepReader().context(), rows)
    spool = Spool(tmp_path / "s", header())
    assert spool.draft(draft, now=0.0)
    spool.abandon()  # gone without a word
    outgoing = Spool.open(tmp_path / "s").next()
    assert outgoing is not None
    found = values(outgoing.groups)
    assert repr(found) == repr(values(left_behind([draft])))
    assert found["phase/forward_s"] == pytest.approx([0.003] * 3)
    assert found["phase/data_s"] == pytest.approx([0.001] * 3)
    assert found["samples_per_s"] == pytest.approx([3200.0] * 3)
    assert math.isnan(found["loss"][1]) or math.isnan(sum(found["loss"]))
    assert (found["grad/norm"], found["accuracy"], found["epoch"], found["host/cpu_pct"]) == (
        [2.5],
        [0.5],
        [1.0],
        [12.0],
    )


def test_drafts_and_columns_keep_their_order_in_one_frame(tmp_path):
    spool = Spool(tmp_path / "s", header())
    spool.draft(drafted(note(1), note(2)), now=0.0)
    spool.draft(drafted(note(3)), now=0.2)
    outgoing = spool.next()
    assert outgoing is not None
    assert [step for group in outgoing.groups for step in group.steps()] == [1, 2, 3]
    spool.ack(outgoing.seq)
    assert spool.next() is None


def test_what_was_sent_before_a_kill_keeps_its_number_and_the_rest_gets_the_next(tmp_path):
    spool = Spool(tmp_path / "s", header())
    spool.draft(drafted(note(1)), now=0.0)
    first = spool.next()
    spool.draft(drafted(note(2)), now=0.2)
    spool.abandon()
    again = Spool.open(tmp_path / "s")
    resent = again.next()
    assert resent is not None
    assert first is not None
    assert (resent.seq, values(resent.groups)) == (first.seq, values(first.groups))
    again.ack(resent.seq)
    rest = again.next()
    assert rest is not None
    assert rest.seq == first.seq + 1
    assert [step for group in rest.groups for step in group.steps()] == [2]


def packed(steps: range) -> Steps:
    rows: list[Steps] = []
    packer = StepPacker()
    packer.add(note(0), [])  # by the first of a kind it learns what they share
    for step in steps:
        packer.add(note(step), rows)
    packer.take(rows)
    (block,) = rows
    assert count(block) == len(steps)
    return block


def test_a_step_alone_and_those_packed_behind_it_are_all_read():
    groups = left_behind([Draft(StepReader().context(), [note(1, rare={"grad/norm": 2.5}), packed(range(2, 8))])])
    assert sorted(step for group in groups if "loss" in group.values for step in group.steps()) == [*range(1, 8)]


def test_of_packed_steps_a_damaged_block_costs_itself_and_each_of_its_steps_is_told():
    lost: list[object] = []
    before, between, after = (packed(range(first, first + 5)) for first in (1, 6, 11))
    damaged = between._replace(data=between.data[:-1])
    groups = read([Draft([], [before, damaged, after])], StepReader(), Columns(), lost.append)
    assert sorted(step for group in groups for step in group.steps()) == [*range(1, 6), *range(11, 16)]
    assert len(lost) == count(damaged) > 1


def test_each_draft_of_a_dead_process_is_read_with_what_was_known_when_it_was_noted():
    """That the user logs the loss under steps of an own count, so that ours is left out."""
    told, ours = StepReader(), StepReader()
    told.loss_by_user = True
    drafts = [Draft(ours.context(), [note(1)]), Draft(told.context(), [note(2)])]
    assert [step for group in left_behind(drafts) if "loss" in group.values for step in group.steps()] == [1]


def test_what_is_no_plain_data_is_refused_and_leaves_nothing(tmp_path):
    spool = Spool(tmp_path / "s", header())
    with pytest.raises(OverflowError):
        spool.draft(Draft(StepReader().context(), [(1, 0.0, 0.0, {"large": 2**70})]), now=0.0)
    assert not spool.has_pending


@pytest.mark.parametrize(
    "row",
    [
        note(1, math.nan, rare={}),  # what is not finite makes a step unusual (hooks/test_backward.py)
        note(1, -math.inf, rare={}),
        note(1, rare={"grad/norm": math.inf}),
        note(1, rare={"grad/nonfinite": 3.0}),
        (1, 0.0, 0.0, {"loss": math.nan, "x": 1}),
        (1, 0.0, 0.0, {"train/loss": math.inf, 3: math.nan}),
        (1, 0.0, 0.0, ("grad/nonfinite",), [1.0]),
    ],
)
def test_a_bad_loss_or_gradient_does_not_wait_for_the_next_frame(row):
    assert is_pressing(row)


@pytest.mark.parametrize(
    "row",
    [
        note(1),
        note(1, rare={"grad/nonfinite": 0.0}),
        (1, 0.0, 0.0, {"accuracy": math.nan}),
        (1, 0.0, 0.0, {"val/loss": math.inf, 3: math.nan}),
    ],
)
def test_everything_else_does(row):
    assert not is_pressing(row)


KILLED = """
    import os, sys, threading, time, torch, perfagent
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = perfagent.attach(model, optimizer)
    for _ in range(200):
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log({"mine": loss.item()})
        print(loss.item(), flush=True)
        time.sleep(0.002)
    written, collector = threading.Event(), run._sender._dispatch()._collector
    run._sender.add_source(lambda: collector.waits or written.set())  # what an earlier tick took, it wrote
    written.wait(60)
    os.kill(os.getpid(), 9)
"""


def test_a_killed_job_left_every_step_that_it_noted(tmp_path):
    """Losses to the last digit, from a folder that only drafts were written to in the end."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(KILLED), encoding="utf-8")
    environment = job_environment(
        tmp_path, PERFAGENT_SERVER="http://127.0.0.1:9", XDG_STATE_HOME=str(tmp_path / "state")
    )
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    (folder,) = {path.parent for path in (tmp_path / "state").rglob("*.ticks")}
    spool = Spool.open(folder)
    losses: dict[int, float] = {}
    mine: dict[int, float] = {}
    while (outgoing := spool.next()) is not None:
        for group in outgoing.groups:
            for into, name in ((losses, "loss"), (mine, "mine")):
                if name in group.values:
                    into.update(zip(group.steps(), group.column(name), strict=True))
        spool.ack(outgoing.seq)
    printed = {step: float(line) for step, line in enumerate(done.stdout.split(), start=1)}
    assert losses == printed
    assert mine == printed


LOGGING = """
    import gc, threading, time, perfagent
    run = perfagent.init(project="p")
    values = {f"value{i}": float(i) for i in range(10)}
    collections = []

    def seen(phase, info):
        if phase == "start" and threading.current_thread() is threading.main_thread():
            collections.append(info["generation"])

    for step in range(4500):
        if step == 1500:  # imports are over
            gc.callbacks.append(seen)
        run.log(values, step)
        time.sleep(0.001)
    print(len(collections))
"""


def test_what_a_loop_logs_does_not_make_the_garbage_collector_run_in_it(tmp_path):
    """3000 calls are 6000 objects; kept until a frame is cut, they would begin eight collections, of any size."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(LOGGING), encoding="utf-8")
    environment = job_environment(
        tmp_path, PERFAGENT_SERVER="http://127.0.0.1:9", XDG_STATE_HOME=str(tmp_path / "state")
    )
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert int(done.stdout) <= 2


def test_what_an_older_agent_left_is_read() -> None:
    reader = StepReader()
    reader.restore([True, None, False, 1.5])
    assert (reader.account.embedded, reader.epoch, reader.account.micro_batches) == (True, 1.5, 0.0)
    reader.restore([True, None, False, 1.5, 4.0])
    assert reader.account.micro_batches == 4.0
