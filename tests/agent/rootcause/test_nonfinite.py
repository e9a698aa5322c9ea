"""Where a NaN came from: trainings that go wrong for real, each in another way."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from agent.rootcause.conftest import Made, Net, Training, linears
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


def between_layers(last: nn.Module | None = None) -> nn.Module:
    """between: what is computed between two layers; beside them lies one that is not used."""
    return Made(
        lambda self, x: self.head(self.last(self.between(self.inner(x)))),
        **linears("inner", "unused", "head"), last=last or nn.Identity(), between=torch.tanh,
    )  # fmt: skip


def with_norm() -> nn.Module:
    return between_layers(nn.LayerNorm(8))


def compiled() -> nn.Module:
    """A logarithm, and a statistic that a test spoils."""
    model = Made(
        lambda self, x: self.head(self.inner(x).sigmoid().log() * self.norm.running_var),
        **linears("inner", "head"), norm=nn.BatchNorm1d(8).eval(),
    )  # fmt: skip
    model.compile(backend="aot_eager")
    return model


def own_parameters() -> nn.Module:
    """Has no modules."""
    parts = {"first": nn.Parameter(torch.randn(8, 8)), "last": nn.Parameter(torch.randn(8, 4)), "scale": 1.0}
    return Made(lambda self, x: (x @ self.first / (x.sum() * self.scale)) @ self.last, **parts)


def added() -> nn.Module:
    """An addition keeps nothing: what came in through it is first seen in what the exponential made of it."""
    place = nn.Parameter(torch.zeros(8))
    return Made(lambda self, x: self.head(torch.exp(x + self.place)), place=place, **linears("head"))


def normalized() -> nn.Module:
    """Leaves out the gaps of its inputs."""
    return Made(
        lambda self, x: self.head(torch.relu(self.norm(self.embed(torch.nan_to_num(x))))),
        **linears("embed", "head", size=16), norm=nn.BatchNorm1d(16),
    )  # fmt: skip


def frozen_norm() -> nn.Module:
    model = normalized()
    model.norm.eval()
    return model


def checkpointed(kept: str) -> nn.Module:
    """Of its bad step nothing can be seen, and then every parameter that is trained is spoilt."""

    def computes(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(self.beside(x) if kept == "frozen" else x)
        return self.head(checkpoint(lambda y: self.inner(y) / self.by, x, use_reentrant=False))

    beside = nn.Linear(8, 8).requires_grad_(kept == "unused")
    return Made(computes, **linears("embed", "inner", "head"), beside=beside, by=1.0)


def masked() -> nn.Module:
    """A decoder, which may be called with its mask, and a router, both with -inf where nothing may pass."""

    def route(self: Any, x: torch.Tensor) -> torch.Tensor:
        logits = self.gate(x)
        return logits.masked_fill(logits < logits.topk(2).values[:, -1:], -INF)

    def computes(self: Any, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        own = nn.Transformer.generate_square_subsequent_mask(len(x)) if mask is None else mask
        hidden = self.layer(self.embed(x)[None], src_mask=own)[0]
        return self.head(hidden if mask is not None else hidden * self.router(hidden).softmax(-1))

    router = Made(route, **linears("gate", size=16))
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return Made(computes, **linears("embed", size=16), router=router, layer=layer, **linears("head", size=16))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.value, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, value = self.query(x), self.value(x)
        return self.out((query @ query.transpose(-1, -2) / 4).softmax(-1) @ value)


def transformer() -> nn.Module:
    def computes(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)[None]
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)[0]

    blocks = nn.ModuleList([Attention(), Attention()])
    return Made(computes, **linears("embed", size=16), blocks=blocks, **linears("head", size=16))


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


def broken_once(job: Training) -> None:
    job.model.blocks[1].broken = INF
    job.step()
    job.model.blocks[1].broken = None


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
    evidence, by its place; None: it is not there. says, fix: of the message and of what to do. step: whose loss is bad."""

    does: Does
    found: dict[str, Any]
    says: str = ""
    model: Callable[[], nn.Module] = Net
    guard: bool = False
    fix: str = ""
    step: int = 6


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
    "a root behind a view and a dropout": Case(
        between(lambda x: F.dropout((x.tanh() ** 0.5).sigmoid(), 0.1).view(2, 3, 8).transpose(0, 1).reshape(6, 8)),
        operator("Pow"), model=between_layers),
    "a negative variance": Case(
        between(lambda x: F.batch_norm(x, torch.zeros(8), torch.full((8,), -5.0)).relu()),
        operator("NativeBatchNorm"), model=between_layers),
    "an overflow": Case(between(lambda x: (x * 1e30 * torch.full((8,), 1e30)).relu()), operator("Mul"), model=between_layers),
    "a spread of nothing": Case(
        between(lambda x: (x * 0) / (x * 0).std(-1, keepdim=True)),
        operator("Div", "nan", after_module="inner", before_module="head"), model=between_layers),
    "half precision": Case(
        half_precision,
        operator("Bmm", "inf", module="blocks.1", after_module="blocks.1.value", before_module="blocks.1.out"),
        "Bmm in module 'blocks.1' (Attention) between 'blocks.1.value'", transformer),
    "parameters of the model itself": Case(
        lambda job: setattr(job.model, "scale", 0.0), operator("Div"), "parameter 'first' and parameter 'last'", own_parameters),
    "inside of what is compiled": Case(
        write("norm.running_var", -INF), operator("CompiledFunction"), f"torch.compile compiled put out the {SEEN}", compiled),
    # a sum is not blamed for what it was given, nor is the layer behind it
    "a function that keeps nothing": Case(
        between(lambda x: torch.relu(x) + Halves.apply(x)), operator("Halves", None, **IN_BETWEEN), model=with_norm),
    "division in place": Case(
        between(lambda x: x.tanh() + (x * 1).div_(0.0)), operator("Div", None, **IN_BETWEEN), model=with_norm),
    "a part of a concatenation": Case(
        between(lambda x: torch.cat([x.tanh()[:3], (x[3:] * 0).log() * 0.1])),
        operator("Log", "-inf", **IN_BETWEEN), model=with_norm),
    "a term of a sum": Case(
        between(lambda x: x.tanh() + (x * 0).abs().log() * 0.1), operator("Log", "-inf", **IN_BETWEEN), model=with_norm),
    "a reduction": Case(
        between(lambda x: torch.relu(x) + torch.logsumexp(torch.full_like(x, -INF) + x * 0, 1, keepdim=True)),
        operator("Logsumexp", "-inf", **IN_BETWEEN), model=with_norm),
    "the sum itself": Case(
        between(lambda x: torch.relu(x) + torch.full((8,), -INF)), operator("Add", None, **IN_BETWEEN), model=with_norm),
    # what cannot be seen is not said to have been finite
    "a row that is masked as a whole": Case(
        between(lambda x: (x + torch.zeros(6, 8).masked_fill(torch.arange(6)[:, None] == 2, -INF)).softmax(-1)),
        operator("Softmax"), f"{SEEN}: it makes NaN where a mask", between_layers),
    "two tensors that nobody kept": Case(
        between(lambda x: Halves.apply(x) + Halves.apply(-x)), operator("Add"), f"{SEEN}; Addmm read it", between_layers),
    # ---- minus infinity, which is what masks hold
    "masks are no cause": Case(
        lambda job: setattr(job, "spoil", bad_exponent),
        operator("Log", first_module=None, **{"first_minus_infinity.module": "router"}),
        model=masked, guard=True),
    "a mask that the model is called with": Case(
        called_with_a_mask, operator("Log", **{"later_batch.tensors.1.minus_infinite": 15}), model=masked, guard=True),
    "masks of later steps": Case(
        lambda job: job.watch.suspect(torch.tensor(NAN)), {"cause": "unknown"}, "by module 'router'", masked, True),
    # ---- batches
    "an infinite value": Case(
        batch(INF),
        {"cause": "batch", "batch_tensor": "inputs", "batch.step": 6, "batch.tensors.0.shape": [6, 8], "batch.tensors.0.max": INF,
         "batch.tensors.0.dtype": "float32", "batch.tensors.0.nonfinite": 1, "batch.tensors.2.name": "y",
         "batch.tensors.2.dtype": "int64", "batch.tensors.2.nonfinite": 0},
        fix="samples of that batch"),
    "-inf in a batch": Case(
        batch(-INF), {"cause": "batch", "batch_tensor": "inputs", "operator.minus_infinity": {"read_as": ["mat1"]}}),
    "a batch that no operator kept": Case(lambda job: job.step(with_gaps()), {"cause": "batch"}, model=added, guard=True),
    "gaps that are left out": Case(
        padded_batches, operator("Exp", **{"batch.tensors.0.nonfinite": 10}), model=normalized, guard=True),
    # ---- parameters, and what is kept beside them
    "a parameter": Case(
        write("blocks.1.linear.weight", NAN),
        {"cause": "parameter", "module": "blocks.1.linear", "module_class": "Linear", "parameter": "blocks.1.linear.weight",
         "parameters_before.of": 10, "parameters_before.nonfinite": 1, "parameters_before.last": "blocks.1.linear.weight",
         "parameters_before.first.0.nonfinite": 16, "parameters_before.first.0.shape": [16, 16],
         "parameters_after.nonfinite": 10, "rank": 0, "lr": 0.01, "loss_dtype": "float32"},
        "'blocks.1.linear.weight' of module 'blocks.1.linear' (Linear)"),
    "a statistic that is read": Case(
        write("norm.running_var", NAN), {"cause": "buffer", "module": "norm", "buffer": "norm.running_var"},
        "of module 'norm' (BatchNorm1d)", frozen_norm, True),
    "a statistic that training does not read": Case(unread_statistic, operator("Exp"), model=normalized, guard=True, step=7),
    # ---- modules, which the next steps show where the loop does not step on a bad loss
    "a module": Case(
        lambda job: setattr(job.model.blocks[1], "broken", NAN),
        {"cause": "module", "module": "blocks.1", "module_class": "Block", "first_module.step": 7,
         "first_module.inputs_finite": True, "first_module.shape": [6, 16], "first_module.dtype": "float32",
         "first_module.nonfinite": 6, "first_module.share": 1 / 16, "later_batch.tensors.0.name": "x",
         "parameters_after.nonfinite": 0}, guard=True),
    "a module, once": Case(
        broken_once,
        {"steps_checked_after": 3, "first_module": None, "operator.read_by": "Mul", "operator.read_as": ["other"],
         "after_module": "blocks.1.linear"}, guard=True),
    # ---- backward, and what is spoilt as a whole
    "a gradient on its way back": Case(
        spoilt_on_its_way_back,
        {"cause": "backward", "parameter": "blocks.1.linear.bias", "good_from": "blocks.2.linear.weight"},
        "between 'blocks.1.linear' (Linear) and 'blocks.2.linear'", step=7),
    "an infinite gradient, and a parameter that is not used": Case(
        between(lambda x: (x - x.detach()).abs().sqrt()),
        {"cause": "backward", "module": "inner", "good_from": "head.weight"}, "'inner' (Linear) and 'head'", between_layers,
        step=7),
    "every parameter": Case(everything_spoilt, {"cause": "spread", "module": None}, "Every parameter was non-finite"),
    "all but a frozen one": Case(divided_once, SPREAD, EVERY, lambda: checkpointed("frozen")),
    "all but one that is not used": Case(divided_once, SPREAD, EVERY, lambda: checkpointed("unused")),
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
    found, evidence = job.finding(), job.finding()["evidence"]
    assert found["explains"] == ["nonfinite_loss", "nonfinite_gradient"]
    assert {place: at(evidence, place) for place in case.found} == case.found
    assert case.says in found["message"]
    assert case.fix in found["fix"]
    assert "learning rate" not in found["fix"] or not case.fix
    assert evidence["step"] == case.step
    assert [entry["step"] for entry in evidence["history"]] == [*range(1, case.step + 1)]
    assert [entry["loss"] for entry in evidence["history"]][:5] == job.losses[:5]


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


def odd(base: torch.Tensor | None) -> nn.Module:
    """An adapted model: its base cannot be looked at."""
    lazy = nn.UninitializedParameter(requires_grad=False)
    return Made(torch.tanh, base=lazy if base is None else nn.Parameter(base, requires_grad=False))


ODD = {"eight bits": torch.randn(4).to(torch.float8_e4m3fn), "codes and scales": InEightBits(8), "not there yet": None}


@pytest.mark.parametrize("base", ODD.values(), ids=ODD.keys())
def test_a_parameter_that_cannot_be_read_hides_no_other(train, base):
    job = train()
    job.steps(3)
    job.model.adapted = odd(base)
    write("head.bias", NAN)(job)
    job.steps(3)
    assert job.finding()["evidence"]["parameter"] == "head.bias"


def test_scales_that_are_no_numbers_are_their_parameters(train):
    job = train()
    job.steps(3)
    job.model.adapted = odd(InEightBits(8))
    job.model.adapted.base.scales[1] = NAN
    job.spoil = lambda loss: loss * NAN
    job.steps(3)
    found = job.finding()["evidence"]
    assert (found["parameter"], found["parameters_before"]["nonfinite"]) == ("adapted.base", 1)
