"""`best_attention` against what torch really runs: each call is made under torch's own recording, which names the
kernel. And attention seen from outside, in models that know nothing of it."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

import perfagent
from perfagent.errors import ConfigError
from perfagent_loop.compute.attention_rules import Gpu

KERNEL = re.compile(r"aten::_scaled_dot_product_(?:attention_)?(flash|efficient|cudnn|math)")


def kernel_that_ran(q, k, v, **arguments):
    """The name of the kernel in torch's record of the call's operators; "none" where it raised."""
    with contextlib.suppress(RuntimeError), torch.autograd.profiler.profile(use_kineto=False) as record:
        scaled_dot_product_attention(q, k, v, **arguments)
    return next((found[1] for event in record.function_events if (found := KERNEL.match(event.name))), "none")


def tensors(
    batch=2, heads=4, length=6, width=8, *, keys=None, key_heads=None, value_width=None, dtype=torch.float32, grad=False
):
    of_keys = (batch, key_heads or heads, keys or length)
    shapes = [(batch, heads, length, width), (*of_keys, width), (*of_keys, value_width or width)]
    return [torch.randn(shape, dtype=dtype).requires_grad_(grad) for shape in shapes]


def agree(q, k, v, *, causal=False, mask=None, dropout=0.0, gqa=False):
    """The choice, which draws no random number, is what runs then."""
    before = torch.get_rng_state()
    choice = perfagent.best_attention(q, k, v, causal=causal, mask=mask, dropout=dropout, gqa=gqa)
    assert torch.equal(before, torch.get_rng_state())
    ran = kernel_that_ran(q, k, v, is_causal=causal, attn_mask=mask, dropout_p=dropout, enable_gqa=gqa)
    # math then finds shapes that do not fit
    assert choice.kernel == ran or (ran == "none" and choice.kernel == "math"), str(choice)
    return choice


def test_the_kernel_named_is_the_kernel_that_runs():
    """And the rules alone would have chosen the same one, over 300 random calls."""
    generator = torch.Generator().manual_seed(5)

    def pick(*values):
        return values[int(torch.randint(len(values), (), generator=generator))]

    kernels = set()
    for _ in range(300):
        q, k, v = tensors(
            pick(1, 2), pick(1, 2, 4), pick(0, 1, 3, 8), pick(1, 7, 8, 300), keys=pick(None, 5),
            key_heads=pick(None, None, 1, 2), value_width=pick(None, None, 8), grad=pick(False, True),
            dtype=pick(torch.float32, torch.bfloat16, torch.float64, torch.float16),
        )  # fmt: skip
        if pick(False, False, True):
            q = q.transpose(-1, -2).contiguous().transpose(-1, -2)
        causal, mask = pick(False, True), None
        if not causal and pick(False, True):
            shape = pick((1, 1), (q.shape[-2], k.shape[-2]), (1, 1, q.shape[-2], 1))
            mask = pick(torch.ones(shape, dtype=torch.bool), torch.zeros(shape, dtype=q.dtype))
        with contextlib.suppress(ConfigError):
            choice = agree(q, k, v, causal=causal, mask=mask, gqa=pick(False, True), dropout=pick(0.0, 0.0, 0.5))
            assert (choice.kernel == "math") == bool(choice.obstacles), str(choice)
            kernels.add(choice.kernel)
    assert kernels == {"flash", "math", "none"}


LEARNED = torch.zeros(6, 6)
WIDE, OF_EACH = tensors(value_width=16), torch.ones(2, 6, 6, dtype=torch.bool)
SPREAD = [t.transpose(-1, -2) for t in tensors(length=8)]


@pytest.mark.parametrize(
    ("says", "given", "options", "cured", "then"),
    [
        ("dropout", tensors(), {"dropout": 0.1}, tensors(), {}),
        ("dimensions", [t[0] for t in tensors()], {}, tensors(1), {}),
        ("shape", tensors(2, 2), {"mask": OF_EACH}, tensors(2, 2), {"mask": OF_EACH[:, None]}),
        ("learned", tensors(), {"mask": LEARNED.clone().requires_grad_()}, tensors(), {"mask": LEARNED}),
        ("wide", WIDE, {}, [pad(t, (0, 16 - t.shape[-1])) for t in WIDE], {}),
        ("strides", SPREAD, {}, [t.contiguous() for t in SPREAD], {}),
        ("samples", [tensors()[0], *(t[:1] for t in tensors()[1:])], {}, tensors(), {}),
        ("heads", tensors(key_heads=1), {}, tensors(key_heads=1), {"gqa": True}),
    ],
)
def test_what_keeps_flash_away_is_named_and_its_remedy_works(says, given, options, cured, then):
    choice = agree(*given, **options)
    assert (choice.kernel, choice.fused, says in choice.why, bool(choice.change)) == ("math", False, True, True)
    assert choice.score_bytes == given[0][..., 0].numel() * given[1].shape[-2] * 4
    assert agree(*cured, **then).kernel == "flash"


@pytest.mark.filterwarnings("ignore:Flash attention kernel not used", "ignore:Both fused kernels do not support")
def test_autocast_and_switched_off_kernels_decide_too():
    q, k, v = tensors()
    half = v.to(torch.bfloat16)
    with pytest.raises(ConfigError, match="one type"):
        perfagent.best_attention(q, k, half)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert agree(q, k, half).kernel == "flash"
    for allowed, dropout, kernel in ((SDPBackend.MATH, 0.0, "math"), (SDPBackend.FLASH_ATTENTION, 0.1, "none")):
        with sdpa_kernel([allowed]):
            choice = agree(q, k, v, dropout=dropout)
        assert (choice.kernel, "switched off" in choice.why) == (kernel, True)


CAUSAL = torch.ones(8, 8, dtype=torch.bool).tril()
PADDED = (torch.arange(8) < torch.tensor([[8], [5]]))[:, None, None, :]
SLOPES = -0.1 * (torch.arange(8)[:, None] - torch.arange(8)[None, :]).abs().float()


def documents(*lengths):
    return torch.block_diag(*(torch.ones(length, length) for length in lengths)).bool()


@pytest.mark.parametrize(
    ("mask", "advice"),
    [
        (torch.ones(8, 8, dtype=torch.bool), "leave the mask out"),
        (CAUSAL, "is_causal=True instead"),
        (documents(3, 5) & CAUSAL, "packed_attention(q, k, v, lengths=[3, 5], causal=True)"),
        (documents(1, 2, 1, 1, 3), "lengths=[1, 2, 1, 1, ...], causal=False"),
        (PADDED, "pack the samples"),
        (PADDED & CAUSAL, "is_causal=True and leave the mask out"),
        (PADDED.flip(3) & CAUSAL, "pack the samples"),
        (torch.eye(8, dtype=torch.bool) | torch.eye(8, dtype=torch.bool).roll(3, 0), ""),
        (SLOPES, ""),  # a bias is no mask
        (SLOPES.clone().requires_grad_(), "flex_attention"),
    ],
)
def test_a_mask_that_says_what_a_flag_says_is_recognized(mask, advice):
    as_bias = torch.zeros(mask.shape).masked_fill(~mask, float("-inf")) if mask.dtype is torch.bool else mask
    for given in (mask, as_bias):
        choice = agree(*tensors(2, 4, 8, 8), mask=given)
        assert choice.kernel == ("math" if mask.requires_grad else "flash")
        assert advice in choice.change
        assert bool(choice.change) == bool(advice)


A100, L4, H100, B200, V100 = ((8, 0), (8, 9), (9, 0), (10, 0), (7, 0))
MASK = torch.ones(6, 6, dtype=torch.bool, device="meta")
CUDNN, OLD = {"cudnn": 91900}, {"cudnn": 91900, "version": (2, 11)}
"""OLD: torch 2.11, as seen on an H200."""


@pytest.mark.parametrize(
    ("kernel", "says", "capability", "given"),
    [
        ("flash", "first that torch tries", A100, {}),
        ("efficient", "flash computes in float16 or bfloat16", A100, {"dtype": torch.float32}),
        ("efficient", "compute capability 8.0", V100, {"dtype": torch.float16}),
        ("math", "multiple of 8", A100, {"width": 260}),
        ("efficient", "backward", L4, {"width": 240, "grad": True, "dropout": 0.1}),
        ("efficient", "lower right", A100, {"causal": True, "keys": 5}),
        ("math", "enable_gqa", A100, {"key_heads": 2}),
        ("cudnn", "first", H100, CUDNN),
        ("flash", "first", H100, {"cudnn": 91400}),
        ("cudnn", "first", B200, CUDNN | {"mask": MASK}),
        ("flash", "steps of 1/16", H100, CUDNN | {"dropout": 0.1}),
        ("cudnn", "first", H100, OLD | {"dropout": 0.1}),
        ("flash", "up to a width of 128", H100, CUDNN | {"width": 136}),
    ],
)
def test_the_kernel_on_another_gpu_follows_torch_s_conditions(kernel, says, capability, given):
    gpu = Gpu(capability=capability, cudnn=given.get("cudnn", 0), torch_version=given.get("version", (2, 13)))
    options = {name: given[name] for name in ("causal", "mask", "dropout") if name in given}
    shape = {name: given[name] for name in ("width", "grad", "keys", "key_heads", "dtype") if name in given}
    q, k, v = (t.to("meta") for t in tensors(**{"dtype": torch.bfloat16} | shape))
    choice = perfagent.best_attention(q, k, v, gpu=gpu, **options)
    assert choice.kernel == kernel, str(choice)
    assert says in str(choice) + " ".join(o.why + o.change for found in choice.obstacles.values() for o in found)
    assert choice.predicted


# ---- seen from outside


class Head(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.qkv, self.dropout = nn.Linear(16, 48), dropout

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        return x + y.transpose(1, 2).flatten(2)


@contextlib.contextmanager
def watched(model):
    original = functional.scaled_dot_product_attention
    with perfagent.watch_attention(model) as seen:
        yield seen
    assert functional.scaled_dot_product_attention is original


def kernels(seen):
    return [(call.count, call.shape, call.choice.kernel) for call in seen.calls]


def test_calls_are_counted_and_slow_ones_warned_of(caplog):
    def trained():
        torch.manual_seed(3)
        model.zero_grad()
        model(x).sum().backward()
        return [*(parameter.grad.clone() for parameter in model.parameters()), torch.rand(2)]

    model, x = nn.Sequential(Head(), Head(), Head(dropout=0.2)), torch.randn(2, 6, 16)
    expected = trained()
    with watched(model) as seen:
        torch.testing.assert_close(trained(), expected, rtol=0, atol=0)
    assert kernels(seen) == [(2, (2, 2, 6, 8), "flash"), (1, (2, 2, 6, 8), "math")]
    assert ["dropout" in warned for warned in caplog.messages] == [True]
    assert "(2, 2, 6, 8) float32: flash" in str(seen)


@pytest.mark.parametrize(("weights", "kernel"), [(True, "explicit"), (False, "flash")])
def test_multi_head_attention_is_slow_with_weights(weights, kernel, caplog):
    attention, x = nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(3, 6, 16)
    with watched(attention) as seen:
        for _ in range(2):
            attention(x, x, x, need_weights=weights)
    assert kernels(seen) == [(2, (3, 2, 6, 8), kernel)]
    assert ["need_weights=False" in warned for warned in caplog.messages] == [True] * weights
    with pytest.raises(AssertionError, match="does not match"), perfagent.watch_attention(warn=False):
        attention(x, x[:, :3], x, need_weights=weights)


@pytest.mark.frameworks
@pytest.mark.parametrize(("how", "calls"), [("sdpa", (3, (2, 2, 9, 8), "flash")), ("eager", (1, (), "explicit"))])
def test_a_model_of_hugging_face_is_seen_as_it_was_loaded(how, calls, caplog):
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=31, attn_implementation=how, **shape))
    with watched(model) as seen:
        model(input_ids=torch.randint(0, 31, (2, 9)))
    assert kernels(seen) == [calls]
    assert bool(seen.slow) == ("attn_implementation" in caplog.text) == (how == "eager")
