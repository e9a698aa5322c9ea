"""Floating-point operations of real steps, against torch's own counter and against arithmetic done by hand."""

from __future__ import annotations

import sys
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import perfagent.signals.flops.step_flops as module
from perfagent.signals.batch_size import Inputs
from perfagent.signals.compiled import causal_in_compiled_code
from perfagent.signals.flops.op_formulas import Counted, causal_share
from perfagent.signals.flops.step_flops import MOST_SIZES, STEADY_STEPS, StepFlops, own_operations
from perfagent.signals.flops.step_recording import FlopCount
from perfagent.step.state import state


@pytest.fixture(autouse=True)
def nothing_compiled():
    """Another test of this process may have compiled something, and such a process is looked at in another way."""
    torch._dynamo.reset()


def test_a_model_compiled_after_its_first_steps_is_counted_and_the_compiler_stumbles_over_nothing(record):
    """We lie inside of what it traces then: a clock of ours would be a warning to the user, here an error, and break
    graphs."""

    class Model(nn.Sequential):
        def forward(self, x):
            return super().forward(x).relu()

    model = Model(nn.Linear(4, 2))
    run = record(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(call):
        call(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step(model)
    compiled = torch.compile(model, backend="eager")
    torch._dynamo.utils.counters.clear()
    step(compiled)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    look = FlopCount(state.current)
    assert look.at_boundary()
    step(compiled)
    assert not look.at_boundary()
    assert list(look.operators) == [False, True]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    run.finish()


class Attention(nn.Module):
    def __init__(self, width=32, heads=4, causal=True):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.causal = heads, causal

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return x + self.out(y.transpose(1, 2).reshape(batch, length, width))


class Language(nn.Module):
    def __init__(self, causal=True):
        super().__init__()
        self.table, self.layers, self.head = (
            nn.Embedding(50, 32),
            nn.ModuleList(Attention(causal=causal) for _ in range(2)),
            None,
        )
        self.head = nn.Linear(32, 50, bias=False)

    def forward(self, ids):
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Pictures(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4),
        )  # fmt: skip


def recorded_step(model, loss_of, micro_steps=1, size=(1, 1)):
    """(what a recorded step counted, total and recomputed)."""
    p = state.current
    look = FlopCount(p)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step():
        for _ in range(micro_steps):
            (loss_of(model) / micro_steps).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    while p.probe is not None or p.completed < 2:  # something else looks at this step
        step()
    assert look.at_boundary()
    step()
    assert not look.at_boundary()
    flops = StepFlops(lambda: None)
    flops.look = look
    flops.add(look.step, {}, *size, 1.0)
    flops.take(look, model)
    return flops._known.get(size, Counted())


def by_torch(model, loss_of):
    """What torch's counter says, without causality and with the scores that flash attention computes again."""
    model.zero_grad()
    with FlopCounterMode(display=False) as counter:
        loss_of(model).backward()
    model.zero_grad()
    return counter.get_total_flops()


def test_matrix_products_are_counted_as_torch_does(record):
    model = nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8), nn.Unflatten(1, (2, 4)), nn.Linear(4, 3, bias=False)
    )
    x = torch.randn(32, 16)
    record(model)
    counted = recorded_step(model, lambda m: m(x).square().mean())
    assert counted.total == by_torch(model, lambda m: m(x).square().mean()) > 0


def test_convolutions_are_counted_as_torch_does(record):
    model, x = Pictures(), torch.randn(2, 3, 16, 16)
    record(model)
    counted = recorded_step(model, lambda m: m(x).square().mean())
    assert counted.total == by_torch(model, lambda m: m(x).square().mean()) > 0


