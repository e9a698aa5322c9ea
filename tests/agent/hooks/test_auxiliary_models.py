"""Models that are called beside the one that is watched: a teacher, a discriminator, the other tower of two."""

from __future__ import annotations

import copy
import statistics
import sys
import time
import types

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import perfagent.signals.compiled  # as the sender's thread does

pytestmark = pytest.mark.usefixtures("nothing_compiled")

CALL = "_compiled_call_impl"
NAP_S = 0.02
HOOKS = (nn.modules.module._global_forward_pre_hooks, nn.modules.module._global_forward_hooks)


class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(NAP_S)
        return super().forward(x)


def student():
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))


def train(record, step, model, steps=8, *, before=lambda number: None):
    """before: called with the number of each step, before it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    recorded = record(model, optimizer=optimizer)
    for number in range(1, steps + 1):
        before(number)
        optimizer.zero_grad()
        step().backward()
        optimizer.step()
    return recorded


def told(recorded, name):
    return {number: values[name] for number, values in recorded.rows if name in values}


def is_watched(module):
    return module.__dict__.get(CALL) is not None


def duel(model, judge, judges):
    """A discriminator's turn, in which the generator is not called, and then the generator's."""

    def step():
        judge(torch.ones(2, 4)).mean().backward()
        judges.step()
        return model(torch.ones(2, 4)).square().mean()

    return step


def distill(model, teacher):
    def step():
        x = torch.ones(2, 4)
        with torch.no_grad():
            wanted = teacher(x)
        return (model(x) - wanted).square().mean()

    return step


def test_a_teachers_answer_is_part_of_the_forward_pass(record):
    model, teacher = student(), Slow(4, 4).eval()
    recorded = train(record, distill(model, teacher), model)
    recorded.finish()
    forward, other = told(recorded, "phase/forward_s"), told(recorded, "phase/other_s")
    assert min(forward[step] for step in range(4, 9)) >= NAP_S, "seen in the third step, counted from the fourth on"
    assert statistics.median(other[step] for step in range(4, 9)) < NAP_S
    assert not told(recorded, "phase/eval_s"), "what each step does is no evaluation"


def test_it_counts_once_where_the_student_is_called_first(record):
    model, teacher = student(), Slow(4, 4).eval()

    def step():
        x = torch.ones(2, 4)
        said = model(x)
        with torch.no_grad():
            wanted = teacher(x)
        return (said - wanted).square().mean()

    recorded = train(record, step, model)
    recorded.finish()
    forward = told(recorded, "phase/forward_s").values()
    assert min(forward) >= NAP_S
    assert statistics.median(forward) < 2 * NAP_S


def test_another_model_with_gradients_begins_the_forward_pass(record):
    model, tower = student(), Slow(4, 4)
    recorded = train(record, lambda: (tower(torch.ones(2, 4)) @ model(torch.ones(2, 4)).T).mean(), model)
    recorded.finish()
    forward, rates = told(recorded, "phase/forward_s"), told(recorded, "samples_per_s")
    assert min(forward[step] for step in range(4, 9)) >= NAP_S
    assert set(range(4, 9)) <= set(rates), "the batch is still that of the root"


def test_a_pass_of_the_other_model_alone_is_one_too(record):
    model, judge = student(), Slow(4, 1)
    judges = torch.optim.SGD(judge.parameters(), lr=0.01)

    recorded = train(record, duel(model, judge, judges), model)
    recorded.finish()
    forward = told(recorded, "phase/forward_s")
    assert min(forward[step] for step in range(4, 9)) >= NAP_S


def test_the_steps_of_another_optimizer_are_timed_from_outside(record):
    model, judge = student(), nn.Linear(4, 1)
    judges = torch.optim.Adam(judge.parameters(), lr=0.01)
    inner = judges.step

    def slow():
        time.sleep(NAP_S)  # before torch's hooks are called
        inner()

    judges.step = slow

    recorded = train(record, duel(model, judge, judges), model)
    recorded.finish()
    optimizer = told(recorded, "phase/optimizer_s")
    assert min(optimizer[step] for step in range(4, 9)) >= NAP_S
    assert judges.step is slow, "as it was before"


def test_one_that_joins_late_is_found_when_it_is_looked_again(record):
    model, teacher = student(), Slow(4, 4).eval()
    distilled = distill(model, teacher)
    plain = lambda: model(torch.ones(2, 4)).square().mean()  # noqa: E731
    late = iter([plain] * 5 + [distilled] * 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    recorded = record(model, optimizer=optimizer)
    for number in range(10):
        if number == 5:
            assert not is_watched(teacher)
            recorded.run._watching._looked = recorded.run._watching._due = 0.0
            recorded.run._watching.poll()
        next(late)().backward()
        optimizer.step()
    assert is_watched(teacher)
    recorded.finish()
    forward = told(recorded, "phase/forward_s")
    assert min(forward[step] for step in (9, 10)) >= NAP_S
    assert not told(recorded, "phase/eval_s")


def test_nothing_of_it_stays_behind(record):
    model, teacher = student(), nn.Linear(4, 4).eval()
    step, optimizer = distill(model, teacher), torch.optim.SGD(model.parameters(), lr=0.01)
    before = [dict(hooks) for hooks in HOOKS]
    recorded = record(model, optimizer=optimizer)
    looked = []
    for _ in range(4):
        step().backward()
        looked.append(any(len(hooks) > len(were) for hooks, were in zip(HOOKS, before, strict=True)))
        optimizer.step()
    assert looked == [False, False, True, False]
    assert [dict(hooks) for hooks in HOOKS] == before
    assert is_watched(teacher)
    assert not is_watched(copy.deepcopy(teacher))
    recorded.finish()
    assert not is_watched(teacher)


def test_a_run_that_ends_while_it_looks_takes_the_hooks_along(record):
    model, teacher = student(), nn.Linear(4, 4).eval()
    before = [dict(hooks) for hooks in HOOKS]
    train(record, distill(model, teacher), model, steps=2).finish()
    assert [dict(hooks) for hooks in HOOKS] == before


def test_only_models_with_parameters_of_their_own_are_watched(record):
    model = student()
    loss, whole = nn.MSELoss(), nn.Sequential(model, nn.Linear(4, 4))
    tied = nn.Module()
    tied.forward = lambda x: x
    tied.weight = model[1].bias

    def step():
        x = torch.ones(2, 4)
        return loss(whole(x), x) + model(x).mean() + tied(x).mean()

    train(record, step, model, steps=5)
    assert not any(map(is_watched, (loss, whole, tied)))


def test_one_that_fails_in_the_step_that_is_looked_at_hides_no_other(record):
    model, teacher = student(), nn.Linear(4, 4).eval()
    distilled = distill(model, teacher)

    def step():
        with pytest.raises(RuntimeError):
            nn.Sequential(nn.Linear(3, 3))(torch.ones(2, 4))
        return distilled()

    train(record, step, model, steps=4)
    assert is_watched(teacher)


def test_a_process_that_compiles_is_left_alone(record, monkeypatch):
    monkeypatch.setattr(perfagent.signals.compiled, "compiled", lambda: True)
    model, teacher = student(), nn.Linear(4, 4).eval()
    train(record, distill(model, teacher), model, steps=5)
    assert not is_watched(teacher)


def test_results_are_the_same_to_the_last_bit(record):
    def run(watch):
        torch.manual_seed(0)
        model, teacher = student(), nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        recorded = record(model, optimizer=optimizer) if watch else None
        losses = []
        for _ in range(8):
            x = torch.randn(2, 3, 4)
            with torch.no_grad():
                wanted = teacher(x)
            loss = (model(x) - wanted).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if recorded is not None:
            recorded.finish()
        return losses

    assert run(watch=True) == run(watch=False)


def test_it_waits_while_what_can_tell_of_compiling_is_being_imported(record, monkeypatch):
    """Another thread imports it: it is in `sys.modules` before it holds anything."""
    monkeypatch.setitem(sys.modules, "perfagent.signals.compiled", types.ModuleType("half of it"))
    model, teacher = student(), nn.Linear(4, 4).eval()
    step, optimizer = distill(model, teacher), torch.optim.SGD(model.parameters(), lr=0.01)
    record(model, optimizer=optimizer)
    for number in range(8):
        if number == 5:
            assert not is_watched(teacher)
            monkeypatch.setitem(sys.modules, "perfagent.signals.compiled", perfagent.signals.compiled)
        step().backward()
        optimizer.step()
    assert is_watched(teacher)


# evaluations, logs, waits and phases beside such models ---------------------------------------------------------------


def loop(record, model, step, steps, **more):
    recorded = train(record, step, model, steps, **more)
    recorded.finish()
    return recorded


@torch.no_grad()
def evaluate(*models, calls=20, sleep=time.sleep):
    for _ in range(calls):
        for model in models:
            sleep(0.002)
            model(torch.ones(2, 4))


@pytest.mark.parametrize("both", [True, False], ids=["student and teacher", "teacher alone"])
def test_an_evaluation_with_the_teacher_is_one_and_no_forward_pass(clock, record, both):
    model, teacher = student(), nn.Linear(4, 4)

    def before(number):
        assert is_watched(teacher) == (number > 3)
        if number in (6, 11):
            model.eval()
            evaluate(*([teacher, model] if both else [teacher]), sleep=clock.sleep)
            model.train()

    recorded = loop(record, model, distill(model, teacher), 12, before=before)
    evaluations, forward = told(recorded, "phase/eval_s"), told(recorded, "phase/forward_s")
    assert list(evaluations) == [6, 11]
    assert min(evaluations.values()) >= 0.035
    assert all(forward[step] < evaluations[step] / 2 for step in evaluations)


def test_a_validation_that_asks_the_teacher_ends_where_its_loader_does(record):
    """What the first step of the next epoch asks of it, and its batch, are that step's."""
    model, teacher = student(), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    recorded = record(model, optimizer=optimizer)
    for _ in range(4):
        for x in DataLoader(torch.ones(10, 4), batch_size=2):
            with torch.no_grad():
                wanted = teacher(x)
            (model(x) - wanted).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            for x in DataLoader(torch.ones(12, 4), batch_size=2):
                (model(x) - teacher(x)).square().mean()
        model.train()
    recorded.finish()
    samples = {
        step: round(rate * told(recorded, "step_time_s")[step])
        for step, rate in told(recorded, "samples_per_s").items()
    }
    assert samples == dict.fromkeys(range(2, 21), 2)
    assert list(told(recorded, "phase/eval_s")) == [6, 11, 16, 20]


