"""Where a NaN came from: trainings that go wrong for real, each in another way."""

from __future__ import annotations

import copy
import io
import math
import textwrap
from typing import Any

import preloaded
import pytest
import torch
from agent_recorded import Recording
from builders import job_environment
from quantized import InEightBits
from torch import nn
from torch.utils.checkpoint import checkpoint


def evidence(training: Any, *, of_crash: bool = False) -> dict[str, Any]:
    found = training.finding()
    assert found["explains"] == ["nonfinite_loss", "nonfinite_gradient", *(["process_crash"] if of_crash else [])]
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
    assert (
        "operator Div after module 'head' made the first non-finite value from finite inputs"
        in job.finding()["message"]
    )


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
    assert (found["operator"]["read_by"], found["operator"]["read_as"]) == ("Mul", ["other"]), (
        "the number it was multiplied by"
    )
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
    """The sender's thread looks five times a second: by then the bad step, those before it and those after lie there
    together."""
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


# ---- tensors that hooks keep elsewhere


class Offload:
    """As torchtune and TRL offload activations: what is given back is gone, and there is no second time."""

    def __init__(self) -> None:
        self.kept: dict[int, torch.Tensor] = {}
        self.packed = 0

    def pack(self, tensor: torch.Tensor) -> int:
        self.packed += 1
        self.kept[self.packed] = tensor.clone()
        return self.packed

    def unpack(self, key: int) -> torch.Tensor:
        return self.kept.pop(key)


