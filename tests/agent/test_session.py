"""attach, init, log, alert, finish and what a run tells about itself."""

from __future__ import annotations

import argparse
import copy
import gc
import math
import pickle
import sys
from dataclasses import dataclass
from decimal import Decimal
from types import SimpleNamespace

import pytest
import torch
from agent.scripts import run_script
from agent_recorded import Recording
from torch import nn
from whole_end import whole_end

import perfagent
from perfagent import session
from perfagent.errors import ConfigError


def test_an_exit_code_other_than_0_is_a_failure(tmp_path, monkeypatch):
    whole_end(monkeypatch)
    perfagent.init("mine", config={"lr": 0.1}, record=tmp_path)
    for step in range(2):
        perfagent.log({"loss": step}, commit=False)
        perfagent.log({"accuracy": step})
    with pytest.raises(ConfigError, match="status"):
        perfagent.finish("perfect")
    perfagent.finish(exit_code=3)
    assert Recording(tmp_path).series("loss") == Recording(tmp_path).series("accuracy") == [(0, 0.0), (1, 1.0)]
    assert (
        Recording(tmp_path).events("state")[-1].items()
        >= {"state": "failed", "reason": {"key": "exit_code", "code": 3, "said": ""}}.items()
    )


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"model": "resnet"}, r"torch\.nn\.Module"),
        ({"model": [nn.Linear(1, 1)]}, r"torch\.nn\.Module"),
        ({"model": nn.Linear}, r"torch\.nn\.Module"),
        ({"optimizer": "adam"}, "optimizer"),
        ({"config": 3}, "config"),
        ({"tags": [1]}, "tags"),
        ({"name": ""}, "name"),
        ({"start_step": -1}, "start_step"),
        ({"start_step": True}, "start_step"),
        ({"server": "ftp://x"}, "http"),
        ({"record": 3}, "record"),
        ({"project": "a\nb"}, "project"),
        ({"project": ""}, "project"),
    ],
)
def test_wrong_argument_is_refused_at_once(options, word, tmp_path):
    """And a run that there is stays as it was."""
    with pytest.raises(ConfigError, match=word):
        perfagent.attach(**options)
    assert session.current() is None
    run = perfagent.init(record=tmp_path)
    with pytest.raises(ConfigError, match=word):
        perfagent.attach(**{"config": {"a": 1}} | options)
    assert session.current() is run
    assert run.config == {}


def test_a_second_attach_continues_a_run_of_no_other_name(tmp_path, monkeypatch):
    @dataclass
    class Options:
        lr: float = 0.1

    monkeypatch.chdir(tmp_path)
    first = perfagent.init(record=tmp_path / "a", config={"a": 1})
    again = perfagent.attach(nn.Linear(2, 1), config=argparse.Namespace(b=2), tags="x", record="a")
    assert perfagent.init(config=Options()) is again is first
    assert first.config == {"a": 1, "b": 2, "lr": 0.1}
    second = perfagent.init(record="b")
    assert (first.ended, second.ended) == (True, False)
    assert second.id != first.id
    server = "http://127.0.0.1:1"
    third = perfagent.attach(nn.Linear(2, 1), server=server)
    assert (second.ended, third.settings.record, third.settings.server) == (True, None, server)
    assert perfagent.init(server=server + "/") is perfagent.init() is third
    assert perfagent.init(record=tmp_path, name="another") is not third


def test_a_copy_of_what_holds_the_run_holds_the_same_run(tmp_path):
    """A trainer, a module, a dataset."""
    run = perfagent.init(record=tmp_path)
    for duplicate in (copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))):
        assert duplicate(SimpleNamespace(run=run, weights=[1.0])).run is run
    gc.collect()
    run.log({"x": 1.0}, step=1)
    perfagent.finish()
    assert Recording(tmp_path).series("x") == [(1, 1.0)]