@pytest.mark.parametrize(
    "last",
    [
        lambda: nn.Conv2d(8, 3, 3, padding=1),
        lambda: nn.Conv2d(8, 8, 3, padding=1),  # as the one before: its result is seen there
        lambda: nn.Conv2d(8, 3, 3, stride=2),
        lambda: nn.Conv2d(8, 8, 3, stride=2, padding=1),  # so is another one
        lambda: nn.ConvTranspose2d(8, 3, 4, stride=2, padding=1),
    ],
    ids=["to channels", "as before", "strided", "as before but strided", "transposed"],
)
def test_a_model_may_end_with_a_convolution_as_those_that_make_pictures_do(record, last):
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), last())
    x = torch.randn(2, 3, 16, 16)
    record(model)
    counted = recorded_step(model, lambda m: m(x).square().mean())
    assert not counted.unknown
    assert counted.total == by_torch(model, lambda m: m(x).square().mean()) > 0


def test_grouped_convolutions_count_their_own_channels_only(record):
    """torch's counter takes the gradient of the weight for an ungrouped one."""
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3, groups=2), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Flatten()
    )
    x = torch.randn(2, 4, 10, 10)
    record(model)
    counted = recorded_step(model, lambda m: m(x).square().mean())
    first, second = 2 * 2 * 8 * 8 * 8 * 2 * 9, 2 * 2 * 8 * 8 * 8 * 1 * 9
    assert counted.total == 2 * first + 3 * second


class Computed(TorchDispatchMode):
    """Counts a step's products and convolutions from what each was called with: a convolution's backward pass says
    there which gradients it computes, and whether it is transposed. (torch's counter takes grouped ones for ungrouped
    in part.)"""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = function._schema.name
        if name in ("aten::mm", "aten::bmm", "aten::mv"):
            self.total += 2 * args[0].numel() * (args[1].shape[-1] if args[1].dim() > 1 else 1)
        elif name == "aten::addmm":
            self.total += 2 * args[1].numel() * args[2].shape[1]
        elif name == "aten::convolution":
            x, weight, transposed = args[0], args[1], args[6]
            self.total += 2 * (x if transposed else out).numel() * weight[0].numel()
        elif name == "aten::convolution_backward":
            gradient, x, weight, transposed, needed = *args[:3], args[7], args[10]
            self.total += 2 * (x if transposed else gradient).numel() * weight[0].numel() * sum(needed[:2])
        return out


def computed(model, loss_of):
    model.zero_grad()
    with Computed() as mode:
        loss_of(model).backward()
    model.zero_grad()
    return mode.total


class Branches(nn.Module):
    """Two convolutions take the picture, and a third one takes what it keeps its size of."""

    def __init__(self):
        super().__init__()
        self.near, self.far = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 8, 5, padding=2)
        self.down, self.up = (
            nn.Conv2d(16, 16, 3, stride=2, padding=1),
            nn.ConvTranspose2d(16, 16, 2, stride=2, groups=16),
        )

    def forward(self, x):
        x = torch.cat([self.near(x), self.far(x)], 1).relu()
        small = self.down(x)
        return self.up(small + nn.functional.avg_pool2d(x, 2)) + x


class Adapted(nn.Module):
    """A frozen convolution with a small trained one beside it; a batch has as many samples as that has channels."""

    def __init__(self, channels, out):
        super().__init__()
        self.frozen = nn.Conv2d(channels, out, 3, padding=1).requires_grad_(False)
        self.down, self.up = nn.Conv2d(channels, 2, 3, padding=1, bias=False), nn.Conv2d(2, out, 1, bias=False)

    def forward(self, x):
        return self.frozen(x) + self.up(self.down(x))