@pytest.mark.parametrize("at", [2, 3, 4])
def test_an_evaluation_in_training_mode_is_found_at_the_very_beginning(record, at):
    model = student()
    recorded = loop(
        record,
        model,
        lambda: model(torch.ones(2, 4)).square().mean(),
        8,
        before=lambda number: evaluate(model) if number == at else None,
    )
    assert list(told(recorded, "phase/eval_s")) == [at]


def test_a_rollout_in_every_step_is_no_evaluation(record):
    model = student()
    recorded = loop(
        record, model, lambda: model(torch.ones(2, 4)).square().mean(), 8, before=lambda _: evaluate(model, calls=10)
    )
    assert set(told(recorded, "phase/eval_s")) <= {2}, "only while it is not known that every step has one"
    assert min(list(told(recorded, "phase/forward_s").values())[2:]) > 0.0


def test_one_that_is_evaluated_with_gradients_in_the_other_mode_is_evaluated(clock, record):
    model, judge = student(), nn.Linear(4, 4)

    def before(number):
        if number == 6:
            judge.eval()
            for _ in range(10):
                clock.sleep(0.002)
                judge(torch.ones(2, 4))
            judge.train()

    recorded = loop(record, model, lambda: (judge(torch.ones(2, 4)) * model(torch.ones(2, 4))).mean(), 8, before=before)
    evaluations = told(recorded, "phase/eval_s")
    assert list(evaluations) == [6]
    assert told(recorded, "phase/forward_s")[6] < evaluations[6] / 2


