"""Which time belongs to which phase. Naps stand for work; the agent's clock moves by them alone."""

from __future__ import annotations

import copy
import io
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from agent.hooks.loops import READINGS_S, about, nap, sgd
from torch import nn
from torch.utils.data import DataLoader, Dataset

DATA_S, FORWARD_S, OWN_S = 0.05, 0.07, 0.11
"""What a row takes to be made, a call of the model, and what else a loop does."""
X = torch.ones(2, 8)
pytestmark = pytest.mark.usefixtures("clock")


class Slow(Dataset):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        nap(DATA_S)
        return torch.ones(8)


class SlowForward(nn.Linear):
    def __init__(self):
        super().__init__(8, 1)

    def forward(self, x):
        nap(FORWARD_S)
        return super().forward(x)


class WithLoss(SlowForward):
    def forward(self, x):
        return {"loss": super().forward(x).square().mean()}


def loss_of(out):
    return out["loss"] if isinstance(out, dict) else out.square().mean()


def step(model, optimizer, x=X, *, before_forward=0.0, after_forward=0.0):
    nap(before_forward)
    loss = loss_of(model(x))
    nap(after_forward)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def start(record, model=None):
    model = model or SlowForward()
    return record(model), model, sgd(model)


def assert_phases(recorded, first=2, **expected):
    """From step `first` on each step has these phases, as long as these; None for one that there is not. They add up to
    the step."""
    steps = [(number, values) for number, values in recorded.steps() if number >= first]
    assert steps
    for number, values in steps:
        phases = {name: seconds for name, seconds in values.items() if name.startswith("phase/")}
        for name, seconds in expected.items():
            told = phases.get(f"phase/{name}_s")
            assert (told is None) if seconds is None else about(told, seconds), (number, name, told)
        if number > 1:
            assert min(phases.values()) >= 0
            assert sum(phases.values()) == pytest.approx(values["step_time_s"])


# ---- data, forward and the rest


def test_a_loader_that_sleeps_is_data_wait(record):
    recorded, model, optimizer = start(record)
    for x in DataLoader(Slow(8), batch_size=2):
        step(model, optimizer, x)
    assert_phases(recorded, first=1, data=2 * DATA_S)
    assert_phases(recorded, forward=FORWARD_S, other=0.0)


@pytest.mark.parametrize(("model", "forward"), [(SlowForward, FORWARD_S + OWN_S), (WithLoss, FORWARD_S)])
def test_what_follows_the_call_is_forward_until_there_is_a_loss(record, model, forward):
    recorded, model, optimizer = start(record, model())
    for _ in range(3):
        step(model, optimizer, after_forward=OWN_S)
    assert_phases(recorded, forward=forward)


# ---- batches that a script names


def batches(record_run, count, ending=0.0):
    def rows():
        for _ in range(count):
            nap(DATA_S)
            yield torch.ones(5, 8)
        nap(ending)

    return record_run.batches(rows())


@pytest.mark.parametrize("named", [False, True], ids=["plain", "a phase by name"])
def test_batches_of_an_evaluation_are_none_of_the_training(record, named):
    """Of a generator the next one often has the id, and nobody but its end says that it is over."""
    recorded, model, optimizer = start(record, nn.Linear(8, 1))
    for _ in range(2):
        for x in batches(recorded.run, 2, ending=OWN_S):
            step(model, optimizer, x)
        with torch.no_grad(), recorded.run.phase("eval") if named else nullcontext():
            for x in batches(recorded.run, 5):
                model(x)
    third = dict(recorded.steps())[3]
    assert about(third["phase/data_s"], OWN_S, DATA_S)
    assert about(third["phase/eval_s"], 5 * DATA_S)
    assert third["phase/other_s"] <= READINGS_S
    assert recorded.consumed()[3] == 5


def test_tokens_without_a_loader_are_those_of_the_models_call(record):
    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(10, 4), nn.Linear(4, 10)

        def forward(self, ids, targets):
            return nn.functional.cross_entropy(self.head(self.table(ids)).flatten(0, 1), targets.flatten())

    recorded, model, optimizer = start(record, Language())
    ids = torch.zeros(4, 16, dtype=torch.long)
    for _ in range(3):
        model(ids, ids).backward()
        optimizer.step()
    assert (recorded.consumed(), recorded.consumed("tokens")) == ({2: 4, 3: 4}, {2: 64, 3: 64})


# ---- phases that a script names


def test_a_named_phase_is_an_event_and_no_other(record):
    recorded, model, optimizer = start(record)
    for _ in range(3):
        step(model, optimizer)
        with recorded.run.phase("checkpoint"):
            nap(OWN_S)
    assert_phases(recorded, checkpoint=OWN_S, other=0.0)
    events = [data for kind, data, _ in recorded.sender.events if kind == "phase"]
    assert recorded.phases() == [("checkpoint", 1), ("checkpoint", 2), ("checkpoint", 3)]
    assert all(about(data["duration_s"], OWN_S) for data in events)


def test_a_phase_of_another_thread_is_in_no_step(record):
    recorded, model, optimizer = start(record)

    def save():
        for name in ("checkpoint", "upload"):
            with recorded.run.phase(name):
                yield  # to the training thread, which goes on meanwhile

    with ThreadPoolExecutor(1) as saver:
        saving = save()
        for number, x in enumerate(DataLoader(Slow(12), batch_size=2)):
            if number in (2, 3, 4):
                saver.submit(next, saving, None).result()
            step(model, optimizer, x)
    assert_phases(recorded, data=2 * DATA_S, forward=FORWARD_S, checkpoint=None, upload=None)
    assert {name for name, _ in recorded.phases()} == {"checkpoint", "upload"}


def test_of_phases_in_each_other_each_has_its_own_time(record):
    recorded, model, optimizer = start(record)
    loader = iter(DataLoader(Slow(3), batch_size=1))
    for _ in range(3):
        with recorded.run.phase("outer"):
            x = next(loader)
            nap(OWN_S)
        out = model(x)
        with recorded.run.phase("outer"):
            with recorded.run.phase("inner"):
                nap(2 * OWN_S)
            nap(OWN_S)
        out.square().mean().backward()
        optimizer.step()
    assert_phases(recorded, data=DATA_S, outer=2 * OWN_S, inner=2 * OWN_S, forward=FORWARD_S)


# ---- the model and the optimizer are the script's


def test_a_watched_model_is_copied_pickled_and_freed_without_us(record):
    model = nn.Linear(8, 1)
    recorded, _, optimizer = start(record, model)
    for _ in range(3):
        step(model, optimizer)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert other.__dict__.get("_compiled_call_impl") is None
        assert torch.equal(other(X), model(X))
    alive = weakref.ref(model)
    del model, other, optimizer, _
    assert alive() is None, "the agent keeps the model alive"
    recorded.finish()


def test_the_optimizers_phase_is_the_whole_call(record):
    class Wrapped(torch.optim.SGD):
        def step(self, closure=None):
            nap(OWN_S)
            super().step(closure)
            nap(OWN_S)

    model = nn.Linear(8, 1)
    optimizer = Wrapped(model.parameters(), lr=0.1)
    before = Wrapped.__dict__.get("step"), torch.optim.SGD.step
    recorded = record(model)
    for _ in range(4):
        step(model, optimizer)
    assert_phases(recorded, optimizer=2 * OWN_S)
    assert (Wrapped.__dict__.get("step"), torch.optim.SGD.step) == before