def test_activations_that_can_be_unpacked_once_are_left_to_backward(train):
    job = train()
    offload, forward = Offload(), job.model.forward

    def offloaded(x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(offload.pack, offload.unpack):
            return forward(x)

    job.model.forward = offloaded
    job.steps(5)
    with torch.no_grad():
        job.model.head.bias[0] = math.nan
    job.steps(3)
    assert not offload.kept, "backward had them all"
    assert "operator" not in evidence(job)
    assert evidence(job)["parameter"] == "head.bias"


# ---- minus infinity, which is what masks hold


class Masked(nn.Module):
    """A router and a decoder, both with -inf where nothing may pass."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.router, self.head = nn.Linear(8, 16), Router(), nn.Linear(16, 4)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(len(x))
        hidden = self.embed(x)
        hidden = self.layer(hidden[None], src_mask=mask)[0]
        return self.head(hidden * self.router(hidden).softmax(-1))


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.gate(x)
        return logits.masked_fill(logits < logits.topk(2).values[:, -1:], -math.inf)


def test_masks_are_not_taken_for_the_cause(train):
    job = train(Masked())
    job.guard = True
    job.steps(4)
    job.spoil = lambda loss: loss * torch.log(loss - 1000)
    job.steps(5)
    found = evidence(job)
    assert (found["cause"], found["operator"]["operator"]) == ("operator", "Log")
    assert "first_module" not in found
    below = found["first_minus_infinity"]
    assert (below["module"], below["only_minus_infinity"]) == ("router", True), "kept as evidence"


def test_a_mask_that_a_model_is_called_with_is_not_taken_for_the_cause(train):
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            return self.head(self.layer(self.embed(x)[None], src_mask=mask)[0])

    model = Decoder()
    job = train(model)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    call = job.model
    job.model = lambda x: call(x, mask)
    job.guard = True
    job.steps(4)
    job.spoil = lambda loss: loss * torch.log(loss - 1000)
    job.steps(5)
    found = evidence(job)
    assert [tensor["minus_infinite"] for tensor in found["later_batch"]["tensors"]] == [0, 15]
    assert (found["cause"], found["operator"]["operator"]) == ("operator", "Log")


def test_minus_infinity_in_a_batch_that_becomes_nan_is_the_batch(train):
    """The logarithm of an empty bin of a spectrum."""
    job = train()
    job.steps(5)
    bad = torch.randn(6, 8)
    bad[2, 3] = -math.inf
    job.step(bad)
    job.steps(2)
    found = evidence(job)
    assert (found["cause"], found["batch_tensor"]) == ("batch", "inputs")
    assert found["operator"]["minus_infinity"] == {"read_as": ["mat1"]}


def test_the_operator_behind_a_minus_infinity_that_becomes_nan_is_told(train):
    job = train()
    job.steps(5)
    job.spoil = lambda loss: ((loss * 0).log() * (loss * 0)).mean()
    job.step()
    job.spoil = lambda loss: loss
    job.steps(2)
    operator = evidence(job)["operator"]
    assert (operator["operator"], operator["minus_infinity"]["from"]) == ("Mul", "Log")
    assert (
        "the operator Mul after module 'head' made the first non-finite value from the -inf that Log had made"
        in (job.finding()["message"])
    )


def test_masks_of_later_steps_are_no_cause_of_what_did_not_come_back(train):
    job = train(Masked())
    job.guard = True
    job.steps(4)
    job.recorded.run._investigator.suspect(torch.tensor(math.nan))
    job.steps(5)
    assert evidence(job)["cause"] == "unknown"
    assert job.finding()["message"].endswith(
        "did not come back. -inf, which masks hold, was put out by module 'router'."
    )


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x * math.nan

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * ctx.saved_tensors[0]


def test_a_function_of_the_users_is_named_and_what_it_keeps_is_not_read(train):
    job = train()
    job.guard = True
    job.steps(5)
    job.spoil = lambda loss: Own.apply(loss.view(1)).mean()
    job.step()
    job.spoil = lambda loss: loss
    job.steps(4)
    assert evidence(job)["operator"]["operator"] == "Own"


# ---- values that are kept beside the parameters, and batches with gaps in them


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.embed(torch.nan_to_num(x)))))


def test_a_statistic_that_a_frozen_normalization_reads_is_named_and_not_what_went_into_it(train):
    job = train(Normalized())
    job.guard = True
    job.model.norm.eval()
    job.steps(4)
    with torch.no_grad():
        job.model.norm.running_var[3] = math.nan
    job.steps(4)
    found = evidence(job)
    assert (found["cause"], found["module"], found["buffer"]) == ("buffer", "norm", "norm.running_var")
    assert "in the buffer 'norm.running_var' of module 'norm' (BatchNorm1d)" in job.finding()["message"]


def test_a_statistic_that_training_does_not_read_is_no_cause(train):
    job = train(Normalized())
    job.guard = True
    job.steps(4)
    with torch.no_grad():
        job.model.norm.running_var[3] = math.nan
    job.steps(1)
    job.spoil = lambda loss: (loss * 1e4).exp()
    job.steps(4)
    found = evidence(job)
    assert (found["cause"], found["operator"]["operator"]) == ("operator", "Exp")


def with_gaps(rows: int = 6) -> torch.Tensor:
    x = torch.randn(rows, 8)
    x[4:, 3:] = math.nan
    return x


def test_a_batch_whose_gaps_are_left_out_is_not_taken_for_the_cause(train):
    job = train(Normalized())
    job.guard = True
    for _ in range(4):
        job.step(with_gaps())
    job.spoil = lambda loss: (loss * 1e4).exp()
    for _ in range(4):
        job.step(with_gaps())
    found = evidence(job)
    assert any(tensor["nonfinite"] for tensor in found["batch"]["tensors"]), "it is told all the same"
    assert (found["cause"], found["operator"]["operator"]) == ("operator", "Exp")


class Odd(Normalized):
    """An adapted model: its base cannot be looked at."""

    def __init__(self, base: torch.Tensor | None) -> None:
        super().__init__()
        lazy = nn.UninitializedParameter(requires_grad=False)
        self.base = nn.Parameter(base, requires_grad=False) if base is not None else lazy


ODD = {"eight bits": torch.randn(4).to(torch.float8_e4m3fn), "codes and scales": InEightBits(8), "not there yet": None}


@pytest.mark.parametrize("base", ODD.values(), ids=ODD.keys())
def test_a_parameter_that_cannot_be_looked_at_does_not_hide_the_others(train, base):
    job = train()
    job.steps(3)
    job.model.adapted = Odd(base)
    with torch.no_grad():
        job.model.head.bias[0] = math.nan
    job.steps(3)
    assert evidence(job)["parameter"] == "head.bias"


def test_scales_that_are_no_numbers_are_their_parameters(train):
    job = train()
    job.steps(3)
    job.model.adapted = Odd(InEightBits(8))
    job.model.adapted.base.scales[1] = math.nan
    job.spoil = lambda loss: loss * math.nan
    job.steps(3)
    found = evidence(job)
    assert (found["parameter"], found["parameters_before"]["nonfinite"]) == ("adapted.base", 1)


@pytest.mark.parametrize("kind", [torch.uint16, torch.float8_e4m3fn, torch.complex64])
def test_a_batch_of_a_type_without_an_order_has_a_fingerprint_and_no_range(kind):
    from perfagent.rootcause.batch import Fingerprint

    (shown,) = Fingerprint(1, "", [("x", torch.ones(6, 2).to(kind))]).result()["tensors"]
    assert shown["hash"]
    assert "min" not in shown


F = nn.functional
OF_TARGETS = {
    "mean squared error": F.mse_loss,
    "smooth absolute error": F.smooth_l1_loss,
    "cross entropy": F.binary_cross_entropy_with_logits,
    "weights": lambda out, y: (out * y).mean(),
    "distance": lambda out, y: torch.cdist(out, y).mean(),
    "joined": lambda out, y: torch.cat([out, y], -1).logsumexp(-1).mean(),
    "difference": lambda out, y: (out - y).square().mean(),
}


@pytest.mark.parametrize("loss_of", OF_TARGETS.values(), ids=OF_TARGETS.keys())
def test_bad_targets_are_the_cause_and_not_what_the_loss_was_given_beside_them(train, loss_of):
    job = train()

    def step(y: torch.Tensor) -> None:
        x = torch.randn(6, 8)
        job.optimizer.zero_grad()
        loss_of(job.model(x), y).backward()
        job.optimizer.step()
        job.look()

    for _ in range(3):
        step(torch.rand(6, 4))
    step(torch.rand(6, 4).where(torch.arange(6)[:, None] != 3, math.nan))
    for _ in range(3):
        step(torch.rand(6, 4))
    found = evidence(job)
    assert (found["cause"], found["batch_tensor"], found["batch_step"]) == ("batch", "y", 4)
    assert found["operator"].get("operator") in (None, "Cat", "Sub", "Pow", "Square"), (
        "where it came in, never the model"
    )


class Added(nn.Module):
    """An addition keeps nothing: what came in through it is first seen in what the exponential made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.head = nn.Parameter(torch.zeros(8)), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.exp(x + self.place))


