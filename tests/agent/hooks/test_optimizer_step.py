"""Where a step begins and ends, and whose steps count."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch
from torch import nn

CAUSES_OVERFLOW = float("inf")


def train(model, optimizer, steps, *, log=None, batch=4):
    for _ in range(steps):
        loss = model(torch.randn(batch, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if log is not None:
            log()


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def test_step_n_is_the_nth_optimizer_step(record):
    model = small()
    recorded = record(model)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 5)
    steps = recorded.steps()
    assert [step for step, _ in steps] == [1, 2, 3, 4, 5]
    assert all(values["lr"] == 0.1 and "loss" in values for _, values in steps)
    assert "step_time_s" not in steps[0][1], "nothing says when the first step began"
    assert all(values["step_time_s"] > 0 for _, values in steps[1:])


def test_a_resumed_run_counts_from_its_start_step(record):
    model = small()
    recorded = record(model, start_step=101)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    assert [step for step, _ in recorded.steps()] == [101, 102]


def test_the_optimizer_that_owns_most_counts_even_when_a_smaller_one_steps_first(record):
    generator, critic = small(), nn.Linear(1, 1)
    big, little = torch.optim.Adam(generator.parameters()), torch.optim.SGD(critic.parameters(), lr=0.5)
    recorded = record()
    losses = []
    for _ in range(3):
        fake = generator(torch.randn(4, 8))
        for _ in range(2):
            little.zero_grad()
            critic(fake.detach()).mean().backward()
            little.step()
        big.zero_grad()
        loss = -critic(fake).mean()
        loss.backward()
        big.step()
        losses.append(loss.item())
    steps = recorded.steps()
    assert [step for step, _ in steps] == [1, 2, 3]
    assert [values["loss"] for _, values in steps] == losses
    assert {values["lr"] for _, values in steps} == {0.001}


def test_an_optimizer_that_is_over_but_not_yet_collected_counts_for_nothing(record):
    """A loop left by an exception, a notebook cell run anew: the optimizer hangs in a cycle until the collector
    runs."""
    forgotten = torch.optim.SGD(nn.Linear(64, 64).parameters(), lr=0.3)
    forgotten.cycle = forgotten
    del forgotten
    recorded = record()
    model = small()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 3)
    assert [(step, values["lr"]) for step, values in recorded.steps()] == [(1, 0.1), (2, 0.1), (3, 0.1)]


def test_an_optimizer_that_never_steps_is_given_up(clock, record):
    kept = torch.optim.SGD(nn.Linear(64, 64).parameters(), lr=0.3)
    recorded = record()
    model = small()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 12, log=lambda: clock.sleep(1.0))
    steps = recorded.steps()
    assert [step for step, _ in steps] == [*range(1, 13)]
    assert all(values["lr"] == 0.1 for _, values in steps)
    assert steps[9][1]["step_time_s"] == pytest.approx(1.0, rel=0.1), "of one step, not of ten"
    assert kept.param_groups


def test_two_optimizers_over_one_backward_share_its_loss(record):
    model = small()
    matrices, rest = [p for p in model.parameters() if p.dim() == 2], [p for p in model.parameters() if p.dim() < 2]
    small_first = [torch.optim.SGD(rest, lr=0.5), torch.optim.SGD(matrices, lr=0.25)]
    recorded = record(model)
    losses = []
    for _ in range(3):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        for optimizer in small_first:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert recorded.of("loss") == [(1, losses[0]), (2, losses[1]), (3, losses[2])]


def test_a_second_stage_takes_over_when_the_first_optimizer_is_gone(record):
    model = small()
    recorded = record(model)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    train(model, torch.optim.SGD(model[2].parameters(), lr=0.2), 2)
    assert [(step, values["lr"]) for step, values in recorded.steps()] == [(1, 0.1), (2, 0.1), (3, 0.2), (4, 0.2)]


def test_an_optimizer_inside_an_optimizer_counts_once(record):
    class Lookahead(torch.optim.SGD):
        def __init__(self, inner):
            self.inner = inner
            super().__init__(inner.param_groups[0]["params"], lr=0.3)

        def step(self, closure=None):
            return self.inner.step()

    model = small()
    recorded = record(model)
    train(model, Lookahead(torch.optim.SGD(model.parameters(), lr=0.1)), 3)
    assert [step for step, _ in recorded.steps()] == [1, 2, 3]


def test_a_step_that_raises_does_not_stop_the_count(record):
    model = small()
    recorded = record(model)
    broken = torch.optim.SGD(model.parameters(), lr=0.1)
    good = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = broken.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(model, broken, 1)
    handle.remove()
    train(model, broken, 2)
    train(model, good, 1)
    assert [step for step, _ in recorded.steps()][:2] == [1, 2]


def test_skipped_steps_count_and_are_marked(record):
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    recorded = record(model)
    losses = []
    for step in range(1, 5):
        loss = model(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if step == 2:
            model[0].weight.grad[0, 0] = CAUSES_OVERFLOW
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    steps = recorded.steps()
    assert [step for step, _ in steps] == [1, 2, 3, 4]
    assert [values["amp/skipped"] for _, values in steps] == [0, 1, 1, 1]
    assert [values["amp/scale"] for _, values in steps] == [1024, 1024, 512, 512]
    assert [values["loss"] for _, values in steps] == losses
    assert "grad/norm" not in steps[1][1], "gradients of a skipped step are infinite by design"


def test_a_closure_is_not_optimizer_time_and_its_first_loss_counts(record):
    model = small()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    recorded = record(model)
    inputs, losses = torch.randn(16, 8), []

    def closure():
        optimizer.zero_grad()
        loss = (model(inputs) - 1).square().mean()
        loss.backward()
        losses.append(loss.item())
        return loss

    firsts = []
    for _ in range(2):
        firsts.append(len(losses))
        optimizer.step(closure)
    steps = recorded.steps()
    assert [values["loss"] for _, values in steps] == [losses[first] for first in firsts]
    assert all(values["phase/backward_s"] > 0 and values["phase/optimizer_s"] > 0 for _, values in steps)
    assert all(
        sum(v for n, v in values.items() if n.startswith("phase/")) <= 1.001 * values["step_time_s"]
        for _, values in steps[1:]
    )


# ---- log() and the step in progress


def test_log_after_the_step_belongs_to_it_and_before_backward_to_the_next(record):
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    for index in range(3):
        loss = model(torch.randn(4, 8)).square().mean()
        if index:
            recorded.run.log({"before": index})
        optimizer.zero_grad()
        loss.backward()
        recorded.run.log({"between": index})
        optimizer.step()
        recorded.run.log({"after": index})
    assert recorded.of("between") == [(1, 0), (2, 1), (3, 2)]
    assert recorded.of("after") == [(1, 0), (2, 1), (3, 2)]
    assert recorded.of("before")[1] == (3, 2), "the root's forward pass opens the step"


@pytest.mark.parametrize("loader", [False, True])
def test_a_log_belongs_to_the_same_step_where_gradients_come_without_a_backward_pass(record, loader):
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    batches = torch.randn(4, 4, 8)
    for number, batch in enumerate(
        torch.utils.data.DataLoader(batches, batch_size=None) if loader else batches, start=1
    ):
        recorded.run.log({"before": number})
        loss = model(batch).square().mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        recorded.run.log({"between": number})
        optimizer.step()
        recorded.run.log({"after": number})
    for name in ("between", "after"):
        assert recorded.of(name) == [(n, n) for n in range(1, 5)], name


def test_a_log_before_the_very_first_backward_belongs_to_step_one(record):
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    loss = model(torch.randn(4, 8)).square().mean()
    recorded.run.log({"early": 1.0})
    loss.backward()
    optimizer.step()
    assert recorded.of("early") == [(1, 1.0)]


def test_a_process_that_never_steps_advances_with_each_log_from_zero(record):
    recorded = record()
    for index in range(3):
        recorded.run.log({"score": index})
    assert recorded.of("score") == [(0, 0), (1, 1), (2, 2)]


def test_an_evaluation_process_with_a_loader_advances_with_each_log(record):
    recorded = record()
    loader = torch.utils.data.DataLoader(torch.randn(6, 2), batch_size=2)
    for index, _ in enumerate(loader):
        recorded.run.log({"score": index})
    recorded.run.log({"score": 99})
    assert recorded.of("score") == [(0, 0), (1, 1), (2, 2), (3, 99)]


@pytest.mark.parametrize("loads", [False, True], ids=["at once", "once it is known that nothing steps"])
def test_a_call_without_a_commit_is_of_the_step_of_the_next(record, loads):
    recorded = record()
    if loads:
        next(iter(torch.utils.data.DataLoader(torch.randn(6, 2))))
    for index in range(3):
        recorded.run.log({"score": index}, commit=False)
        recorded.run.log({"rate": index}, commit=False)
        recorded.run.log({"best": index}, commit=index != 1 or None)
    for name in ("score", "rate", "best"):
        assert recorded.of(name) == [(0, 0), (1, 1), (2, 2)]


def test_where_an_optimizer_counts_a_commit_says_nothing(record):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    for index in range(3):
        model(torch.ones(1, 2)).mean().backward()
        optimizer.step()
        recorded.run.log({"score": index}, None, index % 2 == 0)
        recorded.run.log({"best": index})
    assert recorded.of("score") == recorded.of("best") == [(1, 0), (2, 1), (3, 2)]


def test_a_loop_without_an_optimizer_goes_on_in_its_step_too(record):
    weight = nn.Parameter(torch.ones(2))
    recorded = record(nn.ParameterList([weight]))
    for index in range(4):
        weight.square().sum().backward()
        with torch.no_grad():
            weight -= 0.1 * weight.grad
        weight.grad = None
        recorded.run.log({"score": index}, commit=False)
        recorded.run.log({"best": index})
    after = [recorded.of(name) for name in ("score", "best")]
    assert after[0] == after[1]
    assert [value for _, value in after[0]] == [0, 1, 2, 3]


def test_a_steps_own_number_is_kept(record):
    recorded = record()
    recorded.run.log({"score": 1}, step=40)
    recorded.run.log({"score": 2}, step=50)
    recorded.run.log({"score": 3})
    assert recorded.of("score") == [(40, 1), (50, 2), (51, 3)]


def test_steps_on_another_thread_do_not_mix_in(record):
    import threading

    model, other = small(), small()
    recorded = record(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 1)
    thread = threading.Thread(target=train, args=(other, torch.optim.SGD(other.parameters(), lr=0.2), 3))
    thread.start()
    thread.join()
    train(model, optimizer, 1)
    assert [(step, values["lr"]) for step, values in recorded.steps()] == [(1, 0.1), (2, 0.1)]


def test_a_training_on_a_later_thread_goes_on_counting(record):
    import threading

    first, second = small(), small()
    recorded = record(first)
    over = threading.Event()

    def later():
        over.wait(10)
        train(second, torch.optim.SGD(second.parameters(), lr=0.2), 3)

    waiting = threading.Thread(target=later)  # it lives beside the other one, so that it has an ident of its own
    waiting.start()
    thread = threading.Thread(target=lambda: train(first, torch.optim.SGD(first.parameters(), lr=0.1), 2))
    thread.start()
    thread.join()
    over.set()
    waiting.join()
    steps = recorded.steps()
    assert [(step, values["lr"]) for step, values in steps] == [(1, 0.1), (2, 0.1), (3, 0.2), (4, 0.2), (5, 0.2)]
    assert all("loss" in values for _, values in steps)


def test_threads_that_take_turns_in_a_training_are_one(record):
    """As with `await asyncio.to_thread(step)`, which takes any thread of its pool."""
    from concurrent.futures import ThreadPoolExecutor

    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        for pool in (one, one, other, one, other, other):
            pool.submit(train, model, optimizer, 1).result()
    steps = recorded.steps()
    assert [step for step, _ in steps] == [1, 2, 3, 4, 5, 6]
    without = [step for step, values in steps if "loss" not in values]
    assert without == [3], "the first on another thread is known by its step alone"


def test_what_trains_beside_a_training_that_takes_turns_does_not_mix_in(record):
    from concurrent.futures import ThreadPoolExecutor

    model, other = small(), small()
    optimizer, another = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(other.parameters(), lr=0.2)
    recorded, true = record(model), {}

    def step(number, beside):
        loss = model(torch.randn(4, 8)).square().mean()
        if number > 1:  # the first to step says which training is told
            beside.submit(train, other, another, 1).result()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        true[number] = loss.item()

    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two, ThreadPoolExecutor(1) as beside:
        for number, pool in enumerate((one, one, two, one, two, one, two), 1):
            pool.submit(step, number, beside).result()
    steps = recorded.steps()
    assert [(step, values["lr"]) for step, values in steps] == [(step, 0.1) for step in range(1, 8)]
    assert {step: values["loss"] for step, values in steps if step > 3} == {step: true[step] for step in range(4, 8)}


def test_of_many_threads_that_take_turns_the_newest_are_known():
    from perfagent.step.training_thread import OneOfThreads

    threads = OneOfThreads.of(*range(1, 101))
    assert threads == 100 and threads == 37
    assert threads != 36 and threads != 101
    assert threads.known == tuple(range(37, 101))


@pytest.mark.parametrize("told", ["model and optimizer", "model", "nothing"])
def test_training_on_another_thread_than_attach_is_seen_from_its_first_step(record, told):
    import threading

    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(None if told == "nothing" else model, optimizer=optimizer if "optimizer" in told else None)
    thread = threading.Thread(target=train, args=(model, optimizer, 3))
    thread.start()
    thread.join()
    steps = recorded.steps()
    assert [step for step, _ in steps] == [1, 2, 3]
    assert all("loss" in values for _, values in steps)


def test_the_first_scaled_loss_on_another_thread_is_the_true_one(record):
    import threading

    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    recorded = record(model, optimizer=optimizer)
    losses = []

    def step():
        loss = model(torch.randn(4, 8)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    assert recorded.of("loss") == [(1, losses[0])]


@pytest.mark.parametrize("told", [True, False])
def test_another_optimizer_over_the_same_parameters_takes_over_at_once(record, told):
    """Adam first, then SGD, and the script keeps both."""
    model = small()
    first, second = torch.optim.Adam(model.parameters(), lr=0.1), torch.optim.SGD(model.parameters(), lr=0.2)
    recorded = record(model, optimizer=first if told else None)
    for optimizer in (first, second, first):
        train(model, optimizer, 12)
    steps = recorded.steps()
    assert [step for step, _ in steps] == list(range(1, 37))
    assert [values["lr"] for _, values in steps] == [0.1] * 12 + [0.2] * 12 + [0.1] * 12


def test_of_two_optimizers_that_step_the_same_parameters_in_turn_one_counts(record):
    model = small()
    first, second = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(model.parameters(), lr=0.2)
    recorded = record(model)
    for _ in range(20):
        train(model, first, 1)
        train(model, second, 1)
    rates = [values["lr"] for _, values in recorded.steps()]
    assert rates == [0.1, 0.2] + [0.1] * 19, "the second one is taken for a new stage, once"


def test_a_critic_that_steps_with_every_step_of_the_generator_never_counts(record):
    generator, critic = nn.Linear(8, 16), nn.Linear(16, 1)
    big, little = torch.optim.SGD(generator.parameters(), lr=0.1), torch.optim.SGD(critic.parameters(), lr=0.2)
    recorded = record()
    for _ in range(70):
        fake = generator(torch.randn(4, 8))
        critic(fake.detach()).mean().backward()
        little.step()
        critic(fake).mean().backward()
        big.step()
    assert [values["lr"] for _, values in recorded.steps()] == [0.1] * 70


@pytest.mark.parametrize("named", [False, True])
def test_the_next_model_of_a_process_is_watched_like_the_first(record, named):
    """The folds of a cross-validation, the trials of a search: each with a model and an optimizer of its own."""
    recorded = record()
    for _ in range(3):
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if named:
            recorded.run.take_up(model, optimizer, {}, [])
        train(model, optimizer, 4)
        del model, optimizer
    steps = recorded.steps()
    assert [step for step, _ in steps] == list(range(1, 13))
    missing = [step for step, values in steps if "phase/forward_s" not in values]
    assert missing == ([1] if named else [1, 5, 9]), "of a model that was not named, the first step finds it"
    borders = [data["training_after"] for _, data, _ in recorded.sender.events if "training_after" in data]
    assert borders == [4, 8], "rules compare no model with the one before"


def test_an_optimizer_that_the_loop_drops_is_gone_while_the_run_goes_on(record):
    """A scheduler puts a `step` of its own on the instance, which is what is patched then."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    recorded = record(model)
    train(model, optimizer, 3, log=scheduler.step)
    assert recorded.run._watching._undo_steps
    dropped = weakref.ref(optimizer)
    del optimizer, scheduler
    gc.collect()
    assert dropped() is None