class TextAndPictures(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.patches, self.head = nn.Embedding(9, 8), nn.Conv2d(3, 8, 4, stride=4), nn.Linear(8, 2)

    def forward(self, x):
        words = self.table(torch.arange(6).view(2, 3))
        return self.head(torch.cat([words, self.patches(x).flatten(2).transpose(1, 2)], 1))


@pytest.mark.parametrize(
    "make",
    [
        Branches,
        TextAndPictures,
        lambda: nn.Sequential(Adapted(3, 8), nn.ReLU(), Adapted(8, 3)),
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3).requires_grad_(False), nn.ReLU(), nn.Conv2d(8, 2, 1)
        ),
        lambda: nn.Sequential(
            nn.ConvTranspose2d(3, 3, 4, stride=2, groups=3), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.Tanh()
        ),
    ],
    ids=[
        "two branches from the picture",
        "text before pictures",
        "adapters",
        "a frozen one in the midst",
        "transposed",
    ],
)
@pytest.mark.parametrize("wants", [False, True], ids=["", "the picture's gradient too"])
def test_of_a_convolution_s_gradients_those_count_that_are_computed(record, make, wants):
    model, x = make(), torch.randn(2, 3, 16, 16, requires_grad=wants)
    record(model)
    counted = recorded_step(model, lambda m: m(x).square().mean())
    assert counted.total == computed(model, lambda m: m(x).square().mean()) > 0


def test_losses_that_share_a_trunk_pass_it_forward_once(record):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(576, 2))
    x = torch.randn(2, 3, 16, 16)

    def two(m):
        y = m(x)
        y.mean().backward(retain_graph=True)
        return y.square().mean()

    record(model)
    assert recorded_step(model, two).total == computed(model, two) > 0


@pytest.mark.parametrize("wrapped", [False, True], ids=["", "checkpointed"])
def test_a_step_that_never_calls_the_root_counts_forward_what_its_gradients_came_through(record, wrapped):
    class Coder(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = nn.Conv2d(3, 8, 3, stride=2), Attention(width=8, heads=2)

        def loss(self, x):
            codes = self.encoder(x).flatten(2).transpose(1, 2)
            decoded = checkpoint(self.decoder, codes, use_reentrant=False) if wrapped else self.decoder(codes)
            return decoded.square().mean()

        forward = loss

    model, x = Coder(), torch.randn(2, 3, 9, 9)
    record(model)
    apart = recorded_step(model, lambda m: m.loss(x))
    called = recorded_step(model, lambda m: m(x))
    products = 2 * 2 * 16 * (2 * 8 * 27 + 3 * 8 * 8 * 4)
    assert apart.products == called.products == products
    assert apart.attention == called.attention == pytest.approx(3 * 4 * 2 * 8 * 16 * 16 * causal_share(16, 16))


@pytest.mark.parametrize("how", ["by hand", "added to", "torch's own, unfused"])
def test_attention_that_is_not_fused_grows_with_the_square_of_the_length(record, how):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.qkv, self.head = nn.Embedding(9, 16), nn.Linear(16, 48), nn.Linear(16, 9)

        def forward(self, ids):
            x = self.table(ids)
            q, k, v = self.qkv(x).view(*ids.shape, 3, 2, 8).permute(2, 0, 3, 1, 4).reshape(3, -1, ids.shape[1], 8)
            if how == "by hand":
                y = (q @ k.transpose(1, 2)).softmax(-1) @ v
            elif how == "added to":
                y = torch.baddbmm(torch.zeros(1, 1, 1), q, k.transpose(1, 2)).softmax(-1).bmm(v)
            else:
                with sdpa_kernel(SDPBackend.MATH):
                    y = scaled_dot_product_attention(q[None], k[None], v[None])[0]
            return self.head(y.view(len(ids), 2, -1, 8).transpose(1, 2).flatten(2))

    model = Model()

    def counted(length):
        ids = torch.zeros(3, length, dtype=torch.long)
        flops = recorded_step(model, lambda m: m(ids).square().mean(), size=(3, 3 * length))
        return flops.products, flops.attention

    record(model)
    products, attention = counted(32)
    assert attention == 3 * 4 * 3 * 2 * 32 * 32 * 8
    assert counted(128) == (4 * products, 16 * attention)


def test_causal_attention_counts_half_whichever_kernel_computes_it(record):
    model, ids = Language(), torch.randint(0, 50, (2, 24))
    record(model)
    fused = recorded_step(model, lambda m: m(ids))
    with sdpa_kernel(SDPBackend.MATH):
        unfused = recorded_step(model, lambda m: m(ids))
    assert unfused.products == fused.products
    assert unfused.attention == pytest.approx(fused.attention)


@pytest.mark.parametrize("causal", [True, False])
def test_attention_that_a_script_imported_by_its_name_is_known_to_be_causal(record, causal):
    class Imported(Attention):
        def forward(self, x):
            q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
            shared = scaled_dot_product_attention(q, k, v)  # the same shapes
            return self.out(
                (shared + scaled_dot_product_attention(q, k, v, is_causal=causal)).transpose(1, 2).flatten(2)
            )

    model, x = Imported(), torch.randn(2, 24, 32)
    record(model)
    counted = recorded_step(model, lambda m: m(x).square().mean())
    assert counted.attention == pytest.approx(3 * 4 * 2 * 24 * 24 * 32 * (1 + (causal_share(24, 24) if causal else 1)))


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("around a part", "bfloat16"),
        ("of the adapter only", "float32"),
        ("around a method", "bfloat16"),
        ("nowhere", "float32"),
    ],
)
def test_the_type_that_is_multiplied_in_is_the_one_most_of_it_was(record, how, kind):
    """The model's numbers are of one type, what it does in another: autocast is inside of it, or the root is not
    called."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.adapter = nn.Linear(8, 64), nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 64))

        def forward(self, x):
            with half("around a part"):
                y = self.inner(x)
            with half("of the adapter only"):
                return y + self.adapter(x)

        def loss(self, x):
            with half("around a method"):
                return self.forward(x).float().mean()

    def half(where):
        return torch.autocast("cpu", torch.bfloat16) if where == how else nullcontext()

    model, x = Model(), torch.randn(4, 8)
    record(model)
    counted = recorded_step(model, lambda m: m.loss(x) if how == "around a method" else m(x).float().mean())
    assert counted.kind == kind


@pytest.mark.parametrize("causal", [True, None])
def test_compiled_attention_is_as_causal_as_the_code_that_was_written_says(record, monkeypatch, causal):
    """Autograd's graph has one node for all that was compiled together."""
    model, ids = Language(causal=True), torch.randint(0, 50, (2, 24))
    compiled = torch.compile(model, backend="aot_eager")
    compiled(ids)
    monkeypatch.setattr(module, "causal_in_compiled_code", lambda: causal)
    record(compiled)
    counted = recorded_step(compiled, lambda m: m(ids))
    share = causal_share(24, 24) if causal else 1.0
    assert counted.attention == pytest.approx(2 * 3 * 4 * 2 * 24 * 24 * 32 * share)