def test_a_batch_that_no_operator_kept_is_still_the_cause(train):
    job = train(Added())
    job.guard = True
    job.steps(4)
    job.step(with_gaps())
    job.steps(4)
    assert evidence(job)["cause"] == "batch"


# ---- born in backward


class Spoiled(torch.autograd.Function):
    bad = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * math.nan if Spoiled.bad else gradient


def test_a_gradient_that_becomes_nan_on_its_way_back_is_told_by_where_it_did(train, make_net):
    model = make_net()
    model.blocks[1].register_forward_hook(lambda _module, _inputs, output: Spoiled.apply(output))
    model.embed.requires_grad_(False)  # stays good although it lies behind
    job = train(model)
    job.steps(5)
    Spoiled.bad = True
    job.step()
    Spoiled.bad = False
    job.steps(3)
    found = evidence(job)
    assert (found["cause"], found["parameter"], found["good_from"]) == (
        "backward", "blocks.1.linear.bias", "blocks.2.linear.weight",
    )  # fmt: skip
    assert "lies between 'blocks.1.linear' (Linear) and 'blocks.2.linear'" in job.finding()["message"]


def test_a_loss_that_was_bad_itself_is_not_said_to_be_born_in_backward() -> None:
    from perfagent.rootcause.nonfinite import _culprit

    after = {"of": 4, "nonfinite": 2, "first": [{"name": "a.weight"}], "last": "a.bias", "good_from": "unused.weight"}
    assert _culprit({"parameters_after": after, "loss": math.nan}, {})["cause"] == "parameter"
    assert _culprit({"parameters_after": after, "loss": 0.5}, {})["cause"] == "backward"


