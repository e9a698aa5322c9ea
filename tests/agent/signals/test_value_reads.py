"""Loops that read single values of tensors on the CPU: how many, how long, and where."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn

from perfagent.signals.value_reads import READS, ValueReads
from perfagent.step.state import state


def measured(record, *bodies) -> ValueReads:
    """Three steps with the look; each does what its body says after the optimizer's step."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    record(model)

    def step():
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    step()
    look = ValueReads(state.current)
    before = {name: vars(torch.Tensor).get(name) for name in READS}
    assert look.at_boundary()
    for number, body in enumerate(bodies):
        body()
        step()
        assert look.at_boundary() == (number < len(bodies) - 1)
    assert look.over
    assert {name: vars(torch.Tensor).get(name) for name in READS} == before
    return look


VALUES = torch.arange(200)


def count_one_by_one():
    found = 0
    for place in range(len(VALUES)):
        if VALUES[place].item() == 3:
            found += 1
    return found


def test_a_loop_over_values_is_told_with_its_line_and_its_time(record):
    began = time.perf_counter()
    count_one_by_one()
    look = measured(record, *[count_one_by_one] * 3)
    line = f"test_value_reads.py:{count_one_by_one.__code__.co_firstlineno + 3}"
    assert [(entry["line"].rsplit("/", 1)[-1], entry["count"]) for entry in look.told()] == [(line, 200)]
    assert look.values()["sync/reads_per_step"] == 200
    assert 200 * 0.3e-6 < look.values()["sync/reading_s"] < 5 * (time.perf_counter() - began)
    assert look.step == 3


def test_implicit_reads_count_too_and_whole_tensors_do_not(record):
    loss = torch.tensor(0.5, requires_grad=True)

    def body():
        if loss > 3:
            raise AssertionError
        float(loss.detach())
        f"{loss.detach():.3f}"
        torch.arange(10).tolist()
        loss.detach().numpy()

    assert sum(measured(record, body, body, body).lines.values()) == 3


def test_what_one_step_in_ten_reads_is_no_habit(record):
    assert measured(record, count_one_by_one, lambda: None, lambda: None).values() == {
        "sync/reads_per_step": 0.0, "sync/reading_s": 0.0,
    }  # fmt: skip


def test_reads_far_apart_take_only_their_own_time(record):
    def body():
        for value in torch.arange(5):
            time.sleep(0.002)  # the model's work, or an environment's
            value.item()

    reading_s = []
    for _ in range(3):  # the quickest of three: what runs beside this test takes its time, too
        look = measured(record, body, body, body)
        assert look.values()["sync/reads_per_step"] == 5
        reading_s.append(look.values()["sync/reading_s"])
    assert min(reading_s) < 0.002


def test_passes_between_two_loops_are_not_their_time(record):
    model = nn.Linear(2, 1)

    def body():
        count_one_by_one()
        time.sleep(0.005)
        model(torch.ones(1, 2)).sum().backward()  # the next micro-batch
        count_one_by_one()

    look = measured(record, body, body, body)
    assert look.values()["sync/reads_per_step"] == 400


def test_torch_s_own_reads_and_other_threads_are_left_out(record):
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2)) for _ in range(5)], foreach=False)

    def body():
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones(2)
        optimizer.step()
        thread = threading.Thread(target=count_one_by_one)
        thread.start()
        thread.join()

    assert sum(measured(record, body, body, body).lines.values()) == 0


def test_what_an_evaluation_reads_is_no_part_of_the_step(record):
    def body():
        state.current.phase_depth += 1
        count_one_by_one()
        state.current.phase_depth -= 1

    assert sum(measured(record, body, body, body).lines.values()) == 0


def test_a_compiled_program_is_left_alone(record, monkeypatch):
    record(nn.Linear(2, 1))
    monkeypatch.setattr("perfagent.signals.value_reads.compiled", lambda: True)
    look = ValueReads(state.current)
    assert not look.at_boundary()
    assert look.over
    assert not {"item", "__bool__"} & vars(torch.Tensor).keys()


def test_a_patch_of_the_script_s_own_survives(record, monkeypatch):
    look = ValueReads(record(nn.Linear(2, 1)) and state.current)
    assert look.at_boundary()
    ours = torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: ours(tensor) + 1)
    look.close()
    assert torch.tensor(1).item() == 2
    monkeypatch.undo()
    del torch.Tensor.item
    assert torch.tensor(1).item() == 1


def test_an_exception_passes_and_values_are_the_same(record):
    def body():
        with pytest.raises(RuntimeError, match="Tensor with 2 elements"):
            torch.ones(2).item()
        assert torch.tensor(2.5).item() == 2.5
        assert [10, 20, 30][torch.tensor(1)] == 20
        assert int(torch.tensor(3)) == 3

    assert sum(measured(record, body, body, body).lines.values()) == 4


def test_it_is_told_as_series_and_an_event(record):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    for _ in range(30):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        count_one_by_one()
        recorded.rows += recorded.sender.drain()
        recorded.run._look()
    assert [value for _, value in recorded.of("sync/reads_per_step")] == [200.0]
    assert recorded.of("sync/calls_per_step") == [], "nothing waits for a device where there is none"
    [(_, reading_s)] = recorded.of("sync/reading_s")
    assert reading_s > 0
    [event] = [data for kind, data, _ in recorded.sender.events if kind == "sync"]
    assert event["lines"][0]["count"] == 200