def test_optimizers_that_come_and_go_are_each_timed_from_outside(record):
    """A scheduler puts a `step` of its own on each; a dead one's id is given again."""
    model = small()
    recorded = record(model)
    for _ in range(12):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        train(model, optimizer, 3, log=scheduler.step)
        assert hasattr(optimizer.step, "__wrapped__")
        assert len(recorded.run._watching._undo_steps) <= 2
        del optimizer, scheduler
        gc.collect()


def test_what_a_step_leaves_behind_is_not_added_to_by_later_ones(record):
    """Its row is read later: a measured step once told the update ratio of another one 73 steps on."""
    model = nn.Linear(2, 1)
    progress = record(model).run._progress
    for unusual in (False, True):
        progress.unusual = unusual
        progress.extras.append("its own")
        mine = progress._rare(None)
        progress.extras.append("of a later step")
        progress.clip_norm.append("of a later step")
        assert (mine._extras, mine._taken.clips) == (["its own"], [])
        progress.extras.clear()
        progress.clip_norm.clear()


def test_an_optimizer_that_raised_and_is_never_used_again_does_not_silence_the_others(record):
    """Its step began, and nobody tells that it is over."""
    model = small()
    broken, good = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(model.parameters(), lr=0.2)
    recorded = record(model, optimizer=good)
    handle = broken.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(model, broken, 1)
    handle.remove()
    train(model, good, 80)
    steps = recorded.steps()
    assert len(steps) >= 15
    assert {values["lr"] for _, values in steps} == {0.2}