# ---- the usual guards, before any backward pass


def test_a_run_that_logs_its_nan_and_leaves_tells_what_is_known(train):
    job = train()
    job.steps(5)
    job.model.head.weight.data[1, 1] = math.nan
    loss = job.model(torch.randn(6, 8)).square().mean()
    job.run.log({"train/loss": loss.item()})
    job.recorded.finish()
    found = evidence(job)
    assert (found["step"], found["cause"], found["parameter"]) == (6, "parameter", "head.weight")


def test_what_is_logged_as_no_number_is_looked_into_once_the_step_has_had_time_to_tell(train):
    from perfagent.delivery.drain import Taken
    from perfagent.rootcause import investigator

    job = train()
    look = job.run._investigator
    job.steps(5)
    rows = [(6, 0.0, 1.0, {"val_loss": math.nan, "note": math.inf, 3: math.nan}), (6, 0.0, 1.0, ("lr",), [math.nan])]
    look.pressing(Taken(rows, [], 2))
    assert look._bad_logged is None, "no training loss"
    look.pressing(Taken([(6, 0.0, 1.0, {"train/loss": math.nan})], [], 1))
    seen, step = look._bad_logged
    assert step == 6
    look.poll()
    assert look._inquiry is None
    look._bad_logged = (seen - investigator.SETTLED_S, step)
    job.model.embed.weight.data[0, 0] = math.nan
    job.look()
    assert look._inquiry is not None
    job.guard = True
    job.steps(2)
    found = evidence(job)
    assert (found["step"], found["first_module"]["module"]) == (6, "embed")


def test_a_run_that_ends_well_is_not_looked_at(train):
    job = train()
    job.steps(3)
    job.run.log({"train/loss": 0.5, "val_loss": math.nan})
    job.recorded.finish()
    assert job.events("finding") == []


def test_older_sound_steps_that_are_judged_meanwhile_change_nothing(train, monkeypatch):
    """The sender's thread judges step 5 while the training thread looks into step 6: step 7 must not be looked into as
    well."""
    from perfagent.rootcause.nonfinite import Inquiry

    job = train()
    job.steps(5)
    investigator, look = job.run._investigator, Inquiry.before_backward

    def looked_at_and_judged(inquiry, loss):
        investigator.judged_sound([5], ["loss"], lambda: [(5, {"loss": 1.0})])
        look(inquiry, loss)

    monkeypatch.setattr(Inquiry, "before_backward", looked_at_and_judged)
    job.spoil = lambda loss: loss * math.nan
    job.steps(3)
    found = evidence(job)
    assert (found["step"], found["cause"]) == (6, "operator")
    assert "nonfinite" not in found["parameters_before"] or found["parameters_before"]["nonfinite"] == 0
    assert investigator._inquiries == 1


class Attention(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.query, self.value, self.out = nn.Linear(size, size), nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, value = self.query(x), self.value(x)
        return self.out((query @ query.transpose(-1, -2) / 4).softmax(-1) @ value)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = (
            nn.Linear(8, 16),
            nn.ModuleList([Attention(16), Attention(16)]),
            nn.Linear(16, 4),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)[None]
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)[0]