def test_log_takes_numbers_of_all_kinds_and_raises_for_none(record):
    recorded = record()
    numpy = pytest.importorskip("numpy")
    weight = torch.tensor(2.0, requires_grad=True)
    recorded.run.log({"int": 1, "tensor": weight * 2, "one": torch.ones(1)})
    odd = {"decimal": Decimal("0.5"), "text": "no", "none": None, "matrix": torch.ones(2)}
    recorded.run.log({"numpy": numpy.float32(0.25), "nan": math.nan, **odd})
    recorded.run.log("not a dict")
    recorded.run.log([1, 2])
    recorded.run.log({"x": 1.0}, step="five")
    for level in ("WARN", "ERROR", "info"):
        recorded.run.alert("a", "text", level=level)
    recorded.finish()
    assert [data["level"] for data in recorded.events("alert")] == ["warning", "critical", "info"]
    (_, first), (_, second) = recorded.rows
    assert first == {"int": 1, "tensor": 4.0, "one": 1.0}
    assert second["numpy"] == 0.25
    assert math.isnan(second["nan"])
    assert second["matrix"] is torch.Tensor, "its type, left to the sender's check, which counts it and tells the first"
    assert recorded.sender.counters["refused_log_calls"] == 3


def test_a_with_block_ends_with_its_exception(record):
    recorded = record()
    with pytest.raises(torch.OutOfMemoryError), recorded.run:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    assert recorded.sender.ended["state"] == "oom"
    assert "Tried to allocate" in recorded.sender.ended["reason"]
    assert "test_session.py" in recorded.sender.ended["traceback"]