@pytest.mark.parametrize("by_name", [False, True])
def test_what_a_step_is_given_beside_a_closure_reaches_it(record, by_name):
    given = []

    class Noted(torch.optim.SGD):
        def step(self, closure=None, note=None):
            given.append(note)
            return super().step(closure)

    model = small()
    optimizer = Noted(model.parameters(), lr=0.1)
    recorded = record(model)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        return loss

    for number in range(4):
        if by_name:
            optimizer.step(note=number, closure=closure)
        else:
            optimizer.step(closure, number)
    assert given == [0, 1, 2, 3]
    assert [step for step, _ in recorded.steps()] == [1, 2, 3, 4]


def test_a_rate_that_is_a_whole_number_or_a_tensor_is_told_as_it_is(record):
    model = small()
    recorded = record(model)
    train(model, torch.optim.SGD(model.parameters(), lr=1), 3)
    train(model, torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5)), 3)
    rates = [values["lr"] for _, values in recorded.steps()]
    assert rates == [1.0] * 3 + [0.5] * 3
    assert {type(rate) for rate in rates} == {float}


def test_a_step_that_raises_once_costs_the_other_optimizers_no_step(record):
    model, critic = small(), nn.Linear(8, 1)
    optimizer, other = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(critic.parameters(), lr=0.2)
    recorded = record(model, optimizer=optimizer)
    train(model, optimizer, 3)
    handle = other.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(critic, other, 1)
    handle.remove()
    train(model, optimizer, 3)
    assert [step for step, _ in recorded.steps()] == [1, 2, 3, 4, 5, 6]


def test_a_class_that_inherits_its_step_has_none_of_its_own_after_the_run(record):
    class Mine(torch.optim.SGD):
        pass

    torch.optim.SGD(nn.Linear(1, 1).parameters())  # torch wraps a class's step when the first of it is made
    model = small()
    recorded = record(model)
    train(model, Mine(model.parameters(), lr=0.1), 3)
    assert "step" in Mine.__dict__, "timed from outside"
    recorded.finish()
    assert "step" not in Mine.__dict__


def test_the_governor_hears_how_long_a_step_takes(record):
    model = small()
    recorded = record(model, overhead_budget_pct=1e9)
    governor, told = recorded.run._progress.governor, []

    class Listening:
        def __getattr__(self, name):
            return getattr(governor, name)

        def period(self, pass_ns, step_ns):
            told.append(step_ns)
            return governor.period(pass_ns, step_ns)

    recorded.run._progress.governor = Listening()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 4, log=lambda: time.sleep(0.02))
    assert len(told) == 4
    assert all(20_000_000 <= step_ns < 20_000_000_000 for step_ns in told[1:]), told