def test_what_overflows_in_half_precision_is_named_and_not_the_softmax_that_made_nan_of_it(train):
    """Neither the product of the matrices nor the division keeps what it made: the softmax is the first to show it."""
    job = train(Transformer())
    job.steps(5)
    with torch.no_grad():
        job.model.blocks[1].query.weight.fill_(60.0)
    with torch.autocast("cpu", torch.float16):
        job.step(torch.ones(6, 8) * 10)
    job.steps(2)
    found = evidence(job)
    assert (found["operator"]["operator"], found["operator"]["made"]) == ("Bmm", "inf")
    assert (found["module"], found["module_class"]) == ("blocks.1", "Attention")
    assert (found["after_module"], found["before_module"]) == ("blocks.1.value", "blocks.1.out")
    assert "Bmm in module 'blocks.1' (Attention) between 'blocks.1.value' and" in job.finding()["message"]


def test_a_logarithm_of_nothing_is_named_and_not_what_added_it_up(train):
    job = train()
    job.steps(5)
    job.spoil = lambda loss: (torch.zeros(1) * (loss * 0).log() + loss).mean()
    job.step()
    job.spoil = lambda loss: loss
    job.steps(2)
    found = evidence(job)
    assert (found["operator"]["operator"], found["operator"]["made"], found["after_module"]) == ("Log", "-inf", "head")


def test_what_the_bad_step_spoilt_does_not_hide_the_operator_of_that_step(train):
    """The head was the first module to show it afterwards; the division by a spread of zero was before it."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
            self.on = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inner(x).relu()
            return self.head(x / x.std(-1, keepdim=True))

    job = train(Normed())
    job.steps(5)
    with torch.no_grad():
        job.model.inner.weight.zero_()
        job.model.inner.bias.zero_()
    job.step()
    with torch.no_grad():
        job.model.inner.weight.normal_()
    job.steps(2)
    found = evidence(job)
    assert (found["cause"], found["operator"]["operator"], found["operator"]["made"]) == ("operator", "Div", "nan")
    assert (found["after_module"], found["before_module"]) == ("inner", "head")


class Between(nn.Module):
    """between: what is computed between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(8, 8), nn.BatchNorm1d(8).eval(), nn.Linear(8, 4)
        self.between: Any = lambda x, norm: x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.between(self.inner(x), self.norm))


@pytest.mark.parametrize(
    ("between", "named"),
    [
        (lambda x, norm: (x.tanh() ** 0.5).sigmoid(), "Pow"),
        (
            lambda x, norm: nn.functional.dropout(x.tanh() ** 0.5, 0.1).view(2, 3, 8).transpose(0, 1).reshape(6, 8),
            "Pow",
        ),
        (lambda x, norm: norm(x).relu(), "NativeBatchNorm"),
        (lambda x, norm: (x * torch.full((8,), 1e30) * torch.full((8,), 1e30)).relu(), "Mul"),
    ],
)
def test_what_cannot_make_a_bad_value_of_good_ones_is_not_blamed_for_one(train, between, named):
    """A sigmoid, a view and a dropout keep at most what they made: the bad value was there before."""
    job = train(Between())
    job.steps(5)
    with torch.no_grad():
        job.model.norm.running_var[3] = -5.0
    job.model.between = between
    job.steps(4)
    assert evidence(job)["operator"]["operator"] == named


def test_what_is_compiled_is_not_said_to_end_before_the_bad_value(train):
    """Inside of it nothing can be seen, and finite outputs become no NaN in a softmax."""

    class Compiled(Between):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.inner(x).sigmoid().log() * self.norm.running_var)

    model = Compiled()
    model.compile(backend="aot_eager")
    job = train(model)
    job.steps(4)
    with torch.no_grad():
        job.model.norm.running_var[3] = -math.inf
    job.steps(4)
    assert evidence(job)["operator"]["operator"] == "CompiledFunction"
    assert "what torch.compile compiled put out the first non-finite value that can be seen" in job.finding()["message"]