def test_a_log_behind_a_call_belongs_to_the_step_before(record):
    model, metric = student(), nn.Linear(4, 1).requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    recorded = record(model, optimizer=optimizer)
    for number in range(1, 9):
        model(torch.ones(2, 4)).mean().backward()
        optimizer.step()
        metric(torch.ones(2, 4))
        recorded.run.log({"number": float(number)})
        time.sleep(NAP_S)
    recorded.finish()
    assert told(recorded, "number") == {number: float(number) for number in range(1, 9)}
    assert statistics.median(told(recorded, "phase/forward_s").values()) < NAP_S, (
        "a metric is no beginning of a forward pass"
    )


def test_many_calls_without_gradients_do_not_hide_one_with_them(record):
    model, actor, critic = student(), nn.Linear(4, 4), Slow(4, 1)

    def step():
        with torch.no_grad():
            for _ in range(100):
                actor(torch.ones(2, 4))
        return critic(torch.ones(2, 4)).mean() + 0.0 * model(torch.ones(2, 4)).mean()

    recorded = loop(record, model, step, 8)
    assert min(told(recorded, "phase/forward_s")[number] for number in range(4, 9)) >= NAP_S


def test_what_lies_in_a_phase_or_in_another_call_counts_once(record):
    model, members = student(), [Slow(4, 4) for _ in range(2)]
    ensemble = nn.ModuleList(members)
    ensemble.forward = lambda x: sum(member(x) for member in members)
    recorded_run = []

    def step():
        with torch.no_grad():
            ensemble(torch.ones(2, 4))
            members[0](torch.ones(2, 4))
            with recorded_run[0].phase("rollout"):
                members[1](torch.ones(2, 4))
        return model(torch.ones(2, 4)).mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    recorded = record(model, optimizer=optimizer)
    recorded_run.append(recorded.run)
    for _ in range(8):
        step().backward()
        optimizer.step()
    recorded.finish()
    forward, rollout = told(recorded, "phase/forward_s"), told(recorded, "phase/rollout_s")
    for phase, naps in ((forward, 2), (rollout, 1)):
        seconds = [phase[number] for number in range(4, 9)]
        assert min(seconds) >= naps * NAP_S
        assert statistics.median(seconds) < (naps + 1) * NAP_S


