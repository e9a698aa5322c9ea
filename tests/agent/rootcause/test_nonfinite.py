"""Where a NaN came from: trainings that go wrong for real, each in another way."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from agent.rootcause.conftest import Net, Training
from quantized import InEightBits
from torch import nn
from torch.utils.checkpoint import checkpoint

F = nn.functional
INF, NAN = math.inf, math.nan


class Function(torch.autograd.Function):
    """A function of a user's: the gradient passes as it is."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Halves(Function):
    """Keeps nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x / 0


class Keeps(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * NAN


class SpoiltBackward(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * NAN


class Between(nn.Module):
    """between: what is computed between two layers."""

    def __init__(self, last: nn.Module | None = None) -> None:
        super().__init__()
        self.inner, self.unused, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8).eval()
        self.last, self.head = last or nn.Identity(), nn.Linear(8, 4)
        self.between: Callable[[torch.Tensor], torch.Tensor] = torch.tanh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.last(self.between(self.inner(x))))


def normed() -> Between:
    return Between(nn.LayerNorm(8))


class Compiled(Between):
    """A logarithm, and a statistic that a test spoils."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x).sigmoid().log() * self.norm.running_var)


def compiled() -> Compiled:
    model = Compiled()
    model.compile(backend="aot_eager")
    return model


class Own(nn.Module):
    """Has parameters itself, and no modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 4))
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.first / (x.sum() * self.scale)) @ self.last


class Added(nn.Module):
    """An addition keeps nothing: what came in through it is first seen in what the exponential made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.head = nn.Parameter(torch.zeros(8)), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.exp(x + self.place))


class Normalized(nn.Module):
    """Leaves out the gaps of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.embed(torch.nan_to_num(x)))))


def frozen_norm() -> Normalized:
    model = Normalized()
    model.norm.eval()
    return model


class Checkpointed(nn.Module):
    """Of its bad step nothing can be seen, and then every parameter that is trained is spoilt."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.beside, self.by = nn.Linear(8, 8).requires_grad_(kept == "unused"), 1.0
        self.first: nn.Module = self.beside if kept == "frozen" else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(self.first(x))
        return self.head(checkpoint(lambda y: self.inner(y) / self.by, x, use_reentrant=False))


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.gate(x)
        return logits.masked_fill(logits < logits.topk(2).values[:, -1:], -INF)


class Masked(nn.Module):
    """A router and a decoder, both with -inf where nothing may pass. mask: what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.router, self.head = nn.Linear(8, 16), Router(), nn.Linear(16, 4)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        own = nn.Transformer.generate_square_subsequent_mask(len(x)) if mask is None else mask
        hidden = self.layer(self.embed(x)[None], src_mask=own)[0]
        return self.head(hidden if mask is not None else hidden * self.router(hidden).softmax(-1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.value, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, value = self.query(x), self.value(x)
        return self.out((query @ query.transpose(-1, -2) / 4).softmax(-1) @ value)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
        self.blocks = nn.ModuleList([Attention(), Attention()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)[None]
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)[0]


Does = Callable[[Training], object]


def loss(spoil: Callable[[torch.Tensor], torch.Tensor]) -> Does:
    return lambda job: job.spoilt(spoil)


def between(made: Callable[[torch.Tensor], torch.Tensor]) -> Does:
    """From then on, so that later steps are bad as well."""
    return lambda job: setattr(job.model, "between", made)


def write(name: str, value: float) -> Does:
    """Into the first row of a parameter or buffer."""

    def does(job: Training) -> None:
        module, _, own = name.rpartition(".")
        with torch.no_grad():
            getattr(job.model.get_submodule(module), own)[:1] = value

    return does


def batch(value: float) -> Does:
    """One value of one batch."""

    def does(job: Training) -> None:
        x = torch.randn(6, 8)
        x[2, 3] = value
        job.step(x)

    return does


def with_gaps() -> torch.Tensor:
    x = torch.randn(6, 8)
    x[4:, 3:] = NAN
    return x


def half_precision(job: Training) -> None:
    """Neither the product of the matrices nor the division keeps what it made: the softmax is the first to show it."""
    with torch.no_grad():
        job.model.blocks[1].query.weight.fill_(60.0)
    with torch.autocast("cpu", torch.float16):
        job.step(torch.ones(6, 8) * 10)


def spoilt_on_its_way_back(job: Training) -> None:
    job.model.embed.requires_grad_(False)  # stays good although it lies behind
    handle = job.model.blocks[1].register_forward_hook(lambda _module, _inputs, output: SpoiltBackward.apply(output))
    job.step()
    handle.remove()


def everything_spoilt(job: Training) -> None:
    """As on a rank that was handed another one's gradients."""
    with torch.no_grad():
        for parameter in job.model.parameters():
            parameter.fill_(NAN)