def test_parameters_of_the_model_itself_are_named_where_no_module_is(train):
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.first / (x.sum() * self.scale)) @ self.last

        scale = 1.0

    job = train(Own())
    job.steps(5)
    job.model.scale = 0.0
    job.steps(4)
    assert "the operator Div between parameter 'first' and parameter 'last' made" in job.finding()["message"]


def test_parameters_that_were_all_spoilt_before_name_no_module(train):
    """As on a rank that was handed another one's gradients."""
    job = train()
    job.steps(5)
    with torch.no_grad():
        for parameter in job.model.parameters():
            parameter.fill_(math.nan)
    job.step()
    job.steps(2)
    found = evidence(job)
    assert (found["cause"], "module" in found) == ("spread", False)
    assert "Every parameter was non-finite before step 6's backward pass" in job.finding()["message"]


def test_a_loss_that_a_guard_raises_at_is_found_in_the_function_that_raised(train):
    """`if not torch.isfinite(loss): raise`, before any backward pass and without a word to us."""
    job = train()
    job.steps(5)

    def guarded_step(x: torch.Tensor) -> None:
        loss = (job.model(x) / (job.model(x).detach() * 0)).mean()
        if not torch.isfinite(loss):
            raise FloatingPointError("the loss is no number")

    before = [parameter.detach().clone() for parameter in job.model.parameters()]
    with pytest.raises(FloatingPointError) as raised:
        guarded_step(torch.ones(6, 8))
    job.run.fail(raised.value)
    found = evidence(job, of_crash=True)  # no row holds that loss: no other alert may say why it ended
    assert (found["step"], found["cause"], found["operator"]["operator"]) == (6, "operator", "Div")
    assert found["lr"] == 0.01
    assert [tensor["name"] for tensor in found["batch"]["tensors"]] == ["x"]
    assert all(torch.equal(one, other) for one, other in zip(before, job.model.parameters(), strict=True))


def test_what_to_do_fits_the_cause(train, make_net):
    """The learning rate has no part in a sample that is no number, nor in weights that were loaded so."""
    job = train()
    job.steps(5)
    job.step(torch.full((6, 8), math.nan))
    job.steps(4)
    assert evidence(job)["cause"] == "batch"
    assert "samples of that batch" in job.finding()["fix"]
    model = make_net()
    with torch.no_grad():
        model.head.weight[0, 0] = math.nan
    loaded = train(model)
    loaded.steps(4)
    assert (evidence(loaded)["cause"], evidence(loaded)["step"]) == ("parameter", 1)
    assert "the checkpoint that the weights were loaded from" in loaded.finding()["fix"]
    for told in (job, loaded):
        assert "learning rate" not in told.finding()["fix"]


@pytest.mark.parametrize("leave", ["sys.exit(1)", "sys.exit('Loss is nan, stopping training')", "exit(1)"])
def test_a_loss_that_a_guard_leaves_at_is_found_in_the_function_that_left(tmp_path, leave):
    """`print("Loss is nan, stopping training"); sys.exit(1)`, as the training scripts of many vision papers have it."""
    script = f"""
        import sys, torch, perfagent

        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        perfagent.attach(model, optimizer)

        def train_one_epoch():
            for step in range(6):
                loss = model(torch.ones(2, 4)).mean()
                if step == 5:
                    loss = (loss * 0 - 1).log()
                if not torch.isfinite(loss):
                    print("Loss is nan, stopping training")
                    {leave}
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

        train_one_epoch()
    """
    environment = job_environment(tmp_path, PERFAGENT_RECORD=str(tmp_path / "record"))
    (tmp_path / "train.py").write_text(textwrap.dedent(script))
    [done] = preloaded.run([str(tmp_path / "train.py")], tmp_path, [environment])
    assert done.returncode == 1, done.stderr
    (finding,) = Recording(tmp_path / "record").events("finding")
    assert (finding["evidence"]["step"], finding["evidence"]["operator"]["operator"]) == (6, "Log")


