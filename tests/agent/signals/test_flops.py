"""Floating-point operations of real steps, against torch's own counter and against arithmetic done by hand."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import perfagent.signals.flops as module
from perfagent.hooks.progress import state
from perfagent.signals.flops import MOST_SIZES, STEADY_STEPS, FlopCount, StepFlops, causal_in_compiled_code
from perfagent.signals.operators import Counted, causal_share
from perfagent.signals.throughput import Inputs


@pytest.fixture(autouse=True)
def nothing_compiled():
    """Another test of this process may have compiled something, and such a process is looked at in another way."""
    torch._dynamo.reset()



def test_a_model_compiled_after_its_first_steps_is_counted_and_the_compiler_stumbles_over_nothing(record):
    """We lie inside of what it traces then: a clock of ours would be a warning to the user, here an error, and break graphs."""

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
    assert [backward for _, backward in look.windows] == [False, True]
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
        self.table, self.layers, self.head = nn.Embedding(50, 32), nn.ModuleList(Attention(causal=causal) for _ in range(2)), None
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


def recorded_step(model, loss_of, micro_steps=1):
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
    flops.add(look.step, {}, 1, 1, 1.0)
    flops.take(look, model)
    return flops._known.get((1, 1), Counted())


def by_torch(model, loss_of):
    """What torch's counter says, without causality and with the scores that flash attention computes again."""
    model.zero_grad()
    with FlopCounterMode(display=False) as counter:
        loss_of(model).backward()
    model.zero_grad()
    return counter.get_total_flops()


def test_matrix_products_are_counted_as_torch_does(record):
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8), nn.Unflatten(1, (2, 4)), nn.Linear(4, 3, bias=False))
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
    model = nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Flatten())
    x = torch.randn(2, 4, 10, 10)
    record(model)
    counted = recorded_step(model, lambda m: m(x).square().mean())
    first, second = 2 * 2 * 8 * 8 * 8 * 2 * 9, 2 * 2 * 8 * 8 * 8 * 1 * 9
    assert counted.total == 2 * first + 3 * second


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


def test_all_micro_steps_of_a_step_count(record):
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)), torch.randn(8, 16)
    record(model)
    counted = recorded_step(model, lambda m: m(x).square().mean(), micro_steps=3)
    assert counted.total == 3 * by_torch(model, lambda m: m(x).square().mean())


def test_variable_length_kernels_make_the_count_unknown(record):
    model, x = nn.LSTM(8, 8, batch_first=True), torch.randn(2, 5, 8)
    record(model)
    assert recorded_step(model, lambda m: m(x)[0].square().mean()).total == 0


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
            assert len(looks[0].windows) == 2
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

    @pytest.mark.parametrize(("name", "kind"), [("NVIDIA Unheard Of", "bfloat16"), ("NVIDIA H200", ""), ("NVIDIA H200", "int8")])
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


def test_causality_is_read_from_what_inductor_wrote(monkeypatch, tmp_path):
    from types import SimpleNamespace

    def said(*lines):
        (tmp_path / "compiled.py").write_text("\n".join(("import torch", "def call(args):", *(f"    {line}" for line in lines))))
        module = SimpleNamespace(__file__=str(tmp_path / "compiled.py"))
        cache = SimpleNamespace(PyCodeCache=SimpleNamespace(modules=[module]))
        monkeypatch.setitem(sys.modules, "torch._inductor.codecache", cache)
        return causal_in_compiled_code()

    flash = "buf1 = torch.ops.aten._scaled_dot_product_flash_attention.default(view(a, (2, 3), 0), b, c, 0.0, {}, scale=0.2)"
    wide = "buf2 = torch.ops.aten._scaled_dot_product_efficient_attention.default(a, b, c, None, True, 0.0, {})"
    backward = "buf3 = torch.ops.aten._scaled_dot_product_flash_attention_backward.default(g, a, b, c, d, e, 0.0, False)"
    assert said(flash.format(True), wide.format(True), backward) is True
    assert said(flash.format(False)) is False
    assert said(flash.format(True), wide.format(False)) is None
    assert said("return args") is None