def called_with_a_mask(job: Training) -> None:
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    job.call = lambda x: job.model(x, mask)
    job.spoil = bad_exponent


def bad_exponent(loss: torch.Tensor) -> torch.Tensor:
    return loss * torch.log(loss - 1000)


def divided_once(job: Training) -> None:
    job.model.by = 0.0
    job.step()
    job.model.by = 1.0


def unread_statistic(job: Training) -> None:
    write("norm.running_var", NAN)(job)
    job.step()
    job.spoil = lambda loss: (loss * 1e4).exp()


def padded_batches(job: Training) -> None:
    job.inputs = with_gaps
    job.spoil = lambda loss: (loss * 1e4).exp()


@dataclass
class Case:
    """does: what goes wrong, before step 6 or in it. guard: the loop leaves out the update of a bad step. found: of the
    evidence, by its place; None: it is not there. says: of the message."""

    does: Does
    found: dict[str, Any]
    says: str = ""
    model: Callable[[], nn.Module] = Net
    guard: bool = False


ANY = object()


def operator(name: str, made: object = ANY, **more: Any) -> dict[str, Any]:
    """The evidence of an operator. made: of what kind its value is said to be."""
    return {"cause": "operator", "operator.operator": name, **({} if made is ANY else {"operator.made": made}), **more}


IN_BETWEEN = {"after_module": "inner", "before_module": "last", "module": None}
SPREAD = {"cause": "spread", "module": "embed"}
EVERY = "every parameter that is trained"
SEEN = "first non-finite value that can be seen"

