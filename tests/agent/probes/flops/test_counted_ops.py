"""Operations of real steps against torch's own counter, over the products and convolutions that models are made of."""

from __future__ import annotations

from contextlib import nullcontext
from math import prod

import pytest
import torch
from counted_step import counted_step, written_by_inductor
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

pytestmark = pytest.mark.usefixtures("nothing_compiled")
aten = torch.ops.aten


def convolution_backward(gradient, x, weight, *options, out_shape=None, **_):
    """torch's own takes the gradient of a grouped convolution's weight for an ungrouped one's."""
    transposed, needed = options[4], options[7]
    return 2 * prod(x if transposed else gradient) * prod(weight[1:]) * sum(needed[:2])


BESIDE = {
    aten.convolution_backward: convolution_backward,
    aten.mv: lambda matrix, _vector, **_: 2 * prod(matrix),
}
"""Formulas that torch's counter lacks or has wrong."""


def by_torch(model, loss_of):
    model.zero_grad()
    with FlopCounterMode(display=False, custom_mapping=BESIDE) as counter:
        loss_of(model).backward()
    model.zero_grad()
    return counter.get_total_flops()


class Called(nn.Module):
    """A model of a function. **parts: its modules and parameters."""

    def __init__(self, call, **parts):
        super().__init__()
        self.call = call
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.call(self, x)


def pictures(frozen=0):
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4),
    )  # fmt: skip
    model[:frozen].requires_grad_(False)
    return model


def branches():
    """Two convolutions take the picture, and a third one takes what it keeps its size of."""

    def call(m, x):
        x = torch.cat([m.near(x), m.far(x)], 1).relu()
        return m.up(m.down(x) + nn.functional.avg_pool2d(x, 2)) + x

    return Called(
        call, near=nn.Conv2d(3, 8, 3, padding=1), far=nn.Conv2d(3, 8, 5, padding=2),
        down=nn.Conv2d(16, 16, 3, stride=2, padding=1), up=nn.ConvTranspose2d(16, 16, 2, stride=2, groups=16),
    )  # fmt: skip


def twins(*, frozen):
    """Two convolutions of the same sizes that differ in their stride."""

    def call(m, x):
        x = m.first(x)
        return m.last(nn.functional.avg_pool2d(m.one(x), 2) + m.second(x))

    one, second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, stride=2)
    first, last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)
    for part in (first, one, second) if frozen else ():
        part.requires_grad_(False)
    return Called(call, first=first, one=one, second=second, last=last)


OF_PICTURES = {
    "pictures": pictures,
    "frozen encoder": lambda: pictures(frozen=6),
    "branches": branches,
    "frozen twins": lambda: twins(frozen=True),
    "frozen in the midst": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3).requires_grad_(False), nn.ReLU(), nn.Conv2d(8, 2, 1)
    ),
    "transposed": lambda: nn.Sequential(
        nn.ConvTranspose2d(3, 3, 4, stride=2, groups=3), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.Tanh()
    ),
}


@pytest.mark.parametrize("kind", OF_PICTURES)
def test_convolutions_count_as_in_torchs_counter(record, kind):
    """With and without the gradient of the picture."""
    for wants in (False, True):
        model, x = OF_PICTURES[kind](), torch.randn(2, 3, 16, 16, requires_grad=wants)
        recorded = record(model)
        counted = counted_step(model, lambda m, x=x: m(x).square().mean())
        assert counted.total == by_torch(model, lambda m, x=x: m(x).square().mean()) > 0, wants
        recorded.finish()


def test_compiled_convolutions_count_as_in_torchs_counter(record):
    """Autograd's graph has one node for all of them."""
    model, x = twins(frozen=False), torch.randn(2, 3, 16, 16)
    expected = by_torch(model, lambda m: m(x).square().mean())
    compiled = torch.compile(model, backend="aot_eager")
    compiled(x)
    record(compiled)
    assert counted_step(compiled, lambda m: m(x).square().mean()).total == expected > 0