def test_an_exception_that_has_nothing_to_do_with_the_loss_is_no_finding(train):
    job = train()
    job.steps(5)
    loss = job.model(torch.ones(6, 8)).mean()
    try:
        raise ValueError(f"no such file, {loss.item()}")
    except ValueError as error:
        job.run.fail(error)
    assert job.events("finding") == []


def test_the_rows_of_the_last_seconds_are_in_the_history_although_they_are_read_after_it_is_told(train):
    job = train()
    job.look = lambda: None  # the sender's thread gets to nothing
    job.steps(5)
    job.spoil = lambda loss: loss * math.nan
    job.step()
    job.recorded.finish()  # only now rows are read
    history = evidence(job)["history"]
    assert [entry["step"] for entry in history] == [1, 2, 3, 4, 5, 6]
    assert [entry["loss"] for entry in history[:5]] == pytest.approx(job.losses[:5])


def test_the_loss_of_an_earlier_step_is_not_told_as_that_of_the_bad_one(train):
    job = train()
    job.steps(5)
    job.look = lambda: None
    job.spoil = lambda loss: loss * math.nan
    job.steps(3)
    for _ in range(4):
        job.run._investigator.poll()  # it is told although the rows of these steps are not read
    found = evidence(job)
    assert found["step"] == 6
    assert found["history"][-1]["step"] < 6
    assert found["lr"] == 0.01
    assert not {"loss", "grad_norm"} & found.keys()


def test_the_history_of_a_bad_step_is_told_however_many_followed_before_a_look(train):
    job = train()
    job.steps(5)
    look, job.look = job.look, lambda: None
    job.spoil = lambda loss: loss * math.nan
    job.steps(40)
    look()
    found = evidence(job)
    assert [entry["step"] for entry in found["history"]] == [1, 2, 3, 4, 5, 6]
    assert math.isnan(found["loss"])


def test_a_bad_step_whose_row_is_read_at_the_end_is_not_called_the_last(train):
    """A framework that leaves out the update of a bad step, twice within a second."""
    job = train()
    look, job.look = job.look, lambda: None  # the sender's thread gets to nothing
    job.guard = True
    for _ in range(2):
        job.steps(4)
        job.spoil = lambda loss: loss * math.nan
        job.step()
        job.spoil = lambda loss: loss
        job.steps(4)
        for _ in range(4):
            job.run._investigator.poll()  # the first is told, its row is not read
    look()
    job.recorded.finish()
    first, second = job.events("finding")
    assert (first["since_step"], second["since_step"]) == (5, 14)
    assert second["message"].startswith("Step 14 was looked into when it was over and 4 more were: ")
    assert second["message"].endswith("after step 18 the parameters were finite.")