def test_experts_multiplied_in_groups_count(record):
    """Their weights' gradients share the rows among them: as many operations as the forward pass, whatever the groups'
    sizes."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.w = nn.Linear(4, 16), nn.Parameter(torch.randn(3, 16, 8, dtype=torch.bfloat16))

        def forward(self, x):
            ends = torch.tensor([8, 24, 32], dtype=torch.int32)
            return torch._grouped_mm(self.inner(x).bfloat16(), self.w, offs=ends)

    model, x = Experts(), torch.randn(32, 4)
    record(model)
    counted = recorded_step(model, lambda m: m(x).float().square().mean())
    assert counted.total == 2 * 32 * (4 * 16 * 2 + 16 * 8 * 3)


def test_batches_of_products_that_are_added_up_count(record):
    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.b, self.w = nn.Parameter(torch.randn(6, 8)), nn.Parameter(torch.randn(4, 16, 8))

        def forward(self, x):
            return torch.addbmm(self.b, x, self.w)

    model, x = Sums(), torch.randn(4, 6, 16)
    record(model)
    assert recorded_step(model, lambda m: m(x).square().mean()).total == 2 * (2 * 4 * 6 * 16 * 8)


def test_a_vector_at_the_end_counts(record):
    class Scored(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.score = nn.Linear(8, 16), nn.Parameter(torch.ones(16))

        def forward(self, x):
            return self.inner(x) @ self.score

    model, x = Scored(), torch.randn(4, 8)
    record(model)
    counted = recorded_step(model, lambda m: m(x).mean())
    assert counted.total == computed(model, lambda m: m(x).mean()) == 2 * (2 * 4 * 8 * 16) + 2 * (2 * 4 * 16)


def test_what_a_graph_kept_is_not_asked_for(record):
    """It may be on another device, or be computed again when it is asked for: that is the backward pass's to do,
    once."""
    model, x, asked = Pictures(), torch.randn(2, 3, 16, 16), []

    def loss_of(m):
        def unpack(kept):
            asked.append(1)
            return kept

        with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, unpack):
            return m(x).square().mean()

    loss_of(model).backward()
    once = len(asked)
    record(model)
    asked.clear()
    recorded_step(model, loss_of)
    assert len(asked) % once == 0
    assert len(asked) == once * state.current.completed


def test_a_frozen_encoder_counts_forward_only(record):
    model, x = Pictures(), torch.randn(2, 3, 16, 16)
    for layer in list(model)[:6]:
        layer.requires_grad_(False)
    record(model)
    counted = recorded_step(model, lambda m: m(x).square().mean())
    assert counted.total == by_torch(model, lambda m: m(x).square().mean()) > 0


@pytest.mark.parametrize("causal", [True, False])
def test_flash_attention_on_the_cpu_counts_and_a_causal_one_counts_half(record, causal):
    batch, length, width = 2, 24, 32
    model, ids = Language(causal), torch.randint(0, 50, (batch, length))
    record(model)
    counted = recorded_step(model, lambda m: m(ids))
    scores_and_values = 4 * batch * length * length * width * 2  # two layers
    share = (length + 1) / (2 * length) if causal else 1.0
    assert counted.attention == pytest.approx(3 * scores_and_values * share)
    per_token = 2 * (4 * width * width * 2 + width * 50)
    assert counted.products == 3 * per_token * batch * length


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpointing_computes_again_is_not_the_model_s(record, again, reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x):
            x = self.first(x)
            return checkpoint(self.second, x, use_reentrant=reentrant) if again else self.second(x)

    model, x = Checkpointed(), torch.randn(8, 16)
    record(model)
    counted = recorded_step(model, lambda m: m(x).square().mean())
    assert counted.total == 5 * 2 * 8 * 16 * 32  # the first layer needs no gradient of its input
    assert counted.recomputed == again * 2 * 8 * 32 * 16


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize("after", ["nothing", "backward", "grad"])
def test_gradients_of_which_there_is_a_graph_count_as_gradients(record, after):
    """Autograd numbers them as it numbers a forward pass, so that they passed for one that is computed again."""
    model, x = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)), torch.randn(8, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    record(model, optimizer=optimizer)
    look = FlopCount(state.current)

    def step():
        model(x).square().mean().backward(create_graph=True)
        gradients = [p.grad for p in model.parameters()]
        if after == "backward":
            sum(gradient.square().sum() for gradient in gradients).backward()
        elif after == "grad":
            torch.autograd.grad(sum(gradient.square().sum() for gradient in gradients), list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    while state.current.probe is not None or state.current.completed < 2:
        step()
    assert look.at_boundary()
    step()
    assert not look.at_boundary()
    counted = own_operations(look, None, model)
    with FlopCounterMode(display=False) as counter:
        step()
    if after == "backward":
        assert not counted.unknown
        assert counted.total == counter.get_total_flops()
    else:  # somebody has use for the graph, where nothing is recorded
        assert counted.unknown == {"second derivatives"}


def test_all_micro_steps_of_a_step_count(record):
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)), torch.randn(8, 16)
    record(model)
    counted = recorded_step(model, lambda m: m(x).square().mean(), micro_steps=3)
    assert counted.total == 3 * by_torch(model, lambda m: m(x).square().mean())


def test_variable_length_kernels_make_the_count_unknown(record):
    model, x = nn.LSTM(8, 8, batch_first=True), torch.randn(2, 5, 8)
    record(model)
    assert recorded_step(model, lambda m: m(x)[0].square().mean()).total == 0


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("product", [torch.sparse.mm, torch.spmm, torch.matmul])
def test_products_of_sparse_matrices_make_the_count_unknown(record, layout, product):
    """A graph's adjacency: as if it were dense, a step of a graph network counted hundreds of times what it
    computes."""

    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 2)
            self.adjacency = torch.eye(50).to_sparse(layout=layout)

        def forward(self, x):
            return self.outer(product(self.adjacency, self.inner(x)))

    model, x = Graph(), torch.randn(50, 8)
    record(model)
    assert recorded_step(model, lambda m: m(x).square().mean()).total == 0


def test_causal_share_is_the_share_of_pairs():
    for length, keys in ((4, 4), (3, 7), (7, 3)):
        mask = torch.ones(length, keys).tril()
        assert causal_share(length, keys) == pytest.approx(float(mask.mean()))


def test_recording_changes_nothing(record):
    def train(watched):
        torch.manual_seed(3)
        model, ids = Language(), torch.randint(0, 50, (2, 16))
        recorded = record(model) if watched else None
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses, looks = [], []
        for step in range(8):
            loss = model(ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if watched and step == 4:
                looks.append(FlopCount(state.current))
            if watched and step in (4, 5):
                state.current.probe = None if step == 4 else state.current.probe
                assert looks[0].at_boundary() == (step == 4)
        if recorded is not None:
            assert list(looks[0].operators) == [False, True]
            recorded.finish()
        return losses, [p.detach().clone() for p in model.parameters()]

    losses, weights = train(False)
    watched_losses, watched_weights = train(True)
    assert losses == watched_losses
    assert all(torch.equal(a, b) for a, b in zip(weights, watched_weights, strict=True))
    assert scaled_dot_product_attention is nn.functional.scaled_dot_product_attention
    assert not torch.autograd._profiler_enabled()


def test_an_exception_in_the_recorded_step_leaves_nothing_behind(record):
    class Fails(nn.Linear):
        def forward(self, x):
            if self.fails:
                raise ValueError("the user's own")
            return super().forward(x)

    model, x = Fails(4, 4), torch.randn(2, 4)
    model.fails = False
    record(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model(x).sum().backward()
    optimizer.step()
    look = FlopCount(state.current)
    assert look.at_boundary()
    model.fails = True
    with pytest.raises(ValueError, match="the user's own"):
        model(x)
    assert not torch.autograd._profiler_enabled()
    model.fails = False
    model(x).sum().backward()
    optimizer.step()
    look.at_boundary()
    assert state.current.probe is None


class TestStepFlops:
    @pytest.fixture(autouse=True)
    def inputs(self, monkeypatch):
        """None but this test's."""
        inputs = Inputs()
        monkeypatch.setattr(module, "inputs", inputs)
        return inputs

    def known(self, products=100.0, attention=10.0, size=(4, 40)):
        flops = StepFlops(lambda: None)
        flops._known[size] = Counted(products=products, attention=attention)
        return flops

    def said(self, flops, samples, tokens, seconds=2.0):
        values = {}
        flops.add(1, values, samples, tokens, seconds)
        return values

    def test_a_known_size(self):
        assert self.said(self.known(), 4, 40) == {"flops_per_s": 55.0}

    def test_another_number_of_samples(self):
        assert self.said(self.known(), 2, 20)["flops_per_s"] == pytest.approx(27.5)

    def test_longer_samples_cost_attention_squared(self):
        assert self.said(self.known(), 4, 80)["flops_per_s"] == pytest.approx((200 + 40) / 2)

    def test_pictures_have_no_tokens(self, inputs):
        inputs.changes.append((0, (3, 64, 64)))
        assert self.said(self.known(size=(4, 0, 3, 64, 64)), 8, 0)["flops_per_s"] == pytest.approx(110.0)

    def test_pictures_of_another_resolution_are_not_compared(self, inputs):
        flops = self.known(size=(4, 0, 3, 64, 64))
        inputs.changes.append((0, (3, 16, 16)))
        assert self.said(flops, 4, 0) == self.said(flops, 8, 0) == {}
        assert flops.wants()

    def test_an_input_of_unknown_shape_is_told_nothing_and_looked_at_in_vain_never(self, inputs):
        flops = self.known(size=(4, 0, 3, 64, 64))
        inputs.changes.append((0, None))
        assert self.said(flops, 4, 0) == {}
        assert not flops.wants()

    def test_steps_are_told_by_the_shape_they_had_and_not_by_the_newest(self, inputs):
        flops = self.known(size=(4, 0, 9))
        inputs.changes.extend([(0, (9,)), (5, (3,)), (7, (9,))])  # steps 6 and 7 have the other one
        assert [step for step in range(1, 11) if flops.of(step, 4, 0)] == [1, 2, 3, 4, 5, 8, 9, 10]

    def test_steps_of_one_block_with_a_change_among_them_are_told_nothing(self, inputs):
        flops = self.known(size=(4, 0, 9))
        flops.of(1, 4, 0)
        inputs.changes.extend([(0, (9,)), (5, (3,)), (7, (9,))])
        assert flops.of(20, 4, 0) is None
        assert flops.of(30, 4, 0) == 110.0

    def test_an_evaluation_of_another_resolution_between_two_steps_changes_nothing(self, inputs):
        flops = self.known(size=(4, 0, 9))
        inputs.changes.append((0, (9,)))
        flops.of(1, 4, 0)
        inputs.changes.extend([(1, (3,)), (1, (9,))])
        assert flops.of(2, 4, 0) == 110.0

    def test_no_step_is_counted_while_the_shape_changes(self, inputs):
        """Batches may be fetched ahead: the shape that was seen last may be the next step's."""
        flops = self.known(size=(4, 0, 9))
        for step in range(1, 9):
            inputs.changes.append((step - 1, (step,)))
            flops.of(step, 4, 0)
            assert flops.wants() == (step == 1)
        flops.of(8 + STEADY_STEPS - 2, 4, 0)
        assert not flops.wants()
        flops.of(8 + STEADY_STEPS - 1, 4, 0)
        assert flops.wants()

    def test_a_step_before_which_the_shape_changed_is_not_taken_for_the_new_shape(self, inputs):
        flops = StepFlops(lambda: None)
        inputs.changes.append((0, (9,)))
        flops.of(10, 4, 0)
        flops.look = look = FlopCount(None)
        look.step = 11
        inputs.changes.append((10, (3,)))
        flops.add(11, {}, 4, 0, 1.0)
        assert look.size is None

    def test_looks_that_come_to_nothing_end(self, inputs):
        flops = StepFlops(lambda: None)
        inputs.changes.append((0, (9,)))
        flops.of(10, 4, 0)
        for _ in range(MOST_SIZES):
            assert flops.wants()
            flops.take(FlopCount(None), None)
        assert not flops.wants()

    def test_nothing_is_said_before_a_step_was_counted(self):
        assert self.said(StepFlops(lambda: None), 4, 40) == {}

    def test_sizes_that_cannot_be_compared(self):
        assert self.said(self.known(), 4, 0) == {}
        assert self.said(self.known(), 0, 0) == {}

    def test_a_device_that_is_known_has_a_share_of_its_peak(self, monkeypatch):
        flops = self.known(products=989.4e12, attention=0.0)
        flops._device, flops.kind = lambda: 0, "bfloat16"
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
        assert self.said(flops, 4, 40)["mfu"] == pytest.approx(0.5)

    @pytest.mark.parametrize(
        ("name", "kind"), [("NVIDIA Unheard Of", "bfloat16"), ("NVIDIA H200", ""), ("NVIDIA H200", "int8")]
    )
    def test_what_is_not_known_has_none(self, monkeypatch, name, kind):
        flops = self.known(products=1e12)
        flops._device, flops.kind = lambda: 0, kind
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: name)
        assert "mfu" not in self.said(flops, 4, 40)

    @pytest.mark.parametrize(("precision", "share"), [("tf32", 0.5), ("ieee", None)])
    def test_tf32_that_was_set_by_its_newer_name_is_the_peak_compared_with(self, monkeypatch, precision, share):
        """Where it was, the older name raises, and with it the row of the step."""
        if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
            pytest.skip("an older torch")
        flops = self.known(products=494.7e12, attention=0.0)
        flops._device, flops.kind = lambda: 0, "float32"
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
        matmul, before = torch.backends.cuda.matmul, torch.backends.cuda.matmul.fp32_precision
        matmul.fp32_precision = precision
        try:
            assert self.said(flops, 4, 40).get("mfu") == (None if share is None else pytest.approx(share))
        finally:
            matmul.fp32_precision = before

    def test_more_than_the_peak_is_not_believed(self, monkeypatch):
        flops = self.known(products=989e12)
        flops._device, flops.kind = lambda: 0, "float32"
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
        assert set(self.said(flops, 4, 40)) == {"flops_per_s"}


