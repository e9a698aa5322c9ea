"""Which time belongs to which phase. Naps stand for work; the agent's clock moves by them alone."""

from __future__ import annotations

import copy
import importlib
import io
import time
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

LONG_S = 0.05
READINGS_S = 0.001  # what reading the clock adds to a phase
napped: list[float] = []
sleep = time.sleep


@pytest.fixture(autouse=True)
def awake(clock):
    global sleep
    sleep = clock.sleep
    napped.clear()


def nap(seconds: float) -> None:
    sleep(seconds)
    napped.append(seconds)


def about(seconds: float, *naps: float) -> bool:
    return sum(naps) - 1e-6 <= seconds <= sum(naps) + READINGS_S


class Slow(Dataset):
    def __init__(self, length: int, seconds: float) -> None:
        self.length, self.seconds = length, seconds

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        nap(self.seconds)
        return torch.ones(8)


class SlowForward(nn.Linear):
    def forward(self, x):
        nap(LONG_S)
        return super().forward(x)


class WithLoss(SlowForward):
    def forward(self, x):
        return {"loss": super().forward(x).square().mean()}


def step(model, optimizer, x, *, after_forward=0.0, before_forward=0.0):
    nap(before_forward)
    out = model(x)
    loss = out["loss"] if isinstance(out, dict) else out.square().mean()
    nap(after_forward)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_loader_that_sleeps_is_data_wait(record):
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    for x in DataLoader(Slow(8, LONG_S), batch_size=2):
        step(model, optimizer, x)
    waits = recorded.of("phase/data_s")
    assert [number for number, _ in waits] == [1, 2, 3, 4]
    naps = iter([seconds for seconds in napped if seconds >= LONG_S])
    for _, seconds in waits:
        own = next(naps) + next(naps)
        assert own <= seconds <= 1.05 * own + 0.001


