"""Where a NaN came from: trainings that go wrong for real, each in another way."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def evidence(training: Any) -> dict[str, Any]:
    found = training.finding()
    assert found["explains"] == ["nonfinite_loss", "nonfinite_gradient"]
    data: dict[str, Any] = found["evidence"]
    return data


def nothing_left(model: nn.Module) -> bool:
    """Whether no module but the root has anything of ours on it."""
    return not any("_compiled_call_impl" in module.__dict__ for name, module in model.named_modules() if name)


def test_a_parameter_that_went_bad_is_named_with_its_module(train):
    job = train()
    job.steps(5)
    with torch.no_grad():
        job.model.blocks[1].linear.weight[0, :3] = math.nan
    job.steps(4)
    found = evidence(job)
    assert (found["step"], found["module"], found["parameter"]) == (6, "blocks.1.linear", "blocks.1.linear.weight")
    assert found["module_class"] == "Linear"
    assert found["parameters_before"] | {"first": None} == {
        "of": 10, "nonfinite": 1, "first": None, "last": "blocks.1.linear.weight",
    }  # fmt: skip
    (first,) = found["parameters_before"]["first"]
    assert (first["nonfinite"], first["shape"], first["dtype"]) == (3, [16, 16], "float32")
    assert found["parameters_after"]["nonfinite"] == 10, "the step was taken: everything is bad after it"
    assert "'blocks.1.linear.weight' of module 'blocks.1.linear' (Linear)" in job.finding()["message"]


def test_what_surrounds_the_bad_step_is_told(train):
    job = train(lr=0.02)
    job.steps(5)
    job.spoil = lambda loss: loss * math.nan
    job.steps(3)
    found = evidence(job)
    assert (found["rank"], found["lr"], found["loss_dtype"]) == (0, 0.02, "float32")
    assert math.isnan(found["loss"])
    assert [entry["step"] for entry in found["history"]] == [1, 2, 3, 4, 5, 6]
    assert [entry["loss"] for entry in found["history"]][:5] == job.losses[:5]


def test_a_bad_batch_is_told_by_its_name_range_and_fingerprint(train):
    job = train()
    job.steps(5)
    bad = torch.randn(6, 8)
    bad[2, 3] = math.inf
    job.step(bad)
    job.steps(2)
    found = evidence(job)
    assert (found["cause"], found["batch_tensor"]) == ("batch", "inputs")
    batch = found["batch"]
    assert batch["step"] == 6
    inputs = next(tensor for tensor in batch["tensors"] if tensor["name"] == "inputs")
    assert (inputs["shape"], inputs["dtype"], inputs["nonfinite"], inputs["max"]) == ([6, 8], "float32", 1, math.inf)
    labels = next(tensor for tensor in batch["tensors"] if tensor["name"] == "y")
    assert (labels["dtype"], labels["nonfinite"]) == ("int64", 0)
    assert 0 <= labels["min"] <= labels["max"] <= 3


def test_the_same_batch_has_the_same_fingerprint_and_another_has_not(train):
    from perfagent.rootcause.batch import Fingerprint

    x = torch.randn(4, 3)
    same, other = x.clone(), x.clone()
    other[3, 2] += 1e-3
    hashes = [Fingerprint(1, "", [("x", tensor)]).result()["hash"] for tensor in (x, same, other)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_the_operator_that_divided_by_nothing_is_named(train):
    job = train()
    job.steps(5)
    job.spoil = lambda loss: (loss * 0) / (loss.detach() * 0)
    job.step()
    job.spoil = lambda loss: loss
    job.steps(2)
    found = evidence(job)
    assert (found["cause"], found["operator"]["operator"], found["after_module"]) == ("operator", "Div", "head")
    assert found["parameters_before"]["nonfinite"] == 0
    assert "operator Div after module 'head' made the first non-finite value from finite inputs" in job.finding()["message"]


def test_a_module_that_puts_out_nan_is_named_while_the_parameters_are_good(train):
    """A loop that does not step on a bad loss: the next steps show which module it is."""
    job = train()
    job.guard = True
    job.steps(5)
    job.model.blocks[1].broken = math.nan
    job.steps(4)
    found = evidence(job)
    assert (found["cause"], found["module"], found["module_class"]) == ("module", "blocks.1", "Block")
    first = found["first_module"]
    assert (first["step"], first["inputs_finite"], first["shape"], first["dtype"]) == (7, True, [6, 16], "float32")
    assert (first["nonfinite"], first["share"]) == (6, 1 / 16)
    assert found["later_batch"]["tensors"][0]["name"] == "x", "what the model was called with, by the model's own names"
    assert found["parameters_after"]["nonfinite"] == 0


def test_what_does_not_come_back_is_told_as_such_after_three_good_steps(train):
    job = train()
    job.guard = True
    job.steps(5)
    job.model.blocks[1].broken = math.inf
    job.step()
    job.model.blocks[1].broken = None
    job.steps(2)
    assert job.events("finding") == []
    job.steps(1)
    found = evidence(job)
    assert found["steps_checked_after"] == 3
    assert "first_module" not in found
    assert (found["operator"]["read_by"], found["operator"]["read_as"]) == ("Mul", ["other"]), "the number it was multiplied by"
    assert found["after_module"] == "blocks.1.linear", "autograd's graph of the bad step still says where"


def test_the_checks_are_gone_after_their_steps_and_in_no_copy(train):
    job = train()
    job.guard = True
    job.steps(5)
    job.model.blocks[0].broken = math.nan
    job.step()
    assert not nothing_left(job.model), "the next step is being watched"
    saved = io.BytesIO()
    torch.save(job.model.state_dict(), saved)
    twin = copy.deepcopy(job.model)
    assert not any(module.__dict__.get("_compiled_call_impl") for module in twin.modules())
    job.step()
    job.steps(4)
    assert nothing_left(job.model)
    assert len(job.events("finding")) == 1


def test_one_bad_stretch_is_one_finding_and_three_are_the_most(train):
    job = train()
    job.guard = True
    for _ in range(5):
        job.steps(3)
        job.model.blocks[2].broken = math.nan
        job.steps(6)
        job.model.blocks[2].broken = None
    assert [found["since_step"] for found in job.events("finding")] == [4, 13, 22]


def test_rows_that_are_read_after_the_finding_begin_no_second_look(train):
    """The sender's thread looks five times a second: by then the bad step, those before it and those after lie there together."""
    job = train()
    look, job.look = job.look, lambda: None
    job.steps(5)
    with torch.no_grad():
        job.model.head.bias[0] = math.nan
    job.steps(4)
    job.run._investigator.poll()
    look()
    job.look = look
    job.steps(4)
    assert evidence(job)["parameter"] == "head.bias"