def test_a_run_tells_its_states_and_takes_its_hooks_out(record):
    def hooked():
        return torch.autograd.backward, torch.utils.data.dataloader._BaseDataLoaderIter.__next__

    before, model = hooked(), nn.Linear(2, 1)
    recorded = record(model)
    assert hooked()[0] is not before[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    recorded.run.finish("failed")
    states = [(data["state"], step) for kind, data, step in recorded.sender.events if kind == "state"]
    assert states == [("starting", None), ("running", 1)]
    assert recorded.sender.ended["state"] == "failed"
    assert hooked() == before


def test_a_hook_that_fails_is_counted_told_once_and_off(record, caplog):
    from perfagent.boundary import guard

    class Hostile(dict):
        def get(self, *_):
            raise RuntimeError("not today")

        keys = values = items = __iter__ = __getitem__ = get

    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    for _ in torch.utils.data.DataLoader([0, 1, 2], collate_fn=lambda _: Hostile(x=1)):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert len(recorded.of("loss")) == 3, "the other hooks go on"
    assert list(guard.failures.values()) == [1]
    assert sum("turned off" in message for message in caplog.messages) == 1
    guard.reset()
    caplog.clear()  # the traceback in it holds this frame, and the optimizer


# ---- whole processes


@pytest.mark.real
def test_torch_may_be_imported_after_init(tmp_path):
    done = run_script(
        tmp_path,
        """
        import signal, sys
        before = {s: signal.getsignal(s) for s in signal.valid_signals()}
        import perfagent
        run = perfagent.init()
        run.log({"x": 1})
        assert "torch" not in sys.modules
        import torch
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        run.finish()
        assert run.steps_done == 1
        assert {s: signal.getsignal(s) for s in signal.valid_signals()} == before
        """,
        fresh=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.real
def test_a_forked_child_is_silent_and_its_parent_goes_on(tmp_path):
    done = run_script(
        tmp_path,
        """
        import os, threading, torch, perfagent
        model = torch.nn.Linear(2, 1)
        run = perfagent.attach(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        def step():
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            perfagent.log({"x": 1.0})
        step()
        pid = os.fork()
        if pid == 0:
            step()
            perfagent.attach(model).log({"x": 2.0})
            perfagent.alert("child")
            perfagent.finish()
            os._exit(17 if run.steps_done == 1 and threading.active_count() == 1 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 17
        step()
        assert run.steps_done == 2
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("attach() records nothing in a child that was forked") == 1
    assert [state["state"] for state in Recording(tmp_path / "record").events("state")] == [
        "starting",
        "running",
        "finished",
    ]


def logged(recorded, name):
    return [(step, values[name]) for step, values in recorded.rows if name in values]


def test_each_log_is_a_step_where_parameters_are_updated_by_hand(record):
    """Of a loop that has no optimizer: the loss."""
    recorded, model, losses = record(), nn.Linear(4, 1), []
    for _ in range(6):
        loss = model(torch.ones(2, 4)).square().mean()
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
        losses.append(loss.item())
        recorded.run.log({"train_loss": losses[-1]})
    recorded.finish()
    assert logged(recorded, "train_loss") == list(enumerate(losses, 1))


@pytest.mark.parametrize("polls", [False, True])
def test_logs_between_micro_batches_belong_to_their_step(record, polls):
    """However long they last: there is an optimizer."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model, optimizer=optimizer)
    for step in range(2):
        for micro in range(4):
            model(torch.ones(2, 4)).mean().backward()
            recorded.run.log({"micro": 4 * step + micro})
            if polls:
                recorded.run._polling.settle_waiting()
        optimizer.step()
    recorded.finish()
    assert logged(recorded, "micro") == [(1 + number // 4, number) for number in range(8)]


@pytest.mark.parametrize(("notebook", "name"), [("/home/me/vision/Fine tuning.ipynb", "Fine tuning"), ("", "notebook")])
def test_a_run_in_a_notebook_has_the_notebooks_name(tmp_path, monkeypatch, notebook, name):
    monkeypatch.setattr(sys, "argv", ["/usr/lib/ipykernel_launcher.py"])  # the program of every Jupyter kernel
    monkeypatch.setenv("JPY_SESSION_NAME", notebook)
    run = perfagent.init(record=tmp_path)
    run.finish()
    told = next(event["name"] for event in Recording(tmp_path).events("state") if "name" in event)
    assert told == f"{name}-{run.id[:4]}"


def test_each_job_of_hydras_multirun_is_a_run(tmp_path, monkeypatch):
    """Its basic launcher does them one after the other in one process."""
    hydra = SimpleNamespace(HydraConfig=SimpleNamespace())  # as much of Hydra as there is to ask
    monkeypatch.setitem(sys.modules, "hydra.core.hydra_config", hydra)
    ids = []
    for job in ("???", 0, 0, 1, "???", 2):
        hydra.HydraConfig.get = lambda job=job: SimpleNamespace(job=SimpleNamespace(num=job))
        ids.append(perfagent.attach(record=tmp_path).id)
    before, first, again, second, between, third = ids
    assert before == first == again, "what was attached before the first job is its run"
    assert between == second, "what is attached after a job belongs to it"
    assert len({first, second, third}) == 3


@pytest.mark.parametrize("name", ["log_param", "log_metrics", "log_metric"])
def test_what_other_trackers_runs_have_is_answered_with_ours(name, tmp_path):
    run = perfagent.init(record=tmp_path / "record")
    with pytest.raises(AttributeError) as asked:
        getattr(run, name)
    with pytest.raises(AttributeError) as of_module:
        getattr(perfagent, name)
    assert str(asked.value).partition("; ")[2] == str(of_module.value).partition("; ")[2] != ""
    assert not hasattr(run, "_repr_png_")


def stepped(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("begin", [session.start_from_launcher, perfagent.init])
def test_attach_says_where_a_run_that_has_begun_goes_on(tmp_path, begin):
    run, model = begin(record=tmp_path), nn.Linear(3, 1)
    assert perfagent.attach(model, start_step=100) is run
    stepped(model)
    assert (run.start_step, run.steps_done) == (100, 100)
    perfagent.attach(start_step=7)
    assert run.steps_done == 100, "steps go on once one was made"


def test_another_training_without_a_name_continues_with_a_word(tmp_path, caplog):
    def told() -> int:
        return sum("finish()" in record.getMessage() and "name=" in record.getMessage() for record in caplog.records)

    first, generator = nn.Linear(3, 1), nn.Linear(3, 1)
    run = perfagent.attach(first, record=tmp_path)
    perfagent.attach(generator)  # of the same training: nothing was trained yet
    stepped(generator)
    perfagent.attach(nn.Sequential(generator))
    assert told() == 0
    for _ in range(2):
        model = nn.Linear(3, 1)
        assert perfagent.attach(model) is run
        stepped(model)
    assert told() == 1
    run.finish()
    assert perfagent.attach(nn.Linear(3, 1), record=tmp_path) is not run
    assert told() == 1


def test_attach_by_name_continues_the_run_of_its_training_only(tmp_path):
    model = nn.Linear(3, 1)
    run = perfagent.attach(model, name="same", record=tmp_path)
    stepped(model)
    for again in ({"model": nn.Sequential(model), "name": "same"}, {"model": nn.Linear(3, 1)}, {"name": "same"}):
        assert perfagent.attach(**again) is run
    model = nn.Linear(3, 1)
    other = perfagent.attach(model, name="same", record=tmp_path)
    assert other.id != run.id and other.name == run.name == "same"