def test_an_encoder_in_the_dataset_is_data(record):
    model, encoder = student(), Slow(4, 4)

    class Encoded(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            with torch.no_grad():
                return encoder(torch.ones(4))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    recorded = record(model, optimizer=optimizer)
    for x in torch.utils.data.DataLoader(Encoded(), batch_size=1):
        model(x).mean().backward()
        optimizer.step()
    recorded.finish()
    assert statistics.median(told(recorded, "phase/forward_s").values()) < NAP_S
    assert min(told(recorded, "phase/data_s").values()) >= NAP_S


# the look itself ------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_look_ends_however_many_calls_a_step_makes(record):
    model, teacher = nn.Sequential(*[nn.Linear(4, 4) for _ in range(50)]), nn.Linear(4, 4)
    before = [dict(hooks) for hooks in HOOKS]
    seen = []

    def step():
        seen.append([dict(hooks) for hooks in HOOKS] == before)
        with torch.no_grad():
            wanted = teacher(torch.ones(2, 4))
        return sum((model(torch.ones(2, 4)) - wanted).mean() for _ in range(600))

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    record(model, optimizer=optimizer)
    for _ in range(5):
        step().backward()
        optimizer.step()
    assert seen == [True, True, False, True, True]
    assert is_watched(teacher)


def test_torch_compile_in_that_step_ends_the_look(record):
    model, teacher = student(), nn.Linear(4, 4)
    original, called = torch.compile, []

    def backend(graph, _):
        called.append(1)
        return graph.forward

    step, optimizer = distill(model, teacher), torch.optim.SGD(model.parameters(), lr=0.01)
    record(model, optimizer=optimizer)
    other = nn.Linear(4, 4)
    for number in range(1, 5):
        step().backward()
        if number == 3:
            assert torch.compile is not original
            torch.compile(other, backend=backend)(torch.ones(2, 4))
        optimizer.step()
    assert torch.compile is original
    assert called == [1]
    assert not is_watched(teacher), "a process that compiles is left alone"
    torch.compiler.reset()


def test_modules_without_parameters_hide_none(record):
    model, teacher = student(), nn.Linear(4, 4)
    distilled = distill(model, teacher)

    def step():
        x = torch.ones(2, 4)
        return distilled() + sum(nn.MSELoss()(x, x) for _ in range(40))

    train(record, step, model, steps=4)
    assert is_watched(teacher)


def test_another_in_the_place_of_one_that_is_gone_is_looked_for(record):
    model, teachers = student(), [nn.Linear(4, 4)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    recorded = record(model, optimizer=optimizer)
    for number in range(1, 10):
        distill(model, teachers[0])().backward()
        optimizer.step()
        if number == 5:
            assert is_watched(teachers[0])
            teachers[0] = nn.Linear(4, 4)
            recorded.run._watching._looked -= 3.0
            recorded.run._watching.poll()
    assert is_watched(teachers[0])


@pytest.mark.parametrize("own", ["a list", "with arguments", "raises"])
def test_a_models_own_ways_to_its_parameters_are_not_called(record, own):
    class Teacher(Slow):
        if own == "a list":

            def parameters(self, recurse=True):
                return list(super().parameters(recurse))

        elif own == "with arguments":

            def parameters(self, lr):
                return [{"params": super().parameters(), "lr": lr}]

        else:

            def named_parameters(self, *_args, **_kwargs):
                raise RuntimeError("the script's own")

            def modules(self):
                raise RuntimeError("the script's own")

    model, teacher = student(), Teacher(4, 4)
    recorded = train(record, distill(model, teacher), model)
    recorded.finish()
    forward = told(recorded, "phase/forward_s")
    assert (min(forward[step] for step in range(4, 9)) >= NAP_S) is (own != "raises")