def test_without_a_loader_there_is_no_data_series_and_own_batching_is_other(record):
    model = SlowForward(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    for _ in range(4):
        step(model, optimizer, torch.ones(2, 8), before_forward=LONG_S)
    for number, values in recorded.steps():
        assert "phase/data_s" not in values
        before, forward, _ = napped[3 * number - 3 : 3 * number]
        if number == 1:
            assert "phase/forward_s" not in values, "the root's hook goes on after the first step"
            continue
        assert about(values["phase/forward_s"], forward)
        assert about(values["phase/other_s"], before)


def test_a_loss_computed_outside_the_model_is_forward(record):
    model = SlowForward(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    for _ in range(3):
        step(model, optimizer, torch.ones(2, 8), after_forward=LONG_S)
    for number, seconds in recorded.of("phase/forward_s"):
        assert about(seconds, *napped[3 * number - 2 : 3 * number])


@pytest.mark.parametrize("uses", [True, False])
def test_the_forward_pass_goes_on_where_the_loss_that_a_model_returns_is_not_the_one_trained_on(record, uses):
    """Preference optimization: the model returns a language model's loss, and the loop compares with a reference."""

    class Returning(nn.Linear):
        def forward(self, x):
            output = super().forward(x)
            return {"loss": output.square().mean(), "logits": output}

    model = Returning(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    for _ in range(10):
        output = model(torch.ones(4, 8))
        sleep(0.02)
        loss = (output["loss"] + output["logits"].abs().mean()) / 2 if uses else output["logits"].abs().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    forward = [values["phase/forward_s"] for step, values in recorded.steps() if step > 4]
    assert len(forward) == 6
    assert all((seconds < 0.02) == uses for seconds in forward)


def _penalized(model, inputs):
    loss = model(inputs)["loss"]
    for _ in range(60):  # one for each parameter of a larger model
        for parameter in model.parameters():
            loss = loss + 1e-4 * parameter.abs().sum()
    sleep(LONG_S)
    loss.backward()


def _two_by_two(model, inputs):
    losses = [model(inputs)["loss"] for _ in range(2)]
    sleep(LONG_S)
    for loss in losses:
        loss.backward()


def _together(model, inputs):
    losses = [model(inputs)["loss"] for _ in range(2)]
    sleep(LONG_S)
    torch.autograd.backward(losses)


@pytest.mark.parametrize("backward", [_penalized, _two_by_two, _together])
def test_a_returned_loss_is_trained_on_however_the_loop_goes_on_from_it(record, backward):
    model = WithLoss(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    for _ in range(8):
        backward(model, torch.ones(2, 8))
        optimizer.step()
        optimizer.zero_grad()
    forward = sorted(seconds for number, seconds in recorded.of("phase/forward_s") if number > 4)
    assert len(forward) == 4
    assert forward[1] < 2 * sorted(napped)[len(napped) // 2] + LONG_S / 2


def test_batching_between_a_model_that_returns_its_loss_and_backward_is_not_forward(record):
    model = WithLoss(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    for _ in range(3):
        step(model, optimizer, torch.ones(2, 8), after_forward=LONG_S)
    for number, seconds in recorded.of("phase/forward_s"):
        assert about(seconds, napped[3 * number - 2])


def test_evaluation_between_steps_is_not_forward(record):
    model = SlowForward(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    for _ in range(3):
        model.eval()
        model(torch.ones(2, 8))  # without no_grad, as some do
        with torch.no_grad():
            model(torch.ones(2, 8))
        model.train()
        step(model, optimizer, torch.ones(2, 8))
    forward = recorded.of("phase/forward_s")
    assert [number for number, _ in forward] == [2, 3]
    for number, seconds in forward:
        _, _, _, training, _ = napped[5 * number - 5 : 5 * number]
        assert about(seconds, training)


def test_micro_steps_add_up(record):
    model = SlowForward(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    loader = iter(DataLoader(Slow(12, LONG_S / 2), batch_size=1))
    for _ in range(4):
        for _ in range(3):
            (model(next(loader)).square().mean() / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    for number, values in recorded.steps():
        naps = napped[6 * number - 6 : 6 * number]
        assert about(values["phase/data_s"], *naps[0::2])
        if number > 1:
            assert about(values["phase/forward_s"], *naps[1::2])
            assert values["phase/other_s"] <= READINGS_S
            assert abs(values["samples_per_s"] * values["step_time_s"] - 3) < 1e-6


def test_batches_times_any_iterable(record):
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)

    def batches():
        for _ in range(3):
            nap(LONG_S)
            yield torch.ones(5, 8)

    for x in recorded.run.batches(batches()):
        step(model, optimizer, x)
    steps = recorded.steps()
    assert all(about(values["phase/data_s"], napped[3 * number - 3]) for number, values in steps)
    assert abs(steps[1][1]["samples_per_s"] * steps[1][1]["step_time_s"] - 5) < 1e-6


@pytest.mark.parametrize("named", [False, True], ids=["plain", "a phase by name"])
def test_batches_of_an_evaluation_are_none_of_the_training(record, named):
    """Of a generator the next one often has the id, and nobody but its end says that it is over."""
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)

    def batches(count, ending=0.0):
        for _ in range(count):
            nap(LONG_S)
            yield torch.ones(5, 8)
        nap(ending)

    for _ in range(2):
        for x in recorded.run.batches(batches(2, ending=LONG_S)):
            step(model, optimizer, x)
        with torch.no_grad(), recorded.run.phase("eval") if named else nullcontext():
            for x in recorded.run.batches(batches(5)):
                model(x)
    third = dict(recorded.steps())[3]
    ending, *of_evaluation, wait = [seconds for seconds in napped if seconds >= LONG_S][2:9]
    assert about(third["phase/data_s"], ending, wait)
    assert about(third["phase/eval_s"], *of_evaluation)
    assert third["phase/other_s"] <= READINGS_S
    assert abs(third["samples_per_s"] * third["step_time_s"] - 5) < 1e-6


def test_a_named_phase_is_an_event_and_no_other(record):
    model = SlowForward(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    for _ in range(3):
        step(model, optimizer, torch.ones(2, 8))
        with recorded.run.phase("checkpoint"):
            nap(LONG_S)
    phases = recorded.of("phase/checkpoint_s")
    assert [number for number, _ in phases] == [2, 3]
    assert all(about(seconds, napped[4 * number - 5]) for number, seconds in phases)
    assert all(seconds < READINGS_S for _, seconds in recorded.of("phase/other_s"))
    events = [data for kind, data, _ in recorded.sender.events if kind == "phase"]
    assert [data["begin_step"] for data in events] == [1, 2, 3]
    assert all(data["name"] == "checkpoint" and data["duration_s"] >= LONG_S for data in events)


def adds_up(values) -> bool:
    phases = [seconds for name, seconds in values.items() if name.startswith("phase/")]
    return min(phases) >= 0 and abs(sum(phases) - values["step_time_s"]) < 1e-6


@pytest.mark.parametrize("kind", [SlowForward, WithLoss])
@pytest.mark.parametrize("within", ["the call", "the call and backward", "two micro-steps"])
def test_a_named_phase_around_the_step_s_own_passes_is_what_is_left_of_it(record, kind, within):
    model = kind(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)

    def loss():
        nap(LONG_S)
        out = model(torch.ones(2, 8))
        return out["loss"] if isinstance(out, dict) else out.square().mean()

    micro_steps = 1 + (within == "two micro-steps")
    for _ in range(3):
        with recorded.run.phase("mine"):
            for _ in range(micro_steps):
                found = loss()
                if within != "the call":
                    found.backward()
        if within == "the call":
            found.backward()
        optimizer.step()
        optimizer.zero_grad()
    for number, values in recorded.steps()[1:]:
        naps = napped[2 * micro_steps * (number - 1) : 2 * micro_steps * number]
        assert about(values["phase/mine_s"], *naps[::2])
        assert about(values["phase/forward_s"], *naps[1::2])
        assert adds_up(values)


def test_of_phases_in_each_other_each_has_its_own_time(record):
    model = SlowForward(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    loader = iter(DataLoader(Slow(3, LONG_S), batch_size=1))
    for _ in range(3):
        with recorded.run.phase("outer"):
            x = next(loader)
            nap(LONG_S)
        out = model(x)
        with recorded.run.phase("outer"):
            with recorded.run.phase("inner"):
                nap(2 * LONG_S)
            nap(LONG_S)
        out.square().mean().backward()
        optimizer.step()
    for number, values in recorded.steps()[1:]:
        fetched, before, called, inner, after = napped[5 * number - 5 : 5 * number]
        assert about(values["phase/data_s"], fetched)
        assert about(values["phase/outer_s"], before, after)
        assert about(values["phase/forward_s"], called)
        assert about(values["phase/inner_s"], inner)
        assert adds_up(values)


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("graded", [False, True], ids=["a teacher", "a discriminator"])
@pytest.mark.parametrize("root_too", [False, True], ids=["alone", "beside the root"])
def test_another_model_in_a_named_phase_leaves_no_time_below_zero(record, graded, root_too):
    importlib.import_module("perfagent.signals.compiled")  # as the sender's thread does
    model, other = SlowForward(8, 1), SlowForward(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model, optimizer=optimizer)
    for _ in range(6):
        with recorded.run.phase("mine"):
            nap(LONG_S)
            with torch.set_grad_enabled(graded):
                loss = other(torch.ones(2, 8)).mean()
            if root_too:
                loss = loss + model(torch.ones(2, 8)).mean()
        if graded and not root_too:
            loss.backward()
        if not root_too:
            loss = model(torch.ones(2, 8)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for number, values in recorded.steps()[4:]:
        before, called, own = napped[3 * number - 3 : 3 * number]
        assert adds_up(values)
        if graded or root_too:
            assert about(values["phase/mine_s"], before)
            assert about(values["phase/forward_s"], called, own)
        else:
            assert about(values["phase/mine_s"], before, called)
            assert about(values["phase/forward_s"], own)


def test_evaluation_loaders_and_forwards_inside_a_phase_stay_in_it(record):
    model = SlowForward(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    train = iter(DataLoader(Slow(3, 0.0), batch_size=1))
    for _ in range(3):
        with recorded.run.phase("eval"):
            for x in DataLoader(Slow(1, LONG_S), batch_size=1):
                model(x)
        step(model, optimizer, next(train))
    for number, values in recorded.steps():
        fetched, evaluated, _, _, forward, _ = napped[6 * number - 6 : 6 * number]
        assert values["phase/data_s"] < READINGS_S
        assert about(values["phase/eval_s"], fetched, evaluated)
        assert number == 1 or about(values["phase/forward_s"], forward)


def test_a_prefetching_thread_is_no_wait_of_the_stepping_thread(record):
    import queue
    import threading

    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    ready: queue.Queue = queue.Queue()
    fetching = threading.Thread(target=lambda: [ready.put(x) for x in DataLoader(Slow(3, LONG_S), batch_size=1)])
    fetching.start()
    for _ in range(3):
        step(model, optimizer, ready.get())
    fetching.join()
    assert not recorded.of("phase/data_s")


def test_the_end_of_an_epoch_does_not_open_the_next_step(record):
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    for epoch in range(2):
        for x in DataLoader(torch.ones(4, 8), batch_size=2):
            step(model, optimizer, x)
        recorded.run.log({"epoch_score": epoch})
    assert recorded.of("epoch_score") == [(2, 0), (4, 1)]


def test_tokens_come_from_what_the_model_is_called_with_where_there_is_no_loader(record):
    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(10, 4), nn.Linear(4, 10)

        def forward(self, ids, targets):
            return nn.functional.cross_entropy(self.head(self.table(ids)).flatten(0, 1), targets.flatten())

    model = Language()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    for _ in range(3):
        model(torch.zeros(4, 16, dtype=torch.long), torch.zeros(4, 16, dtype=torch.long)).backward()
        optimizer.step()
    for number, values in recorded.steps():
        if number > 1:
            assert round(values["samples_per_s"] * values["step_time_s"]) == 4
            assert round(values["tokens_per_s"] * values["step_time_s"]) == 64


def test_the_model_is_found_from_the_optimizer(record):
    model = SlowForward(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record()
    for _ in range(3):
        step(model, optimizer, torch.ones(2, 8))
    assert len(recorded.of("phase/forward_s")) == 2


def test_a_watched_model_can_be_copied_and_pickled_without_us(record):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = record(model)
    for _ in range(3):
        model(torch.ones(4, 2)).mean().backward()
        optimizer.step()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert "_compiled_call_impl" not in other.__dict__ or other.__dict__["_compiled_call_impl"] is None
        assert torch.equal(other(torch.ones(1, 2)), model(torch.ones(1, 2)))
    before = model.weight.detach().clone()
    parts, kept = weakref.ref(model), model.state_dict()
    del model, other, optimizer
    assert parts() is None, "the agent keeps the model alive"
    assert torch.equal(kept["weight"], before)
    run.finish()


@pytest.mark.filterwarnings("error", "ignore:`torch.jit.trace:DeprecationWarning")
def test_a_watched_model_may_be_traced_between_steps_and_that_is_no_call_of_the_training(record):
    model = SlowForward(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    for _ in range(4):
        step(model, optimizer, torch.ones(2, 8))
        traced = torch.jit.trace(model, torch.ones(5, 8))
    assert torch.equal(traced(torch.ones(3, 8)), model(torch.ones(3, 8)))
    for number, values in recorded.steps():
        if number > 1:
            assert round(values["samples_per_s"] * values["step_time_s"]) == 2
            assert values["phase/forward_s"] < 2 * LONG_S + READINGS_S
            assert values["phase/other_s"] > LONG_S


@pytest.mark.parametrize("clears", ["optimizer", "model"])
def test_clearing_the_gradients_before_backward_is_not_forward(record, monkeypatch, clears):
    class SlowToClear(nn.Parameter):
        """Its gradient takes a nap to be cleared."""

        def __setattr__(self, name, value):
            if name == "grad" and value is None:
                nap(LONG_S)
            super().__setattr__(name, value)

    model = SlowForward(8, 1)
    model.bias = SlowToClear(model.bias.detach())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    seen = []
    for _ in range(3):
        napped.clear()
        loss = model(torch.ones(2, 8)).square().mean()
        (optimizer if clears == "optimizer" else model).zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(list(napped))
    for number, seconds in recorded.of("phase/forward_s"):
        forward, *clearing = seen[number - 1]
        assert clearing, "the gradients were not cleared"
        assert about(seconds, forward)


def test_the_optimizer_phase_is_the_whole_call_and_its_class_is_given_back(record):
    class Wrapped(torch.optim.SGD):
        def step(self, closure=None):
            nap(LONG_S)
            super().step(closure)
            nap(LONG_S)

    model = nn.Linear(8, 1)
    optimizer = Wrapped(model.parameters(), lr=0.1)
    before = Wrapped.__dict__.get("step"), torch.optim.SGD.step
    recorded = record(model)
    for _ in range(4):
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
    measured = dict(recorded.of("phase/optimizer_s"))
    assert all(about(measured[number], LONG_S, LONG_S) for number in (2, 3, 4))
    recorded.run.finish()
    assert (Wrapped.__dict__.get("step"), torch.optim.SGD.step) == before


def test_a_scheduler_made_before_or_after_attach_counts_its_steps_without_complaint(record, recwarn):
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    early = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    recorded = record(model)
    late = None
    for _ in range(6):
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        early.step()
        late = late or torch.optim.lr_scheduler.ConstantLR(optimizer)
        late.step()
    assert [number for number, _ in recorded.of("loss")] == [1, 2, 3, 4, 5, 6]
    assert not [warning for warning in recwarn if "lr_scheduler" in str(warning.message)]


def test_optimizers_that_step_inside_of_the_backward_pass_end_the_step_there(record):
    """One for each parameter, called when its gradient is there, as torchtune has it to save the gradients' memory."""
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def update(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    handles = [parameter.register_post_accumulate_grad_hook(update) for parameter in model.parameters()]
    run = record(model)
    for _ in range(5):
        nap(LONG_S)
        model(torch.ones(4, 8)).square().mean().backward()
    for handle in handles:
        handle.remove()  # a cycle that no collector sees: the optimizers would live on beside those of later tests
    steps = run.steps()
    assert [number for number, _ in steps] == [1, 2, 3, 4, 5]
    for _, values in steps[1:]:
        phases = {name: seconds for name, seconds in values.items() if name.startswith("phase/")}
        assert 0 < phases["phase/backward_s"] < LONG_S
        assert phases["phase/other_s"] >= 0.999 * LONG_S
        assert sum(phases.values()) == pytest.approx(values["step_time_s"], rel=1e-3)
