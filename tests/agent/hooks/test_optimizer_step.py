"""Where a step begins and ends, and whose steps count."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from agent.hooks.loops import sgd, small, train
from torch import nn
from torch.utils.data import DataLoader


def rates(recorded):
    return [values["lr"] for _, values in recorded.steps()]


@pytest.mark.parametrize("start_step", [None, 101])
def test_step_n_is_the_nth_optimizer_step(record, start_step):
    model, first = small(), start_step or 1
    recorded = record(model, start_step=start_step)
    losses = train(model, sgd(model), 5)
    steps = recorded.steps()
    assert [number for number, _ in steps] == [*range(first, first + 5)]
    assert [(values["lr"], values["loss"]) for _, values in steps] == [(0.1, loss) for loss in losses]
    assert "step_time_s" not in steps[0][1], "nothing says when the first step began"
    assert all(values["step_time_s"] > 0 for _, values in steps[1:])


def test_an_optimizer_over_but_not_collected_never_counts(record):
    """A loop left by an exception, a notebook cell run anew: the optimizer hangs in a cycle until the collector
    runs."""
    forgotten = sgd(nn.Linear(64, 64), lr=0.3)
    forgotten.cycle = forgotten
    del forgotten
    recorded, model = record(), small()
    train(model, sgd(model), 3)
    assert rates(recorded) == [0.1] * 3


@pytest.mark.parametrize("named", [False, True])
def test_the_next_model_of_a_process_is_watched_like_the_first(record, named):
    """The folds of a cross-validation, the trials of a search: each with a model and an optimizer of its own."""
    recorded = record()
    for _ in range(3):
        model = small()
        optimizer = sgd(model)
        if named:
            recorded.run.take_up(model, optimizer, {}, [])
        train(model, optimizer, 4)
        del model, optimizer
    steps = recorded.steps()
    assert [number for number, _ in steps] == list(range(1, 13))
    missing = [number for number, values in steps if "phase/forward_s" not in values]
    assert missing == ([1] if named else [1, 5, 9]), "of a model that was not named, the first step finds it"
    borders = [data["training_after"] for _, data, _ in recorded.sender.events if "training_after" in data]
    assert borders == [4, 8], "rules compare no model with the one before"


@pytest.mark.parametrize("is_restored", [True, False])
def test_a_training_resumed_in_its_process_is_the_same_training(record, is_restored):
    recorded, state = record(), None
    for _ in range(2):
        model = small()
        optimizer = torch.optim.Adam(model.parameters())
        if state is not None and is_restored:
            optimizer.load_state_dict(state)
        train(model, optimizer, 70)
        state = optimizer.state_dict()
        del model, optimizer
    borders = [data["training_after"] for _, data, _ in recorded.sender.events if "training_after" in data]
    assert borders == ([] if is_restored else [70])
    assert "phase/forward_s" in recorded.steps()[-1][1], "the new model is watched either way"


def test_optimizers_that_come_and_go_are_timed_and_freed(record):
    """A scheduler puts a `step` of its own on each; a dead one's id is given again."""
    model = small()
    record(model)
    for _ in range(12):
        optimizer = sgd(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        train(model, optimizer, 3, after=scheduler.step)
        assert hasattr(optimizer.step, "__wrapped__")
        dropped = weakref.ref(optimizer)
        del optimizer, scheduler
        gc.collect()
        assert dropped() is None


def test_a_rate_is_told_as_it_is_whatever_its_type(record):
    model = small()
    recorded = record(model)
    for rate in (1, torch.tensor(0.5)):
        train(model, sgd(model, lr=rate), 3)
    assert rates(recorded) == [1.0] * 3 + [0.5] * 3
    assert set(map(type, rates(recorded))) == {float}


@pytest.mark.parametrize("rate", [[0.1, 0.2], torch.tensor([0.1, 0.2]), lambda epoch: 0.1])
def test_a_step_whose_rate_is_no_number_counts(record, rate):
    class OfItsOwn(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                parameter -= 0.1 * parameter.grad

    model = small()
    optimizer, recorded = OfItsOwn(model.parameters(), lr=0.1), record(model)
    optimizer.param_groups[0]["lr"] = rate
    losses = train(model, optimizer, 3)
    assert recorded.series("loss") == dict(enumerate(losses, 1))
    assert not recorded.of("lr")


def test_an_optimizer_with_a_number_in_its_state_counts(record):
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            self.state["rounds"] = 1

    recorded = record()
    for _ in range(3):
        model = small()
        train(model, Counting(model.parameters(), lr=0.1), 3)
        del model
    assert rates(recorded) == [0.1] * 9


# ---- log() and the step in progress


def test_a_log_is_of_the_step_before_until_a_forward_pass(record):
    model = small()
    recorded, optimizer = record(model), sgd(model)
    for index in range(3):
        loss = model(torch.randn(4, 8)).square().mean()
        recorded.run.log({"before": index})
        loss.backward()
        recorded.run.log({"between": index})
        optimizer.step()
        recorded.run.log({"after": index})
    assert recorded.of("between") == recorded.of("after") == [(1, 0), (2, 1), (3, 2)]
    assert recorded.series("before")[3] == 2, "the root's forward pass opens the step"
    assert recorded.of("before")[0] == (1, 0), "before the very first step, too"


@pytest.mark.parametrize("loads", [False, True])
def test_a_process_that_never_steps_counts_its_logs_from_zero(record, loads):
    recorded = record()
    for index, _ in enumerate(DataLoader(torch.randn(6, 2), batch_size=2) if loads else range(3)):
        recorded.run.log({"score": index})
    assert recorded.of("score") == [(0, 0), (1, 1), (2, 2)]


@pytest.mark.parametrize("loads", [False, True], ids=["at once", "once it is known that nothing steps"])
def test_a_call_without_a_commit_is_of_the_step_of_the_next(record, loads):
    recorded = record()
    if loads:
        next(iter(DataLoader(torch.randn(6, 2))))
    for index in range(3):
        recorded.run.log({"score": index}, commit=False)
        recorded.run.log({"rate": index}, commit=False)
        recorded.run.log({"best": index}, commit=index != 1 or None)
    for name in ("score", "rate", "best"):
        assert recorded.of(name) == [(0, 0), (1, 1), (2, 2)]


# ---- threads


def on_a_thread(function, *arguments):
    thread = threading.Thread(target=function, args=arguments)
    thread.start()
    thread.join()


@pytest.mark.parametrize("told", ["model and optimizer", "model", "nothing"])
def test_a_training_on_another_thread_than_attach_is_seen(record, told):
    model = small()
    optimizer = sgd(model)
    recorded = record(None if told == "nothing" else model, optimizer=optimizer if "optimizer" in told else None)
    on_a_thread(train, model, optimizer, 3)
    assert rates(recorded) == [0.1] * 3
    assert recorded.numbers("loss") == [1, 2, 3]


def test_steps_of_threads_that_take_turns_are_all_counted(record):
    model = small()
    optimizer = sgd(model)
    recorded = record(model, optimizer=optimizer)
    for _ in range(3):
        on_a_thread(train, model, optimizer, 1)
        train(model, optimizer, 1)
    assert rates(recorded) == [0.1] * 6


def test_an_optimizer_that_raised_at_first_counts_no_more(record):
    class Raises(torch.optim.SGD):
        def step(self, closure=None):
            raise MemoryError

    recorded, model = record(), small()
    optimizer = Raises(model.parameters(), lr=0.3)
    try:
        train(model, optimizer)
    except MemoryError:
        del optimizer
    train(model, sgd(model), 3)
    assert rates(recorded) == [0.1] * 3