PRODUCTS = {
    "linears": lambda: nn.Sequential(
        nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8), nn.Unflatten(1, (2, 4)), nn.Linear(4, 3, bias=False)
    ),
    "a vector": lambda: Called(
        lambda m, x: m.inner(x) @ m.score, inner=nn.Linear(8, 16), score=nn.Parameter(torch.ones(16))
    ),
}


@pytest.mark.parametrize("kind", PRODUCTS)
def test_products_count_as_in_torchs_counter(record, kind):
    model, x = PRODUCTS[kind](), torch.randn(4, 8)
    record(model)
    for micro_steps in (1, 3):
        counted = counted_step(model, lambda m: m(x).square().mean(), micro_steps=micro_steps)
        assert counted.total == micro_steps * by_torch(model, lambda m: m(x).square().mean()) > 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpointing_computes_again_is_not_the_models(record, reentrant):
    def call(m, x):
        return checkpoint(m.second, m.first(x), use_reentrant=reentrant) if m.again else m.second(m.first(x))

    model, x = Called(call, first=nn.Linear(16, 32), second=nn.Linear(32, 16)), torch.randn(8, 16)
    record(model)
    for model.again in (False, True):
        counted = counted_step(model, lambda m: m(x).square().mean())
        assert counted.total == 5 * 2 * 8 * 16 * 32, "the first layer needs no gradient of its input"


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("product", [torch.sparse.mm, torch.spmm, torch.matmul])
def test_products_of_sparse_matrices_make_the_count_unknown(record, layout, product):
    """As if it were dense, a step of a graph network counted hundreds of times what it computes."""
    model = Called(
        lambda m, x: m.outer(product(m.adjacency, m.inner(x))),
        inner=nn.Linear(8, 8), outer=nn.Linear(8, 2), adjacency=torch.eye(50).to_sparse(layout=layout),
    )  # fmt: skip
    x = torch.randn(50, 8)
    record(model)
    assert counted_step(model, lambda m: m(x).square().mean()).total == 0


HALF = {"around a part": "bfloat16", "of the adapter only": "float32", "around a method": "bfloat16"}


@pytest.mark.parametrize("how", HALF)
def test_the_dtype_is_that_of_most_multiplications(record, how):
    """The model's numbers are of one type, what it does in another: autocast is inside of it, or the root is not
    called."""

    def call(m, x):
        with half("around a part"):
            y = m.inner(x)
        with half("of the adapter only"):
            return y + m.adapter(x)

    def loss_of(m):
        with half("around a method"):
            return (call if how == "around a method" else Called.forward)(m, x).float().mean()

    def half(where):
        return torch.autocast("cpu", torch.bfloat16) if where == how else nullcontext()

    x = torch.randn(4, 8)
    model = Called(call, inner=nn.Linear(8, 64), adapter=nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 64)))
    record(model)
    assert counted_step(model, loss_of).kind == HALF[how]


KERNELS = {
    "triton_tem_fused_addmm_3 = async_compile.triton('triton_tem_fused_addmm_3', '''": True,
    "cutedsl_fused_flex_attention_0 = async_compile.cutedsl('cutedsl_fused_flex_attention_0', r'''": True,
    "triton_poi_fused_relu_1 = async_compile.triton('triton_poi_fused_relu_1', '''": False,
    "    extern_kernels.mm(arg0, arg1, out=buf0)": False,
}


@pytest.mark.parametrize(("line", "hidden"), KERNELS.items())
def test_products_in_compiled_kernels_make_the_count_unknown(record, monkeypatch, tmp_path, line, hidden):
    """Of those nothing is recorded: what is left would pass for all."""
    written_by_inductor(monkeypatch, tmp_path, "import torch", line)
    torch.compile(lambda x: x + 1, backend="eager")
    model, x = nn.Linear(4, 2), torch.randn(3, 4)
    record(model)
    assert (counted_step(model, lambda m: m(x).square().mean()).total == 0) == hidden