# fmt: off
CASES = {
    # ---- operators
    "division by nothing": Case(
        loss(lambda loss: (loss * 0) / (loss.detach() * 0)),
        operator("Div", after_module="head", **{"parameters_before.nonfinite": 0}), "from finite inputs"),
    "logarithm of nothing, added up": Case(
        loss(lambda loss: (torch.zeros(1) * (loss * 0).log() + loss).mean()), operator("Log", "-inf", after_module="head")),
    "-inf that becomes NaN": Case(
        loss(lambda loss: ((loss * 0).log() * (loss * 0)).mean()),
        operator("Mul", **{"operator.minus_infinity.from": "Log"}), "from the -inf that Log had made"),
    "a function of the user's": Case(loss(lambda loss: Keeps.apply(loss.view(1)).mean()), operator("Keeps"), guard=True),
    "a root of what is negative": Case(between(lambda x: (x.tanh() ** 0.5).sigmoid()), operator("Pow"), model=Between),
    "views and a dropout behind it": Case(
        between(lambda x: F.dropout(x.tanh() ** 0.5, 0.1).view(2, 3, 8).transpose(0, 1).reshape(6, 8)),
        operator("Pow"), model=Between),
    "a negative variance": Case(
        between(lambda x: F.batch_norm(x, torch.zeros(8), torch.full((8,), -5.0)).relu()),
        operator("NativeBatchNorm"), model=Between),
    "an overflow": Case(between(lambda x: (x * 1e30 * torch.full((8,), 1e30)).relu()), operator("Mul"), model=Between),
    "a spread of nothing": Case(
        between(lambda x: (x * 0) / (x * 0).std(-1, keepdim=True)),
        operator("Div", "nan", after_module="inner", before_module="head"), model=Between),
    "half precision": Case(
        half_precision,
        operator("Bmm", "inf", module="blocks.1", after_module="blocks.1.value", before_module="blocks.1.out"),
        "Bmm in module 'blocks.1' (Attention) between 'blocks.1.value'", Transformer),
    "parameters of the model itself": Case(
        lambda job: setattr(job.model, "scale", 0.0), operator("Div"), "between parameter 'first' and parameter 'last'", Own),
    "inside of what is compiled": Case(
        write("norm.running_var", -INF), operator("CompiledFunction"), f"torch.compile compiled put out the {SEEN}", compiled),
    # a sum is not blamed for what it was given, nor is the layer behind it
    "a function that keeps nothing": Case(
        between(lambda x: torch.relu(x) + Halves.apply(x)), operator("Halves", None, **IN_BETWEEN), model=normed),
    "division in place": Case(
        between(lambda x: x.tanh() + (x * 1).div_(0.0)), operator("Div", None, **IN_BETWEEN), model=normed),
    "a part of a concatenation": Case(
        between(lambda x: torch.cat([x.tanh()[:3], (x[3:] * 0).log() * 0.1])),
        operator("Log", "-inf", **IN_BETWEEN), model=normed),
    "a term of a sum": Case(
        between(lambda x: x.tanh() + (x * 0).abs().log() * 0.1), operator("Log", "-inf", **IN_BETWEEN), model=normed),
    "a reduction": Case(
        between(lambda x: torch.relu(x) + torch.logsumexp(torch.full_like(x, -INF) + x * 0, 1, keepdim=True)),
        operator("Logsumexp", "-inf", **IN_BETWEEN), model=normed),
    "the sum itself": Case(
        between(lambda x: torch.relu(x) + torch.full((8,), -INF)), operator("Add", None, **IN_BETWEEN), model=normed),
    # what cannot be seen is not said to have been finite
    "a row that is masked as a whole": Case(
        between(lambda x: (x + torch.zeros(6, 8).masked_fill(torch.arange(6)[:, None] == 2, -INF)).softmax(-1)),
        operator("Softmax"), f"{SEEN}: it makes NaN where a mask", Between),
    "two tensors that nobody kept": Case(
        between(lambda x: Halves.apply(x) + Halves.apply(-x)), operator("Add"), f"{SEEN}; Addmm read it", Between),
    # ---- minus infinity, which is what masks hold
    "masks are no cause": Case(
        lambda job: setattr(job, "spoil", bad_exponent),
        operator("Log", first_module=None, **{"first_minus_infinity.module": "router"}),
        model=Masked, guard=True),
    "a mask that the model is called with": Case(
        called_with_a_mask, operator("Log", **{"later_batch.tensors.1.minus_infinite": 15}), model=Masked, guard=True),
    "masks of later steps": Case(
        lambda job: job.watch.suspect(torch.tensor(NAN)), {"cause": "unknown"}, "by module 'router'", Masked, True),
    # ---- batches
    "-inf in a batch": Case(
        batch(-INF), {"cause": "batch", "batch_tensor": "inputs", "operator.minus_infinity": {"read_as": ["mat1"]}}),
    "a batch that no operator kept": Case(lambda job: job.step(with_gaps()), {"cause": "batch"}, model=Added, guard=True),
    "gaps that are left out": Case(
        padded_batches, operator("Exp", **{"batch.tensors.0.nonfinite": 10}), model=Normalized, guard=True),
    # ---- what is kept beside the parameters
    "a statistic that is read": Case(
        write("norm.running_var", NAN), {"cause": "buffer", "module": "norm", "buffer": "norm.running_var"},
        "of module 'norm' (BatchNorm1d)", frozen_norm, True),
    "a statistic that training does not read": Case(unread_statistic, operator("Exp"), model=Normalized, guard=True),
    # ---- backward, and what is spoilt as a whole
    "a gradient on its way back": Case(
        spoilt_on_its_way_back,
        {"cause": "backward", "parameter": "blocks.1.linear.bias", "good_from": "blocks.2.linear.weight"},
        "between 'blocks.1.linear' (Linear) and 'blocks.2.linear'"),
    "an infinite gradient, and a parameter that is not used": Case(
        between(lambda x: (x - x.detach()).abs().sqrt()),
        {"cause": "backward", "module": "inner", "good_from": "head.weight"}, "'inner' (Linear) and 'head'", Between),
    "every parameter": Case(everything_spoilt, {"cause": "spread", "module": None}, "Every parameter was non-finite"),
    "all but a frozen one": Case(divided_once, SPREAD, EVERY, lambda: Checkpointed("frozen")),
    "all but one that is not used": Case(divided_once, SPREAD, EVERY, lambda: Checkpointed("unused")),
}
# fmt: on