class Halves(torch.autograd.Function):
    """A function of the user's that keeps nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x / 0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient


@pytest.mark.parametrize(
    ("between", "named", "made"),
    [
        (lambda x: torch.relu(x) + Halves.apply(x), "Halves", None),
        (lambda x: x.tanh() + (x * 1).div_(0.0), "Div", None),
        (lambda x: torch.cat([x.tanh()[:3], (x[3:] * 0).log() * 0.1]), "Log", "-inf"),
        (lambda x: x.tanh() + (x * 0).abs().log() * 0.1, "Log", "-inf"),
        (
            lambda x: torch.relu(x) + torch.logsumexp(torch.full_like(x, -math.inf) + x * 0, 1, keepdim=True),
            "Logsumexp",
            "-inf",
        ),
        (lambda x: torch.relu(x) + torch.full((8,), -math.inf), "Add", None),
    ],
)
def test_a_sum_is_not_blamed_for_what_it_was_given_nor_the_layer_behind_it(train, between, named, made):
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.norm, self.head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)
            self.between: Any = torch.tanh

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(self.between(self.inner(x))))

    job = train(Mixed())
    job.steps(5)
    job.model.between = between
    job.steps(2)
    found = evidence(job)
    assert (found["cause"], found["operator"]["operator"], found["operator"].get("made")) == ("operator", named, made)
    assert found["after_module"] == "inner"
    assert found["before_module"] == "norm"
    assert "module" not in found, "the bad value was made in none of them"


@pytest.mark.parametrize("lost", [True, False])
def test_what_cannot_be_seen_is_not_said_to_have_been_finite(train, lost):
    """A row that is masked as a whole; two tensors that nobody kept."""

    class Masks(Between):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.between(self.inner(x)))

    job = train(Masks())
    job.model.between = torch.tanh
    job.steps(5)
    mask = torch.zeros(6, 8).masked_fill(torch.arange(6)[:, None] == 2, -math.inf)
    job.model.between = (lambda x: (x + mask).softmax(-1)) if lost else (lambda x: Halves.apply(x) + Halves.apply(-x))
    job.steps(2)
    message = job.finding()["message"]
    seen = "In step 6 the operator {} between 'inner' and 'head' put out the first non-finite value that can be seen{}"
    if lost:
        assert message == seen.format("Softmax", ": it makes NaN where a mask leaves nothing of a row.")
    else:
        assert message == seen.format("Add", "; Addmm read it.")


def test_a_parameter_that_no_loss_comes_from_does_not_hide_where_gradients_became_nan(train):
    """A square root of nothing, whose gradient is infinite; beside it lies a parameter that is not used, and stays
    good."""

    class Rooted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.unused, self.inner, self.head = (
                nn.Linear(8, 8),
                nn.Linear(8, 8),
                nn.Linear(8, 8),
                nn.Linear(8, 4),
            )
            self.on = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inner(self.embed(x).tanh())
            return self.head((x - x.detach() * self.on).abs().sqrt())

    job = train(Rooted())
    job.steps(5)
    job.model.on = True
    job.step()
    job.model.on = False
    job.steps(2)
    found = evidence(job)
    assert (found["cause"], found["module"], found["good_from"]) == ("backward", "inner", "head.weight")
    assert (
        "gradients came back non-finite from what lies between 'inner' (Linear) and 'head'" in job.finding()["message"]
    )


def test_a_model_that_is_gone_when_it_is_told_has_been_looked_at(train):
    job = train(Transformer())
    job.steps(5)
    with torch.no_grad():
        job.model.blocks[1].query.weight.fill_(60.0)
    with torch.autocast("cpu", torch.float16):
        job.step(torch.ones(6, 8) * 10)
    job.run._investigator.model = lambda: None
    job.recorded.finish()
    assert "in module 'blocks.1' (Attention) between" in job.finding()["message"]


@pytest.mark.parametrize("kept", ["frozen", "unused"])
def test_parameters_that_stay_good_for_no_gradient_reaches_them_do_not_make_the_first_module_the_cause(train, kept):
    """Activation checkpointing: of the bad step nothing can be seen, and then every parameter that is trained is
    spoilt."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.inner, self.head, self.beside = (
                nn.Linear(8, 8),
                nn.Linear(8, 8),
                nn.Linear(8, 4),
                nn.Linear(8, 8),
            )
            self.by = 1.0
            self.beside.requires_grad_(kept == "unused")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if kept == "frozen":
                x = self.beside(x)
            x = self.embed(x)
            return self.head(checkpoint(lambda y: self.inner(y) / self.by, x, use_reentrant=False))

    job = train(Checkpointed())
    job.steps(5)
    job.model.by = 0.0
    job.step()
    job.model.by = 1.0
    job.steps(2)
    found = evidence(job)
    assert (found["cause"], found["module"]) == ("spread", "embed")
    assert (
        "By then every parameter that is trained was non-finite, so step 6 may have begun" in job.finding()["message"]
    )