def written(monkeypatch, folder, *lines):
    """Inductor has written a module of these lines."""
    from types import SimpleNamespace

    (folder / "compiled.py").write_text("\n".join(lines))
    modules = [SimpleNamespace(__file__=str(folder / "compiled.py"))]
    monkeypatch.setitem(
        sys.modules, "torch._inductor.codecache", SimpleNamespace(PyCodeCache=SimpleNamespace(modules=modules))
    )


@pytest.mark.parametrize(
    ("line", "hidden"),
    [
        ("triton_tem_fused_addmm_3 = async_compile.triton('triton_tem_fused_addmm_3', '''", True),
        ("triton_tem_fused_flex_attention_0 = async_compile.triton('triton_tem_fused_flex_attention_0', '''", True),
        ("cutedsl_fused_flex_attention_0 = async_compile.cutedsl('cutedsl_fused_flex_attention_0', r'''", True),
        ("triton_poi_fused_relu_1 = async_compile.triton('triton_poi_fused_relu_1', '''", False),
        ("    extern_kernels.mm(arg0, arg1, out=buf0)", False),
    ],
)
def test_products_in_kernels_that_the_compiler_wrote_make_the_count_unknown(
    record, monkeypatch, tmp_path, line, hidden
):
    """Of those nothing is recorded: what is left would pass for all."""
    model, x = nn.Linear(4, 2), torch.randn(3, 4)
    record(model)
    monkeypatch.setattr(module, "compiled", lambda: True)
    written(monkeypatch, tmp_path, "import torch", line)
    assert (recorded_step(model, lambda m: m(x).square().mean()).total == 0) == hidden


def test_causality_is_read_from_what_inductor_wrote(monkeypatch, tmp_path):
    def said(*lines):
        written(monkeypatch, tmp_path, "import torch", "def call(args):", *(f"    {line}" for line in lines))
        return causal_in_compiled_code()

    flash = "buf1 = torch.ops.aten._scaled_dot_product_flash_attention.default(view(a, (2, 3), 0), b, c, 0.0, {}, scale=0.2)"
    wide = "buf2 = torch.ops.aten._scaled_dot_product_efficient_attention.default(a, b, c, None, True, 0.0, {})"
    backward = (
        "buf3 = torch.ops.aten._scaled_dot_product_flash_attention_backward.default(g, a, b, c, d, e, 0.0, False)"
    )
    assert said(flash.format(True), wide.format(True), backward) is True
    assert said(flash.format(False)) is False
    assert said(flash.format(True), wide.format(False)) is None
    assert said("return args") is None