def at(found: Any, place: str) -> Any:
    for key in place.split("."):
        found = found[int(key)] if isinstance(found, list) else (found or {}).get(key)
    return found


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_cause_is_named(train, case):
    job = train(case.model())
    job.guard = case.guard
    job.steps(5)
    case.does(job)
    job.steps(4)
    found = job.finding()
    assert found["explains"] == ["nonfinite_loss", "nonfinite_gradient"]
    assert {place: at(found["evidence"], place) for place in case.found} == case.found
    assert case.says in found["message"]


def test_a_bad_parameter_is_named_with_its_module_and_step(train):
    job = train(lr=0.02)
    job.steps(5)
    with torch.no_grad():
        job.model.blocks[1].linear.weight[0, :3] = NAN
    job.steps(4)
    found = job.finding()["evidence"]
    name = "blocks.1.linear.weight"
    assert (found["cause"], found["step"], found["module"], found["parameter"]) == (
        "parameter",
        6,
        "blocks.1.linear",
        name,
    )
    assert found["module_class"] == "Linear"
    before = found["parameters_before"]
    assert (before["of"], before["nonfinite"], before["last"]) == (10, 1, name)
    (first,) = before["first"]
    assert (first["nonfinite"], first["shape"], first["dtype"]) == (3, [16, 16], "float32")
    assert found["parameters_after"]["nonfinite"] == 10, "the step was taken: everything is bad after it"
    assert f"'{name}' of module 'blocks.1.linear' (Linear)" in job.finding()["message"]
    assert (found["rank"], found["lr"], found["loss_dtype"], math.isnan(found["loss"])) == (0, 0.02, "float32", True)
    assert [entry["step"] for entry in found["history"]] == [1, 2, 3, 4, 5, 6]
    assert [entry["loss"] for entry in found["history"]][:5] == job.losses[:5]


def test_a_bad_batch_is_named_with_its_range_and_remedy(train):
    job = train()
    job.steps(5)
    batch(INF)(job)
    job.steps(2)
    found = job.finding()["evidence"]
    assert (found["cause"], found["batch_tensor"], found["batch"]["step"]) == ("batch", "inputs", 6)
    tensors = {tensor["name"]: tensor for tensor in found["batch"]["tensors"]}
    inputs, labels = tensors["inputs"], tensors["y"]
    assert (inputs["shape"], inputs["dtype"], inputs["nonfinite"], inputs["max"]) == ([6, 8], "float32", 1, INF)
    assert (labels["dtype"], labels["nonfinite"]) == ("int64", 0)
    assert 0 <= labels["min"] <= labels["max"] <= 3
    fix = job.finding()["fix"]
    assert "samples" in fix
    assert "learning rate" not in fix


def test_weights_that_were_loaded_bad_are_said_to_be(train):
    model = Net()
    with torch.no_grad():
        model.head.weight[0, 0] = NAN
    job = train(model)
    job.steps(4)
    found = job.finding()
    assert (found["evidence"]["cause"], found["evidence"]["step"]) == ("parameter", 1)
    assert "checkpoint" in found["fix"]
    assert "learning rate" not in found["fix"]