def test_a_run_that_stops_at_its_nan_still_tells_what_is_known(train):
    job = train()
    job.steps(5)
    with torch.no_grad():
        job.model.head.bias[0] = math.nan
    job.step()
    job.recorded.finish()
    assert evidence(job)["parameter"] == "head.bias"
    assert nothing_left(job.model)


def test_a_loss_that_is_read_later_is_looked_into_all_the_same(record):
    """With a GradScaler the loss is seen before it is scaled, and judged on the sender's thread, as on a GPU."""
    from perfagent.rootcause.containment import problems

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    recorded = record(model)
    for step in range(1, 12):
        x = torch.randn(6, 8)
        if step >= 6:
            x[0, 0] = math.nan
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        recorded.rows += recorded.sender.drain()
        recorded.run._investigator.poll()
    (found,) = [data for kind, data, _ in recorded.sender.events if kind == "finding"]
    assert found["evidence"]["cause"] == "batch"
    assert found["evidence"]["loss_scale"] == 1024.0
    assert found["evidence"]["parameters_after"]["nonfinite"] == 0, "the scaler skipped the step"
    assert not problems


def test_a_checkpointed_model_is_not_run_again_for_it(train):
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
            self.calls = 0

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return torch.tanh(self.first(x))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(checkpoint(self.inner, x, use_reentrant=False))

    job = train(Checkpointed())
    job.steps(5)
    job.spoil = lambda loss: loss * math.nan
    job.steps(3)
    assert job.model.calls == 2 * 8, "forward and recomputation, no third"
    assert "operator" not in evidence(job)


def test_a_compiled_model_is_looked_at_from_outside_and_not_compiled_again(train, make_net):
    torch._dynamo.reset()
    compiled = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    model = torch.compile(make_net(blocks=1), backend=backend)
    job = train(model)
    job.guard = True
    job.steps(5)
    before = len(compiled)
    bad = torch.randn(6, 8)
    bad[0] = math.nan
    job.step(bad)
    job.steps(5)
    assert len(compiled) == before
    assert evidence(job)["batch_tensor"] == "inputs"
    torch._dynamo.reset()


def trained(make_net: Any, attach: Any) -> list[Any]:
    torch.manual_seed(3)
    model = make_net()
    model.blocks[1] = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    recorded = attach(model) if attach else None
    losses = []
    for step in range(1, 15):
        x = torch.randn(6, 8)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if step in (5, 10):
            loss = loss * math.inf
        loss.backward()
        if not torch.isfinite(loss):
            optimizer.zero_grad()
        optimizer.step()
        losses.append(loss.item())
        if recorded is not None:
            recorded.rows += recorded.sender.drain()
            recorded.run._investigator.poll()
    if recorded is not None:
        assert len([1 for kind, _, _ in recorded.sender.events if kind == "finding"]) == 2, "it was looked into"
        recorded.finish()
    return [losses, [tensor.clone() for tensor in model.state_dict().values()], torch.get_rng_state()]


def test_looking_into_it_changes_nothing_that_training_produces(record, make_net):
    losses, tensors, random = trained(make_net, None)
    again, same, state = trained(make_net, record)
    assert losses == again
    assert all(torch.equal(one, other) for one, other in zip(tensors, same, strict=True))
    assert torch.equal(random, state)
