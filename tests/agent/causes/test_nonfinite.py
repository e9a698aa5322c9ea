"""Where a NaN came from: trainings that go wrong for real, each in another way."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from agent.causes.conftest import Made, Net, Training, linears
from quantized import InEightBits
from torch import nn
from torch.nn.modules import module

F = nn.functional
INF, NAN = math.inf, math.nan


class Halves(torch.autograd.Function):
    """Of a user's, which keeps nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x / 0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def spoil_gradient(output: torch.Tensor) -> torch.Tensor:
    output.register_hook(lambda gradient: gradient * NAN)
    return output


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


def masked() -> nn.Module:
    """A decoder and a router, both with -inf where nothing may pass."""

    def route(self: Any, x: torch.Tensor) -> torch.Tensor:
        logits = self.gate(x)
        return logits.masked_fill(logits < logits.topk(2).values[:, -1:], -INF)

    def computes(self: Any, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(len(x))
        hidden = self.layer(self.embed(x)[None], src_mask=mask)[0]
        return self.head(hidden * self.router(hidden).softmax(-1))

    router = Made(route, **linears("gate", size=16))
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return Made(computes, **linears("embed", size=16), router=router, layer=layer, **linears("head", size=16))


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


def spoilt_on_its_way_back(job: Training) -> None:
    job.model.embed.requires_grad_(False)  # stays good although it lies behind
    handle = job.model.blocks[1].register_forward_hook(lambda _module, _inputs, output: spoil_gradient(output))
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


def targets(y: torch.Tensor, loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Does:
    """One step on these."""

    def does(job: Training) -> None:
        x = torch.randn(6, 8)
        job.optimizer.zero_grad()
        loss_of(job.model(x), y).backward()
        job.optimizer.step()
        job.look()

    return does


def shared() -> nn.Module:
    model = between_layers(nn.Linear(8, 8))
    model.last.weight = model.inner.weight
    return model


def bad_exponent(loss: torch.Tensor) -> torch.Tensor:
    return loss * torch.log(loss - 1000)


@dataclass
class Case:
    """does: what goes wrong, before step 6 or in it. guard: the loop leaves out the update of a bad step. found: of the
    evidence, by its place; None: it is not there. step: whose loss is bad."""

    does: Does
    found: dict[str, Any]
    model: Callable[[], nn.Module] = Net
    guard: bool = False
    step: int = 6


ANY = object()


def operator(name: str, made: object = ANY, **more: Any) -> dict[str, Any]:
    """The evidence of an operator. made: of what kind its value is said to be."""
    return {"cause": "operator", "operator.operator": name, **({} if made is ANY else {"operator.made": made}), **more}


IN_BETWEEN = {"after_module": "inner", "before_module": "last", "module": None}

# fmt: off
CASES = {
    # ---- operators
    "division by nothing": Case(
        loss(lambda loss: (loss * 0) / (loss.detach() * 0)),
        operator("Div", after_module="head", began={"first": 6, "last": 6}, **{"parameters_before.nonfinite": 0})),
    "logarithm of nothing, added up": Case(
        loss(lambda loss: (torch.zeros(1) * (loss * 0).log() + loss).mean()), operator("Log", "-inf", after_module="head")),
    "-inf that becomes NaN": Case(
        loss(lambda loss: ((loss * 0).log() * (loss * 0)).mean()),
        operator("Log", "-inf", **{"operator.read_by": "Mul"})),
    "inside of what is compiled": Case(
        write("norm.running_var", -INF), operator("CompiledFunction"), compiled),
    # a sum is not blamed for what it was given, nor is the layer behind it
    "a function that keeps nothing": Case(
        between(lambda x: torch.relu(x) + Halves.apply(x)), operator("Halves", None, **IN_BETWEEN), model=with_norm),
    "a part of a concatenation": Case(
        between(lambda x: torch.cat([x.tanh()[:3], (x[3:] * 0).log() * 0.1])),
        operator("Log", "-inf", **IN_BETWEEN), model=with_norm),
    # ---- minus infinity, which is what masks hold
    "masks are no cause": Case(
        lambda job: setattr(job, "spoil", bad_exponent),
        operator("Log", first_module=None),
        model=masked, guard=True),
    # ---- batches
    "an infinite value": Case(
        batch(INF),
        {"cause": "batch", "batch_tensor": "inputs", "batch.step": 6, "began": {"first": 6, "last": 6},
         "batch.tensors.0.shape": [6, 8],
         "batch.tensors.0.dtype": "float32", "batch.tensors.0.nonfinite": 1, "batch.tensors.2.name": "y",
         "batch.tensors.2.dtype": "int64", "batch.tensors.2.nonfinite": 0}),
    "targets": Case(
        targets(torch.full((6, 4), NAN), F.mse_loss), {"cause": "batch", "batch_tensor": "y", "batch_step": 6}),
    "targets, joined with the output": Case(
        targets(torch.full((6, 4), NAN), lambda out, y: torch.cat([out, y], -1).logsumexp(-1).mean()),
        {"cause": "batch", "batch_tensor": "y", "operator.operator": "Cat", "operator.inputs_unseen": True}),
    "labels that are all left out": Case(
        targets(torch.full((6,), -100), F.cross_entropy), {"cause": "ignored_labels", "batch_tensor": "y", "batch_step": 6}),
    "a mean over labels that a mask of the script leaves out": Case(
        targets(torch.full((6,), 1), lambda out, y: (F.cross_entropy(out, y, reduction="none") * 0).sum() / (y - y).sum()),
        {"cause": "operator", "operator.operator": "Div"}),
    # ---- parameters, and what is kept beside them
    "a shared weight": Case(
        write("inner.weight", NAN), {"cause": "parameter", "shared": {"inner.weight": ["last.weight"]}}, model=shared),
    "a parameter": Case(
        write("blocks.1.linear.weight", NAN),
        {"cause": "parameter", "module": "blocks.1.linear", "module_class": "Linear", "parameter": "blocks.1.linear.weight",
         "parameters_before.of": 10, "parameters_before.nonfinite": 1, "parameters_before.last": "blocks.1.linear.weight",
         "parameters_before.first.0.nonfinite": 16, "parameters_before.first.0.shape": [16, 16],
         "parameters_after.nonfinite": 10, "rank": 0, "lr": 0.01, "loss_dtype": "float32"}),
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
        {"cause": "backward", "parameter": "blocks.1.linear.bias", "good_from": "blocks.2.linear.weight"}, step=7),
    "every parameter": Case(everything_spoilt, {"cause": "spread", "module": None}),
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
    assert evidence["step"] == case.step
    assert [entry["step"] for entry in evidence["history"]] == [*range(1, case.step + 1)]
    assert [entry["loss"] for entry in evidence["history"]][:5] == job.losses[:5]
    assert not module._global_forward_hooks, "no check is left behind"


def test_weights_that_were_loaded_bad_are_said_to_be(train):
    model = Net()
    with torch.no_grad():
        model.head.weight[0, 0] = NAN
    job = train(model)
    job.steps(4)
    found = job.finding()["evidence"]
    assert (found["cause"], found["step"], found["loaded"]) == ("parameter", 1, True)


class OfALibrary(torch.optim.Adam):
    """Of another module than torch's, so that it may compute in float32."""


@pytest.mark.parametrize("kind", [torch.optim.Adam, OfALibrary])
def test_an_eps_that_is_zero_in_half_precision_is_the_cause(train, kind):
    model = Net().half()
    job = train(model)
    job.optimizer = kind(model.parameters(), lr=1e-4, eps=1e-8)
    for _ in range(6):
        job.progress.measure_at = 10**6
        job.step(torch.randn(6, 8, dtype=torch.float16))
    found = job.finding()["evidence"]
    known = (found["cause"], found.get("eps"), found.get("eps_dtype")) == ("zero_eps", 1e-8, "float16")
    assert known == (kind is torch.optim.Adam)
    assert not known or found["began"]["last"] == job.finding()["since_step"] - 1


def reader() -> nn.Module:
    def computes(self: Any, x: torch.Tensor, pad: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        return self.head(hidden + self.attention(hidden, hidden, hidden, key_padding_mask=pad)[0])

    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    return Made(computes, embed=nn.Embedding(9, 8), attention=attention, head=nn.Linear(8, 9))


def test_a_row_that_is_fully_masked_is_the_cause(train):
    """The loss leaves it out, so that it is finite; and only the optimizer's averages show which gradient was bad."""
    job = train(reader())
    for step in range(1, 8):
        job.progress.measure_at = 10**6
        x, pad = torch.randint(0, 9, (4, 5)), torch.zeros(4, 5, dtype=torch.bool)
        pad[1] = step == 4
        job.optimizer.zero_grad()
        F.cross_entropy(job.model(x, pad)[~pad], x[~pad]).backward()
        job.optimizer.step()
        job.look()
    found = job.finding()["evidence"]
    assert (found["cause"], found["module"], found["parameter"]) == ("left_out", "attention", "head.weight")
    assert found["began"] == {"first": 4, "last": 4, "by": "gradient"}


ODD = {"eight bits": torch.randn(4).to(torch.float8_e4m3fn), "codes and scales": InEightBits(8)}


@pytest.mark.parametrize("base", ODD.values(), ids=ODD.keys())
def test_a_parameter_that_cannot_be_read_hides_no_other(train, base):
    job = train()
    job.steps(3)
    lazy = nn.UninitializedParameter(requires_grad=False)  # of an adapted model whose base cannot be looked at
    job.model.adapted = Made(torch.tanh, lazy=lazy, base=nn.Parameter(base, requires_grad=False))
    write("head.bias", NAN)(job)
    job.steps(3)
    assert job.finding()["evidence"]["parameter"] == "head.bias"