def test_a_module_is_named_while_the_parameters_are_good(train):
    """A loop that does not step on a bad loss: the next steps show which module it is."""
    job = train()
    job.guard = True
    job.steps(5)
    job.model.blocks[1].broken = NAN
    job.steps(4)
    found = job.finding()["evidence"]
    assert (found["cause"], found["module"], found["module_class"]) == ("module", "blocks.1", "Block")
    first = found["first_module"]
    assert (first["step"], first["inputs_finite"], first["shape"], first["dtype"]) == (7, True, [6, 16], "float32")
    assert (first["nonfinite"], first["share"]) == (6, 1 / 16)
    assert found["later_batch"]["tensors"][0]["name"] == "x", "what the model was called with, by the model's own names"
    assert found["parameters_after"]["nonfinite"] == 0


def test_what_does_not_come_back_is_told_after_three_steps(train):
    job = train()
    job.guard = True
    job.steps(5)
    job.model.blocks[1].broken = INF
    job.step()
    job.model.blocks[1].broken = None
    job.steps(2)
    assert job.events("finding") == []
    job.step()
    found = job.finding()["evidence"]
    assert (found["steps_checked_after"], "first_module" in found) == (3, False)
    assert (found["operator"]["read_by"], found["operator"]["read_as"]) == ("Mul", ["other"]), (
        "what it was multiplied by"
    )
    assert found["after_module"] == "blocks.1.linear", "autograd's graph of the bad step still says where"


OF_TARGETS = {
    "mean squared error": F.mse_loss,
    "cross entropy": F.binary_cross_entropy_with_logits,
    "weights": lambda out, y: (out * y).mean(),
    "distance": lambda out, y: torch.cdist(out, y).mean(),
    "joined": lambda out, y: torch.cat([out, y], -1).logsumexp(-1).mean(),
    "difference": lambda out, y: (out - y).square().mean(),
}


@pytest.mark.parametrize("loss_of", OF_TARGETS.values(), ids=OF_TARGETS.keys())
def test_bad_targets_are_the_cause_not_what_lies_beside_them(train, loss_of):
    job = train()
    for number in range(7):
        x, y = torch.randn(6, 8), torch.rand(6, 4)
        if number == 3:
            y[3] = NAN
        job.optimizer.zero_grad()
        loss_of(job.model(x), y).backward()
        job.optimizer.step()
        job.look()
    found = job.finding()["evidence"]
    assert (found["cause"], found["batch_tensor"], found["batch_step"]) == ("batch", "y", 4)
    assert found["operator"].get("operator") in (None, "Cat", "Sub", "Pow", "Square"), "where it came in, not the model"


class Odd(Normalized):
    """An adapted model: its base cannot be looked at."""

    def __init__(self, base: torch.Tensor | None) -> None:
        super().__init__()
        lazy = nn.UninitializedParameter(requires_grad=False)
        self.base = nn.Parameter(base, requires_grad=False) if base is not None else lazy


ODD = {"eight bits": torch.randn(4).to(torch.float8_e4m3fn), "codes and scales": InEightBits(8), "not there yet": None}


@pytest.mark.parametrize("base", ODD.values(), ids=ODD.keys())
def test_a_parameter_that_cannot_be_read_hides_no_other(train, base):
    job = train()
    job.steps(3)
    job.model.adapted = Odd(base)
    write("head.bias", NAN)(job)
    job.steps(3)
    assert job.finding()["evidence"]["parameter"] == "head.bias"


def test_scales_that_are_no_numbers_are_their_parameters(train):
    job = train()
    job.steps(3)
    job.model.adapted = Odd(InEightBits(8))
    job.model.adapted.base.scales[1] = NAN
    job.spoil = lambda loss: loss * NAN
    job.steps(3)
    found = job.finding()["evidence"]
    assert (found["parameter"], found["parameters_before"]["nonfinite"]) == ("adapted.base", 1)
